"""A lane keeps the order of its submissions, whoever puts them on the stream."""

import queue
import threading
from collections.abc import Callable

import numpy as np
import pytest

from millpond.transfer import Copies, Direction, Ends, Pace, Ticket
from millpond.transfer.cpu import CpuDevice, PassedFence
from millpond.transfer.device import Event, Fence
from millpond.transfer.streams import Handover, StreamCopyEngine, Submission
from millpond.transfer.threads import ThreadEvent, ThreadStream
from tests.waiting import eventually

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
        self.inner.enqueue(lambda: _wait_set(self.may_end))
        return self.inner.record()

    def close(self, timeout_s: float) -> bool:
        return self.inner.close(timeout_s)


def _wait_set(event: threading.Event) -> None:
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


def test_who_submits_hands_over_what_there_is_room_for_and_the_lane_the_rest() -> None:
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    me = threading.current_thread().name
    stream = device.streams[Direction.LOAD]
    many = submit(engine, Direction.LOAD, MANY)  # comes back though the stream is full
    assert stream.taken == [(PORTION, me)]
    few = submit(engine, Direction.LOAD, FEW)
    assert submit(engine, Direction.STORE, FEW).wait(WAIT_S)  # another lane
    assert not many.is_set()
    assert not few.is_set()
    stream.room.pass_now(None)
    assert many.wait(WAIT_S)
    assert few.wait(WAIT_S)
    assert [number for number, _ in stream.taken] == [PORTION, PORTION, PORTION, FEW]
    assert {thread for _, thread in stream.taken[1:]} == {"millpond-load-enqueue"}
    assert engine.close(WAIT_S)


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


def test_who_submits_goes_on_while_it_comes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.transfer.streams._STEP_S", WAIT_S)  # the lane's thread waits
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    me = threading.current_thread().name
    stream = device.streams[Direction.LOAD]
    many = submit(engine, Direction.LOAD, MANY)
    engine.step()  # no room, and no wait
    assert stream.taken == [(PORTION, me)]
    stream.room.pass_now(None)
    engine.step()
    assert stream.taken == [(PORTION, me)] * 2
    engine.step()
    assert many.wait(WAIT_S)
    assert stream.taken == [(PORTION, me)] * 3
    assert engine.close(WAIT_S)


def comes_by(engine: StreamCopyEngine, told: list[str], *, early: bool = False) -> bool:
    engine.step(early=early)
    return bool(told)


def test_a_landing_is_told_of_once_by_who_comes_by_though_the_lane_is_busy() -> None:
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.LOAD]
    may_end, told = threading.Event(), list[str]()
    submit(engine, Direction.LOAD, FEW, on_done=lambda _: _wait_set(may_end))  # keeps the thread
    stream.may_end.clear()
    done = submit(engine, Direction.LOAD, FEW, lambda: told.append(threading.current_thread().name))
    engine.step()
    assert told == []  # enqueued is not landed
    stream.may_end.set()
    eventually(lambda: comes_by(engine, told), "the load lands", timeout_s=WAIT_S)
    assert told == [threading.current_thread().name]
    assert not done.is_set()
    may_end.set()
    assert done.wait(WAIT_S)
    engine.step()
    assert len(told) == 1
    assert engine.close(WAIT_S)


class StreamedDevice(SlowDevice):
    """One whose current stream can wait; ``held`` is what it has been told to wait for."""

    can_hold_back = True

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Event] = []

    def hold_back(self, end: Event) -> None:
        assert self.can_hold_back
        self.held.append(end)


