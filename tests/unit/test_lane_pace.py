"""Small copies of the engine's own go first: loads keep a pace, stores come a step later."""

import threading

import numpy as np
import pytest

from millpond.transfer import Copies, Direction, Ends, Pace
from millpond.transfer.cpu import PassedFence
from millpond.transfer.device import Event, Fence
from millpond.transfer.streams import StreamCopyEngine
from millpond.transfer.threads import ThreadEvent
from tests.slow_device import FEW, WAIT_S, SlowDevice, SlowStream, submit
from tests.waiting import eventually


def test_a_store_leaves_the_copies_of_its_own_step_to_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens of the step, which the host waits for, would queue behind it."""
    monkeypatch.setattr("millpond.transfer.streams._STEP_S", WAIT_S)
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.STORE]
    done = submit(engine, Direction.STORE, FEW)
    engine.step()  # of the step that submitted it
    assert stream.taken == []
    engine.begin_step()
    assert stream.taken == [(FEW, threading.current_thread().name)]
    assert done.wait(WAIT_S)
    assert engine.close(WAIT_S)


def test_a_store_is_handed_over_by_the_lane_where_no_step_follows() -> None:
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    assert submit(engine, Direction.STORE, FEW).wait(WAIT_S)
    assert device.streams[Direction.STORE].taken == [(FEW, "millpond-store-enqueue")]
    assert engine.close(WAIT_S)


class Clock:
    """What the lanes take for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("millpond.transfer.streams.time", self)

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


class CountingStream(SlowStream):
    """Has room for all, and moves nothing. Its events are passed when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[ThreadEvent] = []

    def portion(self, copies: Copies) -> int:
        return len(copies.lengths)

    def awaited(self, copies: Copies) -> Event | None:
        del copies
        return None

    def copy(self, copies: Copies) -> object:
        self.taken.append((copies.num_bytes, threading.current_thread().name))
        return None

    def record(self) -> ThreadEvent:
        self.ends.append(ThreadEvent())
        return self.ends[-1]

    def pass_all(self) -> None:
        for end in self.ends:
            end.pass_now(None)


class PacedLoads:
    """Ten copies of 30 bytes on their way, at a link of 100 bytes a second."""

    def __init__(self, pace: Pace | None, *, after: Fence | None = None) -> None:
        device = SlowDevice()
        self.stream = CountingStream()
        device.streams[Direction.LOAD] = self.stream
        self.engine = StreamCopyEngine(device)
        self.engine.pace(pace)
        self.done = threading.Event()
        nowhere = np.zeros(10, np.uint64)
        self.engine.submit(
            Direction.LOAD,
            Copies(nowhere, nowhere, np.full(10, 30, np.uint64)),
            after=after or PassedFence(),
            keep_alive=None,
            ends=Ends(lambda _: self.done.set()),
        )

    @property
    def num_bytes(self) -> int:
        return sum(number for number, _ in self.stream.taken)

    def wait_done(self) -> bool:
        """Let the device come past all there is; say whether that is all."""

        def is_over() -> bool:
            self.stream.pass_all()
            return self.done.is_set()

        eventually(is_over, "the load is over", timeout_s=WAIT_S)
        return self.num_bytes == 300 and self.engine.close(WAIT_S)


def link(clock: Clock, busy_s: float) -> Pace:
    return Pace(100.0, clock.now_s + busy_s, clock.now_s + 3600.0)


def test_of_a_load_so_much_is_on_the_stream_as_is_over_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    loads = PacedLoads(link(clock, 1.0))
    assert loads.num_bytes == 120  # three, and one at least where there is any room
    clock.now_s += 0.5
    loads.engine.step()
    assert loads.num_bytes == 120  # the link is still busy with them when its time is over
    clock.now_s += 0.5
    loads.stream.pass_all()
    loads.engine.pace(link(clock, 1.0))
    assert loads.num_bytes == 180  # two, for of the second 0.2 go to those before
    loads.engine.step()
    assert loads.num_bytes == 210  # and one
    assert not loads.done.is_set()
    loads.stream.pass_all()
    loads.engine.pace(None)
    loads.engine.step()
    assert loads.num_bytes == 300
    assert loads.wait_done()


def test_what_is_handed_over_late_in_a_step_has_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    fence = ThreadEvent()
    loads = PacedLoads(link(clock, 1.0), after=fence)
    assert loads.num_bytes == 0  # when its fence will be passed nobody knows
    clock.now_s += 0.7
    fence.pass_now(None)
    loads.engine.step()
    assert loads.num_bytes == 30
    loads.engine.pace(None)
    loads.engine.step()
    assert loads.wait_done()


def test_a_portion_that_takes_longer_than_expected_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    loads = PacedLoads(link(clock, 1.0))
    clock.now_s += 10.0
    loads.engine.pace(link(clock, 1.0))
    assert loads.num_bytes == 120  # the link is shared with others, say
    loads.stream.pass_all()
    loads.engine.step()
    assert loads.num_bytes == 210
    loads.engine.pace(None)
    loads.engine.step()
    assert loads.wait_done()


def test_a_load_whose_engine_comes_by_no_more_is_handed_over_by_the_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    loads = PacedLoads(link(clock, 0.0))
    assert loads.num_bytes == 0
    clock.now_s += 3600.0
    assert loads.wait_done()
    assert {thread for _, thread in loads.stream.taken} == {"millpond-load-enqueue"}


def test_an_engine_that_stops_computing_leaves_the_rest_to_the_lane(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    loads = PacedLoads(link(clock, 0.0))
    assert loads.num_bytes == 0
    loads.engine.pace(None)
    clock.now_s += 1.0
    assert loads.wait_done()


def test_a_lane_that_is_closed_keeps_no_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    loads = PacedLoads(link(clock, 0.0))
    clock.now_s += 1.0
    assert not loads.engine.close(0.0)
    assert loads.wait_done()
