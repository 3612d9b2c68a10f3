"""Host registration of the arena: without it copies run at half speed and block the host."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from millpond.arena.arena import Arena
from millpond.arena.touch import map_touched
from millpond.model.limits import GIB, REGISTERED_BYTES
from millpond.transfer import cudart

logger = logging.getLogger("vllm.millpond")

PIECE_BYTES: Final = REGISTERED_BYTES
"""Nobody can launch a kernel meanwhile: 55 ms for a GiB, 0.47 s for 8 GiB (H200)."""
_REMEDY: Final = "raise the limit on locked memory (ulimit -l) or make the pool smaller"
_POLL_S: Final = 0.05
_NUM_THREADS: Final = 2
"""More are no faster: 40 GiB took 2.5 s with one, 1.7 s with two, 1.7 s with four (H200)."""


class Registration:
    """The registration of one mapping, made piece by piece in the background.

    Keeps the mapping alive until ``undo``. A piece is registered once all of its memory is
    there, and mapped here: the driver would take missing pages from the kernel one by one. Slots
    that lie in a registered prefix can be copied at once; others cannot be copied yet. ``prepare``
    runs first in each thread, ``on_first`` once the first piece is registered and before it counts,
    ``on_failure`` where one cannot be, each in the thread that did it. ``is_busy`` says whether
    others use the device: for as long as a registration took, they are left to it before the next.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        prepare: Callable[[], None],
        on_first: Callable[[], None],
        on_failure: Callable[[str], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self.arena = arena
        self._prepare = prepare
        self._on_first = on_first
        self._on_failure = on_failure
        self._is_busy = is_busy
        self._pieces = pieces_of(arena.size_bytes, arena.extent_bytes)
        self._lock = threading.Lock()
        self._next = 0
        self._registered: set[int] = set()
        self._num_bytes = 0
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._gentle = threading.Lock()
        self._started_s = time.monotonic()
        self._threads = [
            threading.Thread(target=self._run, name=f"millpond-register-{i}", daemon=True)
            for i in range(min(_NUM_THREADS, len(self._pieces)))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def failure(self) -> Exception | None:
        """Why registration stopped, or None."""
        return self._failure

    def covers(self, end_offset: int) -> bool:
        """Say whether all bytes of the arena before ``end_offset`` are registered."""
        return end_offset <= self._num_bytes

    def wait(self, timeout_s: float) -> bool:
        """Wait until the whole arena is registered; False on failure or time-out."""
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return self.covers(self.arena.size_bytes)

    def undo(self, timeout_s: float) -> None:
        """Unregister; no copy may be in flight. What is in progress then undoes itself."""
        with self._lock:
            self._stopping.set()
        self.wait(timeout_s)
        with self._lock:
            self._num_bytes = 0
            for index in self._registered:
                self._unregister(index)
            self._registered.clear()

    def _unregister(self, index: int) -> None:
        start, _ = self._pieces[index]
        try:
            cudart.unregister_host(self.arena.address + start)
        except cudart.CudaFailed as error:  # of a device that has failed, say
            logger.warning("event=unregister_failed start=%d reason=%r", start, str(error))

    def _run(self) -> None:
        try:
            self._prepare()
        except Exception as error:  # noqa: BLE001 - or nobody would hear that nothing is registered
            self._fail(error, 0, self.arena.size_bytes)
            return
        while self._go_on():
            continue

    def _go_on(self) -> bool:
        """Register a piece; False once there is none left, or one was refused."""
        if not self._is_busy():
            return self._register_next() is not None
        # One thread at a time, or the pauses of one would be filled by the other.
        with self._gentle:
            took_s = self._register_next()
            if took_s is not None:
                self._stopping.wait(took_s)
        return took_s is not None

    def _register_next(self) -> float | None:
        """Register a piece; return the seconds that it took, or None if there was none to do."""
        index = self._take()
        if index is None:
            return None
        start, num_bytes = self._pieces[index]
        if not self._wait_touched(start + num_bytes):
            return None
        map_touched(self.arena, start, num_bytes)  # other threads can launch kernels meanwhile
        if self._stopping.is_set():
            return None
        began_s = time.monotonic()
        try:
            cudart.register_host(self.arena.address + start, num_bytes)
        except cudart.CudaFailed as error:
            self._fail(error, start, num_bytes)
            return None
        took_s = time.monotonic() - began_s
        try:
            if index == 0:
                self._on_first()
        finally:
            self._note(index)
        return took_s

    def _wait_touched(self, end_offset: int) -> bool:
        """Wait until the arena's memory is there before ``end_offset``; False if it is over."""
        while self.arena.usable_bytes < end_offset:
            if self._stopping.wait(_POLL_S) or self._failure is not None:
                return False
        return True

    def _take(self) -> int | None:
        with self._lock:
            if (
                self._stopping.is_set()
                or self._failure is not None
                or self._next == len(self._pieces)
            ):
                return None
            self._next += 1
            return self._next - 1

    def _note(self, index: int) -> None:
        with self._lock:
            if self._stopping.is_set():  # nobody will undo it later
                self._unregister(index)
                return
            self._registered.add(index)
            num_whole = 0
            while num_whole in self._registered:
                num_whole += 1
            start, num_bytes = self._pieces[num_whole - 1] if num_whole else (0, 0)
            self._num_bytes = start + num_bytes
            is_over = len(self._registered) == len(self._pieces)
        if is_over:
            logger.info(
                "event=arena_registered bytes=%d pieces=%d seconds=%.2f",
                self.arena.size_bytes,
                len(self._pieces),
                time.monotonic() - self._started_s,
            )

    def _fail(self, error: Exception, start: int, num_bytes: int) -> None:
        with self._lock:
            self._failure = self._failure or error
        logger.error(
            "event=register_failed start=%d bytes=%d reason=%r remedy=%r",
            start,
            num_bytes,
            str(error),
            _REMEDY,
        )
        self._on_failure(
            f"{num_bytes // GIB} GiB at {start // GIB} GiB not registered: {error}; {_REMEDY}"
        )


def pieces_of(size_bytes: int, extent_bytes: int) -> Sequence[tuple[int, int]]:
    """Return (start, bytes) of the pieces in which an arena is registered, in order.

    A piece ends where an extent does, so that no slot lies in two of them.
    """
    piece_bytes = max(1, PIECE_BYTES // extent_bytes) * extent_bytes
    return [
        (start, min(piece_bytes, size_bytes - start)) for start in range(0, size_bytes, piece_bytes)
    ]