def test_who_asks_is_told_early_once_all_copies_are_on_the_stream() -> None:
    device = StreamedDevice()
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.LOAD]
    stream.may_end.clear()
    told: list[str] = []
    done = submit(engine, Direction.LOAD, MANY, lambda: told.append("landed"))
    engine.step(early=True)
    assert (device.held, told) == ([], [])  # some copies are not on the stream
    stream.room.pass_now(None)
    eventually(lambda: len(stream.taken) == MANY // PORTION, "all are on it", timeout_s=WAIT_S)
    engine.step()
    assert (device.held, told) == ([], [])  # nobody has asked
    eventually(lambda: comes_by(engine, told, early=True), "it is told of", timeout_s=WAIT_S)
    assert device.held == []  # that is up to who was told
    engine.hold_back()
    (end,) = device.held
    assert not end.is_passed()
    assert not done.is_set()
    engine.step(early=True)
    stream.may_end.set()
    assert done.wait(WAIT_S)
    engine.step(early=True)
    engine.hold_back()
    assert len(told) == len(device.held) == 1
    assert engine.close(WAIT_S)


def test_of_several_loads_one_is_told_early_at_a_time() -> None:
    """Their requests would run together, behind the last of them."""
    device = StreamedDevice()
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.LOAD]
    stream.may_end.clear()
    told: list[str] = []
    first = submit(engine, Direction.LOAD, FEW, lambda: told.append("first"))
    second = submit(engine, Direction.LOAD, FEW, lambda: told.append("second"))
    engine.step(early=True)
    engine.hold_back()
    engine.step(early=True)  # also once a stream waits for the first
    engine.hold_back()
    assert told == ["first"]
    assert len(device.held) == 1
    stream.may_end.set()
    assert first.wait(WAIT_S)
    assert second.wait(WAIT_S)
    assert told == ["first", "second"]
    assert engine.close(WAIT_S)


def test_nobody_is_told_early_where_nothing_can_be_held_back() -> None:
    device = StreamedDevice()
    device.can_hold_back = False
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.LOAD]
    stream.may_end.clear()
    told: list[str] = []
    done = submit(engine, Direction.LOAD, FEW, lambda: told.append("landed"))
    engine.step(early=True)
    engine.hold_back()
    assert told == []
    stream.may_end.set()
    assert done.wait(WAIT_S)
    assert told == ["landed"]
    assert engine.close(WAIT_S)


def test_copies_that_could_not_be_enqueued_are_not_told_of_early() -> None:
    device = StreamedDevice()
    half = device.streams[Direction.LOAD] = HalfStream()
    half.room.pass_now(None)
    half.may_end.clear()
    engine = StreamCopyEngine(device)
    told: list[str] = []
    done = submit(engine, Direction.LOAD, MANY, lambda: told.append("landed"))
    engine.step(early=True)
    half.may_end.set()
    assert done.wait(WAIT_S)
    engine.hold_back()
    assert (told, device.held) == ([], [])
    assert engine.close(WAIT_S)


def test_a_landing_is_told_of_before_the_end_where_nobody_comes_by() -> None:
    engine = StreamCopyEngine(SlowDevice())
    told: list[str] = []
    done = threading.Event()
    submit(
        engine,
        Direction.LOAD,
        FEW,
        lambda: told.append("landed"),
        on_done=lambda _: (told.append("done"), done.set()),
    )
    assert done.wait(WAIT_S)
    assert told == ["landed", "done"]
    assert engine.close(WAIT_S)


def test_what_fails_does_not_land_for_who_comes_by_first() -> None:
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.LOAD]
    may_end, told = threading.Event(), list[str]()
    submit(engine, Direction.LOAD, FEW, on_done=lambda _: _wait_set(may_end))  # keeps the thread

    def fail() -> None:
        raise OSError("planted")

    passed = threading.Event()
    stream.inner.enqueue(fail)
    done = submit(engine, Direction.LOAD, FEW, lambda: told.append("landed"))
    stream.inner.enqueue(passed.set)
    assert passed.wait(WAIT_S)  # its end is passed, in failure
    engine.step()
    assert told == []
    may_end.set()
    assert done.wait(WAIT_S)
    engine.step()
    assert told == []
    assert engine.close(WAIT_S)


