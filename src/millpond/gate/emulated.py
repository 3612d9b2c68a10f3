"""A device of threads: the gate's tests where there is no GPU.

Streams are those of ``transfer.threads`` with what the tests need besides: a current stream a
thread, a legacy stream, priorities at a copy engine that all share, tables of addresses that
live on the device, and holds. What is tested about it is in tests/unit/test_gate_emulated.py.

    legacy stream    waits for blocking streams, and they wait for it; non-blocking streams,
                     which are all that torch makes, do neither
    copy engine      one copy at a time; of those that wait, the lowest priority number first
    tables           addresses of a submission lie in memory of the device: once given up,
                     they are overwritten with others, as an allocator would hand them out again
"""

import ctypes
import heapq
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.arena.arena import Arena
from millpond.gate.device import SETTLE_S_MAX, Hold, Size, Where
from millpond.gate.patterns import Epoch, pattern
from millpond.model.limits import KIB
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import CopyFailed, Device, Event, Fence, Stream
from millpond.transfer.routes import Route
from millpond.transfer.threads import ThreadEvent, ThreadStream

_PORTION_COPIES: Final = 8
_BEHIND_A_FENCE_MAX: Final = 12
_SIZES: Final = (
    # Two thirds of the pages are copied: of 15 all at once, of 24 the last portion when the
    # fence is passed.
    Size(num_pages=15, page_bytes=16 * KIB),
    Size(num_pages=24, page_bytes=16 * KIB),
)
_PRIORITIES: Final = {Direction.LOAD: -1, Direction.STORE: 0}
_COPIES_BYTES_MAX: Final = 1024 * KIB
"""Longest copy: what the decoy can stand in for."""


class _Current(threading.local):
    """The current stream of each thread."""

    stream: "EmulatedStream | None" = None


_current: Final = _Current()


def current_stream() -> "EmulatedStream":
    """Return the calling thread's current stream; ``LookupError`` outside of a gate's test."""
    stream = _current.stream
    if stream is None:
        raise LookupError("no emulated stream is current in this thread")
    return stream


class CopyPort:
    """The copy engine of the device: one copy at a time, the most urgent first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int]] = []
        self._numbers = itertools.count()
        self._is_busy = False

    @contextmanager
    def taken(self, priority: int) -> Generator[None]:
        """Wait for the turn of ``priority``, lowest first, and keep the port meanwhile."""
        with self._changed:
            mine = (priority, next(self._numbers))
            heapq.heappush(self._waiting, mine)
            self._changed.wait_for(lambda: not self._is_busy and self._waiting[0] == mine)
            heapq.heappop(self._waiting)
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()


class _Staged:
    """A table of addresses; dropping the last reference gives its memory to somebody else."""


class EmulatedStream(ThreadStream):
    """A stream of the device; ``blocking`` ones keep order with the legacy stream."""

    def __init__(
        self, device: "EmulatedDevice", name: str, *, priority: int = 0, blocking: bool = False
    ) -> None:
        super().__init__(f"gate-{name}")
        self.blocking = blocking
        self._device = device
        self._priority = priority
        self._fence: ThreadEvent | None = None
        self._num_behind = 0
        self.is_closed = False

    def append(self, work: Callable[[], None]) -> None:
        """Queue ``work``, in order with this stream alone."""
        super().enqueue(work)

    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue ``work``, in order with the legacy stream where CUDA does so."""
        for other in self._device.implied(self):
            passed = threading.Event()
            other.append(passed.set)
            self.append(lambda passed=passed: _wait_set(passed))
        self.append(work)

    def wait_for(self, fence: Fence) -> None:
        """As every stream of threads; the copies behind the fence are counted."""
        self._fence = fence if isinstance(fence, ThreadEvent) else None
        self._num_behind = 0
        super().wait_for(fence)

    def portion(self, copies: Copies) -> int:
        """Return a small number, as small as it takes for there to be several."""
        del copies
        return _PORTION_COPIES

    def awaited(self, copies: Copies) -> Event | None:
        """Return the fence while it is not passed and many copies are behind it."""
        if self._fence is None or self._fence.is_passed():
            return None
        num_behind = self._num_behind + len(copies.lengths)
        return self._fence if num_behind > _BEHIND_A_FENCE_MAX else None

    def copy(self, copies: Copies) -> object:
        """Queue copies whose addresses lie in a table on the device; see the module."""
        self._num_behind += len(copies.lengths)
        table = np.stack([copies.sources, copies.targets, copies.lengths])
        staged = _Staged()
        weakref.finalize(staged, self._device.reuse_table, table)
        self.enqueue(lambda: self._copy_pages(table))
        return staged

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread; False when the time ran out."""
        self.is_closed = True
        return super().close(timeout_s)

    def _copy_pages(self, table: NDArray[np.uint64]) -> None:
        if self._error is not None:
            return
        for page in range(table.shape[1]):
            with self._device.port.taken(self._priority):
                # Looked up page by page, as a kernel does: the table must still be there.
                source, target, length = table[:, page].tolist()
                ctypes.memmove(target, source, length)


class EmulatedHold:
    """See ``Hold``."""

    def __init__(self) -> None:
        self._released = threading.Event()
        self._left = threading.Event()

    def is_open(self) -> bool:
        """Say whether the stream has come past it."""
        return self._left.is_set()

    def release(self) -> None:
        """Let the stream go on."""
        self._released.set()

    def run(self, limit_s: float) -> None:
        """Hold the stream whose thread this is."""
        self._released.wait(limit_s)
        self._left.set()


class EmulatedCopier:
    """The ``Device`` of a copy engine over the emulated streams; all memory is ready."""

    def __init__(self, device: "EmulatedDevice") -> None:
        self._device = device

    def fence(self) -> Event:
        """Return a fence behind the calling thread's current stream: the legacy one by default."""
        return (_current.stream or self._device.legacy).record()

    @property
    def can_hold_back(self) -> bool:
        """Return True."""
        return True

    def hold_back(self, end: Event) -> None:
        """Let the calling thread's current stream wait for an event."""
        (_current.stream or self._device.legacy).wait_for(end)

    def stream(self, direction: Direction) -> Stream:
        """Make a non-blocking stream for one direction; loads go before stores."""
        return self._device.make_stream(direction.value, priority=_PRIORITIES[direction])

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    def adopt(self, arena: Arena) -> None:
        """Nothing to do."""

    def is_ready(self, end_offset: int) -> bool:
        """Return True for every offset."""
        return end_offset >= 0

    def release(self, timeout_s: float) -> None:
        """Nothing to give up."""


