"""A device whose streams have room when the test says so, and copies of nothing for it."""

import threading
from collections.abc import Callable

import numpy as np

from millpond.transfer import Copies, Direction, Ends, Ticket
from millpond.transfer.cpu import CpuDevice, PassedFence
from millpond.transfer.device import Event, Fence
from millpond.transfer.streams import StreamCopyEngine
from millpond.transfer.threads import ThreadEvent, ThreadStream

WAIT_S = 10.0
FEW, PORTION, MANY = 1, 2, 6


class SlowStream:
    """Has no room for a second portion until the test says so; notes who enqueued what."""

    def __init__(self) -> None:
        self.inner = ThreadStream("test")
        self.taken: list[tuple[int, str]] = []
        self.room = ThreadEvent()
        self.is_full = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def portion(self, copies: Copies) -> int:
        del copies
        return PORTION

    def awaited(self, copies: Copies) -> Event | None:
        if not self.taken or self.room.is_passed() or len(copies.lengths) < PORTION:
            return None
        self.is_full.set()
        return self.room

    def wait_for(self, fence: Fence) -> None:
        self.inner.wait_for(fence)

    def copy(self, copies: Copies) -> object:
        self.taken.append((len(copies.lengths), threading.current_thread().name))
        return self.inner.copy(copies)

    def record(self) -> ThreadEvent:
        self.inner.enqueue(lambda: wait_set(self.may_end))
        return self.inner.record()

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)


def wait_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


class SlowDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.streams = {direction: SlowStream() for direction in Direction}

    def stream(self, direction: Direction) -> SlowStream:
        return self.streams[direction]


def submit(
    engine: StreamCopyEngine,
    direction: Direction,
    num_copies: int,
    on_landed: Callable[[], None] | None = None,
    on_done: Callable[[Ticket], object] | None = None,
) -> threading.Event:
    """Submit copies of nothing to nowhere."""
    nothing = np.zeros(num_copies, np.uint64)
    done = threading.Event()

    def end(ticket: Ticket) -> None:
        if on_done is not None:
            on_done(ticket)
        done.set()

    engine.submit(
        direction,
        Copies(nothing, nothing, nothing),
        after=PassedFence(),
        keep_alive=None,
        ends=Ends(end, on_landed),
    )
    return done
