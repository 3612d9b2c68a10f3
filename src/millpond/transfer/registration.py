"""Host registration of the arena: without it copies run at half speed and block the host."""

import logging
import threading
import time
from typing import Final

import torch

from millpond.arena.arena import Arena
from millpond.model.limits import GIB
from millpond.transfer import cudart

logger = logging.getLogger("vllm.millpond")

PIECE_BYTES: Final = 64 * GIB
"""Largest piece that is registered in one call."""


class Registration:
    """The registration of one mapping, made piece by piece in the background.

    Keeps the mapping alive until ``undo``. Slots that lie in a registered prefix can be
    copied at once; others cannot be copied yet.
    """

    def __init__(self, arena: Arena, device: torch.device) -> None:
        self.arena = arena
        self._device = device
        self._num_bytes = 0
        self._starts: list[int] = []
        self._failure: cudart.CudaFailed | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="millpond-register", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> cudart.CudaFailed | None:
        """Why registration stopped, or None."""
        return self._failure

    def covers(self, end_offset: int) -> bool:
        """Say whether all bytes of the arena before ``end_offset`` are registered."""
        return end_offset <= self._num_bytes

    def wait(self, timeout_s: float) -> bool:
        """Wait until the whole arena is registered; False on failure or time-out."""
        self._thread.join(timeout_s)
        return self.covers(self.arena.size_bytes)

    def undo(self, timeout_s: float) -> None:
        """Unregister; no copy may be in flight. Bounded by the piece in progress."""
        self._stopping = True
        self._thread.join(timeout_s)
        self._num_bytes = 0
        while self._starts:
            cudart.unregister_host(self._starts.pop())

    def _run(self) -> None:
        # A new thread stands on device 0, where another rank's memory has been sized already.
        torch.cuda.set_device(self._device)
        started_s = time.monotonic()
        size = self.arena.size_bytes
        for start in range(0, size, PIECE_BYTES):
            if self._stopping:
                return
            num_bytes = min(PIECE_BYTES, size - start)
            try:
                cudart.register_host(self.arena.address + start, num_bytes)
            except cudart.CudaFailed as error:
                self._failure = error
                logger.error(
                    "event=register_failed start=%d bytes=%d reason=%r remedy=%r",
                    start,
                    num_bytes,
                    str(error),
                    "raise the limit on locked memory (ulimit -l) or make the pool smaller",
                )
                return
            self._starts.append(self.arena.address + start)
            self._num_bytes = start + num_bytes
        logger.info(
            "event=arena_registered bytes=%d seconds=%.2f", size, time.monotonic() - started_s
        )