class EmulatedDevice:
    """A ``GateDevice`` of threads."""

    name = "emulated: streams are threads, no GPU was used"
    is_emulated = True
    routes: Sequence[tuple[Route, Size]] = tuple((Route.LOOP, size) for size in _SIZES)

    def __init__(self) -> None:
        self.port = CopyPort()
        self._streams: list[EmulatedStream] = []
        self._decoy = pattern([0], _COPIES_BYTES_MAX, Epoch.RECYCLED)
        self.legacy = self.make_stream("legacy")
        self._by_name = {
            Where.WORK: self.make_stream("work"),
            Where.OTHER: self.make_stream("other"),
            Where.LEGACY: self.legacy,
        }

    def make_stream(
        self, name: str, *, priority: int = 0, blocking: bool = False
    ) -> EmulatedStream:
        """Make a stream; it lives until it, or the device, is closed."""
        stream = EmulatedStream(self, name, priority=priority, blocking=blocking)
        self._streams = [other for other in self._streams if not other.is_closed]
        self._streams.append(stream)
        return stream

    def implied(self, stream: EmulatedStream) -> list[EmulatedStream]:
        """Return the streams that work on ``stream`` waits for without being told to."""
        if stream is self.legacy:
            return [other for other in self._streams if other.blocking and not other.is_closed]
        return [self.legacy] if stream.blocking else []

    def reuse_table(self, table: NDArray[np.uint64]) -> None:
        """Give the memory of a table to somebody else."""
        table[0] = self._decoy.ctypes.data

    def copier(self, route: Route) -> Device:
        """Make the device of a copy engine."""
        if route is not Route.LOOP:
            raise ValueError(f"no route {route.value!r} without a GPU")
        return EmulatedCopier(self)

    def make_pages(self, size: Size) -> torch.Tensor:
        """Return zeroed pages."""
        return torch.zeros((size.num_pages, size.page_bytes), dtype=torch.uint8)

    def make_host(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    @contextmanager
    def on(self, where: Where) -> Generator[None]:
        """Make a stream the current one of the calling thread."""
        before, _current.stream = _current.stream, self._by_name[where]
        try:
            yield
        finally:
            _current.stream = before

    def hold(self, limit_s: float) -> Hold:
        """Hold the current stream up."""
        hold = EmulatedHold()
        current_stream().enqueue(lambda: hold.run(limit_s))
        return hold

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue a memory copy."""
        start, end, length = source.data_ptr(), target.data_ptr(), source.nbytes
        if length != target.nbytes:
            raise ValueError(f"{length} bytes for {target.nbytes}")
        current_stream().enqueue(lambda: _copy_bytes(end, start, length))

    def point(self) -> Fence:
        """Return an event behind all work on the current stream."""
        return current_stream().record()

    def recycle(self, num_bytes: int) -> None:
        """Take memory from the allocator, and write into it."""
        torch.full((num_bytes,), int(Epoch.RECYCLED), dtype=torch.uint8)

    def write(self, pages: torch.Tensor, data: NDArray[np.uint8]) -> None:
        """Write pages now."""
        pages.numpy()[:] = data

    def read(self, pages: torch.Tensor) -> NDArray[np.uint8]:
        """Return the bytes of pages as they are now."""
        return pages.numpy().copy()

    def synchronize(self) -> None:
        """Wait until all streams have done what was enqueued."""
        deadline_s = time.monotonic() + SETTLE_S_MAX
        for stream in [stream for stream in self._streams if not stream.is_closed]:
            passed = threading.Event()
            stream.append(passed.set)
            if not passed.wait(max(0.0, deadline_s - time.monotonic())):
                raise CopyFailed(f"the device was not done after {SETTLE_S_MAX:.0f} s")

    def close(self) -> None:
        """End all streams."""
        deadline_s = time.monotonic() + SETTLE_S_MAX
        for stream in [stream for stream in self._streams if not stream.is_closed]:
            stream.close(max(0.0, deadline_s - time.monotonic()))


def _copy_bytes(target: int, source: int, length: int) -> None:
    ctypes.memmove(target, source, length)


def _wait_set(passed: threading.Event) -> None:
    if not passed.wait(SETTLE_S_MAX):
        raise CopyFailed(f"the legacy stream was not passed within {SETTLE_S_MAX:.0f} s")