def test_a_landing_that_raises_ends_neither_the_lane_nor_who_comes_by() -> None:
    engine = StreamCopyEngine(SlowDevice())

    def fail() -> None:
        raise MemoryError("planted")

    assert submit(engine, Direction.LOAD, FEW, fail).wait(WAIT_S)
    assert submit(engine, Direction.LOAD, FEW).wait(WAIT_S)
    assert engine.close(WAIT_S)


def test_an_exit_that_comes_while_copies_are_handed_over_leaves_the_lane_working() -> None:
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.LOAD]
    with pytest.MonkeyPatch.context() as patch:

        def leave(_: Copies) -> object:
            raise SystemExit("a signal's handler")

        patch.setattr(stream, "copy", leave)
        with pytest.raises(SystemExit):
            submit(engine, Direction.LOAD, FEW)
    assert submit(engine, Direction.LOAD, FEW).wait(WAIT_S)
    assert engine.close(WAIT_S)


def test_a_lane_that_is_closed_finishes_what_waits() -> None:
    device = SlowDevice()
    engine = StreamCopyEngine(device)
    stream = device.streams[Direction.STORE]
    many, few = submit(engine, Direction.STORE, MANY), submit(engine, Direction.STORE, FEW)
    assert stream.is_full.wait(WAIT_S)
    assert not engine.close(0.0)
    stream.room.pass_now(None)
    assert engine.close(WAIT_S)
    assert many.is_set()
    assert few.is_set()


def test_a_wait_that_went_well_takes_no_error_back() -> None:
    """Another thread may go on with the same copies meanwhile, and fail: they are no hit then."""
    nothing = np.zeros(MANY, np.uint64)
    copies = Copies(nothing, nothing, nothing)
    submission = Submission(
        Direction.LOAD, copies, PassedFence(), None, Ends(lambda _: None), submitted_ns=0
    )
    item = Handover(submission)
    item.fail("no more today")
    item.fail(None)
    assert item.error == "no more today"
    assert item.is_over


class FullStream(SlowStream):
    """Never has room for a second portion."""

    def awaited(self, copies: Copies) -> Event | None:
        del copies
        return self.room if self.taken else None


def test_a_failure_of_what_is_waited_for_is_the_error_of_who_waits() -> None:
    device = SlowDevice()
    device.streams[Direction.LOAD] = FullStream()
    engine = StreamCopyEngine(device)
    tickets: queue.Queue[Ticket] = queue.Queue()
    nothing = np.zeros(MANY, np.uint64)
    engine.submit(
        Direction.LOAD,
        Copies(nothing, nothing, nothing),
        after=PassedFence(),
        keep_alive=None,
        ends=Ends(tickets.put),
    )
    device.streams[Direction.LOAD].room.pass_now("the device is gone")
    assert tickets.get(timeout=WAIT_S).error == "the device is gone"
    assert engine.close(WAIT_S)


class HalfStream(SlowStream):
    """Takes the first portion, whose copies last until the test says so, and no other."""

    def copy(self, copies: Copies) -> object:
        if self.taken:
            raise OSError("no more today")
        return super().copy(copies)


def test_a_failure_is_told_of_when_what_was_taken_has_ended() -> None:
    device = SlowDevice()
    half = device.streams[Direction.STORE] = HalfStream()
    half.room.pass_now(None)
    half.may_end.clear()
    engine = StreamCopyEngine(device)
    tickets: list[Ticket] = []
    many = submit(engine, Direction.STORE, MANY, on_done=tickets.append)
    engine.step()
    assert not many.wait(0.1)
    half.may_end.set()
    assert many.wait(WAIT_S)
    assert [ticket.error for ticket in tickets] == ["no more today"]
    assert engine.close(WAIT_S)


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


@pytest.mark.parametrize("num_copies", [FEW, MANY], ids=["one portion", "several"])
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
            ends=Ends(tickets.put),
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
        ends=Ends(fail),
    )
    assert submit(engine, Direction.STORE, FEW).wait(WAIT_S)
    assert engine.close(WAIT_S)
