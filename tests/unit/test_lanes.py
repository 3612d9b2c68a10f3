"""A lane keeps the order of its submissions, whoever puts them on the stream."""

import queue
import threading

import numpy as np
import pytest

from millpond.transfer import Copies, Direction, Ticket
from millpond.transfer.cpu import CpuDevice, PassedFence
from millpond.transfer.device import Fence
from millpond.transfer.streams import StreamCopyEngine
from millpond.transfer.threads import ThreadEvent, ThreadStream

WAIT_S = 10.0
FEW, MANY = 1, 2


class SlowStream:
    """Takes its time to enqueue many copies; notes what was enqueued, and by whom."""

    def __init__(self) -> None:
        self.inner = ThreadStream("test")
        self.taken: list[tuple[int, str]] = []
        self.is_in_copy = threading.Event()
        self.may_go_on = threading.Event()

    def is_quick(self, copies: Copies) -> bool:
        return len(copies.lengths) < MANY

    def wait_for(self, fence: Fence) -> None:
        self.inner.wait_for(fence)

    def copy(self, copies: Copies) -> object:
        if not self.is_quick(copies):
            self.is_in_copy.set()
            assert self.may_go_on.wait(WAIT_S)
        self.taken.append((len(copies.lengths), threading.current_thread().name))
        return self.inner.copy(copies)

    def record(self) -> ThreadEvent:
        return self.inner.record()

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)


class SlowDevice(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self.streams = {direction: SlowStream() for direction in Direction}

    def stream(self, direction: Direction) -> SlowStream:
        return self.streams[direction]


def submit(engine: StreamCopyEngine, direction: Direction, num_copies: int) -> threading.Event:
    """Submit copies of nothing to nowhere."""
    nothing = np.zeros(num_copies, np.uint64)
    done = threading.Event()
    engine.submit(
        direction,
        Copies(nothing, nothing, nothing),
        after=PassedFence(),
        keep_alive=None,
        on_done=lambda _: done.set(),
    )
    return done


def test_many_copies_do_not_hold_up_who_submits_them_and_few_are_not_handed_on() -> None:
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    me = threading.current_thread().name
    stream = device.streams[Direction.LOAD]
    assert submit(engine, Direction.LOAD, FEW).wait(WAIT_S)
    many = submit(engine, Direction.LOAD, MANY)  # comes back though the stream does not
    assert stream.is_in_copy.wait(WAIT_S)
    few = submit(engine, Direction.LOAD, FEW)
    assert submit(engine, Direction.STORE, FEW).wait(WAIT_S)  # another lane
    assert not many.is_set()
    assert not few.is_set()
    stream.may_go_on.set()
    assert many.wait(WAIT_S)
    assert few.wait(WAIT_S)
    assert [number for number, _ in stream.taken] == [FEW, MANY, FEW]
    assert stream.taken[0][1] == me
    assert stream.taken[1][1] != me
    assert engine.close(WAIT_S)


def test_a_lane_that_is_closed_finishes_what_waits() -> None:
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.STORE]
    many, few = submit(engine, Direction.STORE, MANY), submit(engine, Direction.STORE, FEW)
    assert stream.is_in_copy.wait(WAIT_S)
    assert not engine.close(0.0)
    stream.may_go_on.set()
    assert engine.close(WAIT_S)
    assert many.is_set()
    assert few.is_set()


class BrokenStream(SlowStream):
    """Fails in a way that nobody has thought of, where the test says so."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def _fail_at(self, place: str) -> None:
        if self.place == place:
            raise OSError(f"no {place} today")

    def copy(self, copies: Copies) -> object:
        self._fail_at("copy")
        return self.inner.copy(copies)

    def record(self) -> ThreadEvent:
        self._fail_at("record")
        return self.inner.record()


@pytest.mark.parametrize("num_copies", [FEW, MANY], ids=["caller's thread", "lane's thread"])
@pytest.mark.parametrize("place", ["copy", "record"])
def test_what_nobody_thought_of_is_the_error_of_its_copies_and_no_more(
    place: str, num_copies: int
) -> None:
    device = SlowDevice()
    broken = device.streams[Direction.LOAD] = BrokenStream(place)
    engine = StreamCopyEngine(device)
    for _ in range(2):  # the lane goes on
        tickets: queue.Queue[Ticket] = queue.Queue()
        nothing = np.zeros(num_copies, np.uint64)
        engine.submit(
            Direction.LOAD,
            Copies(nothing, nothing, nothing),
            after=PassedFence(),
            keep_alive=None,
            on_done=tickets.put,
        )
        assert tickets.get(timeout=WAIT_S).error == f"no {place} today"
    broken.place = "nowhere"
    assert submit(engine, Direction.LOAD, FEW).wait(WAIT_S)
    assert engine.close(WAIT_S)


def test_an_end_that_fails_does_not_end_the_lane() -> None:
    engine = StreamCopyEngine(CpuDevice())
    nothing = np.zeros(FEW, np.uint64)

    def fail(_: Ticket) -> None:
        raise ValueError("planted")

    engine.submit(
        Direction.STORE,
        Copies(nothing, nothing, nothing),
        after=PassedFence(),
        keep_alive=None,
        on_done=fail,
    )
    assert submit(engine, Direction.STORE, FEW).wait(WAIT_S)
    assert engine.close(WAIT_S)
