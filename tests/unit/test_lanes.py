"""A lane keeps the order of its submissions, whoever puts them on the stream."""

import queue
import threading

import numpy as np
import pytest

from millpond.transfer import Copies, Direction, Ends, Ticket
from millpond.transfer.cpu import CpuDevice, PassedFence
from millpond.transfer.device import Event
from millpond.transfer.streams import Handover, StreamCopyEngine, Submission
from millpond.transfer.threads import ThreadEvent
from tests.slow_device import FEW, MANY, PORTION, WAIT_S, SlowDevice, SlowStream, submit, wait_set
from tests.waiting import eventually


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
    submit(engine, Direction.LOAD, FEW, on_done=lambda _: wait_set(may_end))  # keeps the thread
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
    submit(engine, Direction.LOAD, FEW, on_done=lambda _: wait_set(may_end))  # keeps the thread

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
