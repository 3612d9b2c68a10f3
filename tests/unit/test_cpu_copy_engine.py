"""The CPU copy engine keeps the edges: nothing before its fence, "done" only after the bytes."""

import threading

import numpy as np
import pytest

from millpond.transfer import Copies, CpuCopyEngine, Direction, Ends, Ticket

WAIT_S = 10.0


class GateFence:
    """A fence that the test passes by hand, and that says when somebody looked at it."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.asked = threading.Event()

    def is_passed(self) -> bool:
        self.asked.set()
        return self.passed.is_set()


def copies_between(source: np.ndarray, target: np.ndarray) -> Copies:
    one = lambda value: np.asarray([value], np.uint64)  # noqa: E731
    return Copies(one(source.ctypes.data), one(target.ctypes.data), one(source.nbytes))


class Recorder:
    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.done = threading.Event()

    def __call__(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)
        self.done.set()


@pytest.mark.parametrize("direction", list(Direction))
def test_nothing_is_copied_before_the_fence_is_passed(direction: Direction) -> None:
    engine = CpuCopyEngine()
    source, target = np.full(1 << 16, 7, np.uint8), np.zeros(1 << 16, np.uint8)
    fence, record = GateFence(), Recorder()
    engine.submit(
        direction, copies_between(source, target), after=fence, keep_alive=None, ends=Ends(record)
    )
    assert fence.asked.wait(WAIT_S)
    assert not target.any()
    assert not record.done.is_set()
    source[:] = 9  # what the producer writes while the copy waits is what must arrive
    fence.passed.set()
    assert record.done.wait(WAIT_S)
    assert (target == 9).all()
    assert record.tickets[0].num_bytes == target.nbytes
    assert record.tickets[0].error is None
    assert engine.close(WAIT_S)


def test_done_is_said_after_the_last_byte() -> None:
    engine = CpuCopyEngine(delay_s=0.02)
    source, target = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
    seen: list[bool] = []
    done = threading.Event()

    def on_done(ticket: Ticket) -> None:
        seen.append(bool((target == source).all()))
        done.set()

    engine.submit(
        Direction.STORE,
        copies_between(source, target),
        after=engine.fence(),
        keep_alive=None,
        ends=Ends(on_done),
    )
    assert done.wait(WAIT_S)
    assert seen == [True]
    assert engine.close(WAIT_S)


def test_a_load_does_not_queue_behind_a_store() -> None:
    engine = CpuCopyEngine()
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    blocked, store, load = GateFence(), Recorder(), Recorder()
    engine.submit(
        Direction.STORE,
        copies_between(source, target),
        after=blocked,
        keep_alive=None,
        ends=Ends(store),
    )
    assert blocked.asked.wait(WAIT_S)
    engine.submit(
        Direction.LOAD,
        copies_between(source, target),
        after=engine.fence(),
        keep_alive=None,
        ends=Ends(load),
    )
    assert load.done.wait(WAIT_S)
    assert not store.done.is_set()
    assert not engine.wait_idle(0.0)
    blocked.passed.set()
    assert engine.wait_idle(WAIT_S)
    assert store.done.is_set()
    assert engine.close(WAIT_S)


def test_a_closed_engine_finishes_what_is_queued_and_takes_no_more() -> None:
    engine = CpuCopyEngine()
    source, target = np.ones(8, np.uint8), np.zeros(8, np.uint8)
    record = Recorder()
    copies = copies_between(source, target)
    engine.submit(Direction.STORE, copies, after=engine.fence(), keep_alive=None, ends=Ends(record))
    assert engine.close(WAIT_S)
    assert record.tickets
    with pytest.raises(ValueError, match="closed"):
        engine.submit(
            Direction.STORE, copies, after=engine.fence(), keep_alive=None, ends=Ends(record)
        )
