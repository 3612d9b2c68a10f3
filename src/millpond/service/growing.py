"""Memory on its way to the pool: touched in other threads, given to the pool in the loop's."""

import logging
from collections.abc import Callable
from typing import Final

from millpond.arena.touch import Touching
from millpond.pool.pool import Pool

_LOG: Final = logging.getLogger(__name__)


class Growth:
    """Gives a pool the memory that has been touched, whenever ``fd`` is readable.

    It comes in steps of ``step_bytes``, up to ``size_bytes``, which need not be whole steps.
    ``on_progress(usable_bytes, size_bytes)`` is called from ``take``.
    """

    def __init__(
        self,
        pool: Pool,
        touching: Touching,
        *,
        size_bytes: int,
        step_bytes: int,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self._pool = pool
        self._touching = touching
        self._size_bytes = size_bytes
        self._step_bytes = step_bytes
        self._on_progress = on_progress
        self._usable_bytes = 0
        self._problem: str | None = None

    @property
    def usable_bytes(self) -> int:
        """What the pool has been given."""
        return self._usable_bytes

    @property
    def fd(self) -> int:
        """What to watch; it stays the touching's."""
        return self._touching.news_fd

    def take(self) -> None:
        """Give the pool what has come since the last time; for the pool's own thread."""
        self._touching.take_news()
        failure = self._touching.failure  # before the bytes: none come after it
        usable_bytes = self._touching.touched_bytes
        if usable_bytes < self._size_bytes:
            usable_bytes -= usable_bytes % self._step_bytes
        if usable_bytes > self._usable_bytes:
            self._usable_bytes = usable_bytes
            self._pool.grow(usable_bytes)
            if usable_bytes == self._size_bytes:
                _LOG.info("memory complete bytes=%d", usable_bytes)
            self._on_progress(usable_bytes, self._size_bytes)
        if failure is not None and self._problem is None:
            self._problem = str(failure)
            _LOG.error(
                "memory ran out, serving with less usable_bytes=%d size_bytes=%d reason=%s",
                self._usable_bytes,
                self._size_bytes,
                failure,
            )

    def statistics(self) -> dict[str, object]:
        """Return how much memory the pool has of what it was to have, and why not all."""
        return {
            "size_bytes": self._size_bytes,
            "usable_bytes": self._usable_bytes,
            "problem": self._problem,
        }
