"""The byte tests: one function an edge, each run as it is and with its controls.

    WORK     ─ hold ─ producer writes NEW ─┐        as it is: the call is made here
    OTHER    ──────────────────────────────┴ call   edge removed: here, next to it

While the hold is closed, whatever waits for the stream cannot have happened. So "done" at that
time is false for certain, and bytes that changed have changed too early. Nothing depends on
how long anything takes, but that what is not ordered gets going within the delay.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from millpond.gate.device import Hold, Where
from millpond.gate.paths import Promise
from millpond.gate.patterns import Comparison, Epoch
from millpond.gate.subject import Call, Subject, poll
from millpond.gate.verdicts import Attempt, Control, Edge
from millpond.transfer.copies import Direction

_LOOK_S_MAX: Final = 1.0
"""Longest that the host may need from the end of a call until it looks."""

Scenario = Callable[[Subject, Control], Attempt]


def store_after_compute(subject: Subject, control: Control) -> Attempt:
    """E1: the producer of the pages is late."""
    device = subject.device
    subject.prepare(pages=Epoch.OLD, host=Epoch.EMPTY)
    with device.on(Where.WORK):
        hold = device.hold(_limit_s(subject, control))
        device.copy(subject.late, subject.room.pages)
    call = _call(subject, Direction.STORE, control, hold)
    fault = subject.settle(call, hold)
    return _result(subject, call, subject.compare_host(Epoch.NEW), fault)


def load_after_use(subject: Subject, control: Control) -> Attempt:
    """E3: the last reader of the pages is late."""
    device = subject.device
    subject.prepare(pages=Epoch.OLD, host=Epoch.NEW)
    with device.on(Where.WORK):
        hold = device.hold(_limit_s(subject, control))
        device.copy(subject.room.pages, subject.seen)
    call = _call(subject, Direction.LOAD, control, hold)
    fault = subject.settle(call, hold)
    found = subject.compare_seen(Epoch.OLD)
    if found.is_right:
        found = subject.compare_pages(Epoch.NEW)
    return _result(subject, call, found, fault)


def done_after_store(subject: Subject, control: Control) -> Attempt:
    """E2: what "done" says of a store that cannot have ended."""
    device = subject.device
    subject.prepare(pages=Epoch.OLD, host=Epoch.EMPTY)
    with device.on(Where.WORK):
        hold = device.hold(_done_limit_s(subject, control))
        device.copy(subject.late, subject.room.pages)
    call = subject.call(Direction.STORE, Where.WORK, hold)
    landed: list[Comparison] = []

    def found() -> Comparison:
        rows = subject.copy_of_host()
        landed.append(subject.compare_rows(rows, Epoch.OLD))
        return subject.compare_rows(rows, Epoch.NEW)

    if control is Control.EDGE_REMOVED:
        # As if being enqueued were being done.
        return _finished(subject, call, hold, found())
    if control is Control.NONE and subject.is_done_early(call, hold, subject.timing.delay_s):
        attempt = _finished(subject, call, hold, found())
    else:
        attempt = _when_done(subject, call, hold, control, found)
    if control is Control.NONE and landed[0].is_right:
        # It has copied what was there, without waiting: "done" was true, of bytes too old.
        return replace(attempt, comparison=landed[0], undelayed=True)
    return attempt


def compute_after_load(subject: Subject, control: Control) -> Attempt:
    """E4: what a user of the pages reads, who relies on what the path promises."""
    device = subject.device
    subject.prepare(pages=Epoch.OLD, host=Epoch.NEW)
    with device.on(Where.WORK):
        hold = device.hold(_done_limit_s(subject, control))
    call = subject.call(Direction.LOAD, Where.WORK, hold)
    if control is Control.EDGE_REMOVED:
        # As if being enqueued were being done.
        return _finished(subject, call, hold, subject.compare_pages(Epoch.NEW))
    if control is Control.NONE and subject.path.promise is Promise.STREAM:
        return _consumed(subject, call, hold)
    if control is Control.NONE and subject.is_done_early(call, hold, subject.timing.delay_s):
        found = subject.compare_pages(Epoch.NEW)
        return _finished(subject, call, hold, found, undelayed=found.is_right)
    return _when_done(subject, call, hold, control, lambda: subject.compare_pages(Epoch.NEW))


def _consumed(subject: Subject, call: Call, hold: Hold) -> Attempt:
    """Let a kernel on the stream of the call read the pages, as the model would."""
    with subject.device.on(Where.WORK):
        subject.device.copy(subject.room.pages, subject.seen)
    poll(hold.is_open, subject.timing.delay_s / 2)
    # Only a load that did not wait can be there while the hold is closed.
    is_there = subject.compare_pages(Epoch.NEW).is_right and not hold.is_open()
    hold.release()
    subject.device.synchronize()
    found = subject.compare_seen(Epoch.NEW)
    return _finished(subject, call, hold, found, undelayed=is_there and found.is_right)


# ---------------------------------------------------------------- parts


def _limit_s(subject: Subject, control: Control) -> float:
    return subject.timing.delay_s if control is Control.NONE else subject.timing.control_s


def _done_limit_s(subject: Subject, control: Control) -> float:
    # These controls look at once: a call that blocks is not to block for long.
    return (
        subject.timing.delay_s
        if control is Control.NONE
        else max(subject.timing.delay_s, _LOOK_S_MAX)
    )


def _call(subject: Subject, direction: Direction, control: Control, hold: Hold) -> Call:
    """Call the path: next to the delayed work, behind it, or when it is over."""
    if control is Control.SYNCHRONIZED:
        hold.release()
        subject.device.synchronize()
        return subject.call(direction, Where.WORK)
    where = Where.OTHER if control is Control.EDGE_REMOVED else Where.WORK
    call = subject.call(direction, where, hold)

    def is_over() -> bool:
        # "Done" may come before the bytes (E2, E4): it is the bytes that this waits for.
        return hold.is_open() or (call.is_done() and _has_landed(subject, direction))

    poll(is_over, _limit_s(subject, control))
    return call


def _has_landed(subject: Subject, direction: Direction) -> bool:
    """Say whether the target has changed everywhere, to whatever."""
    if direction is Direction.STORE:
        untouched = subject.compare_host(Epoch.EMPTY)
    else:
        untouched = subject.compare_pages(Epoch.OLD)
    return bool(untouched.kinds.all())


def _when_done(
    subject: Subject,
    call: Call,
    hold: Hold,
    control: Control,
    found: Callable[[], Comparison],
) -> Attempt:
    """Look as soon as the path says that it is done; behind a synchronize if asked for."""
    hold.release()
    is_done = call.wait(subject.timing.done_s)
    if control is Control.SYNCHRONIZED:
        subject.device.synchronize()
    attempt = _finished(subject, call, hold, found())
    return attempt if is_done else replace(attempt, fault=subject.never_done())


def _finished(
    subject: Subject,
    call: Call,
    hold: Hold,
    comparison: Comparison,
    *,
    undelayed: bool = False,
) -> Attempt:
    fault = subject.settle(call, hold)
    return _result(subject, call, comparison, fault, undelayed=undelayed)


def _result(
    subject: Subject,
    call: Call,
    comparison: Comparison,
    fault: str | None,
    *,
    undelayed: bool = False,
) -> Attempt:
    return Attempt(
        comparison,
        subject.num_bytes,
        canaries=subject.compare_canaries(),
        blocked=call.was_blocked,
        undelayed=undelayed,
        fault=fault,
    )


# ---------------------------------------------------------------- the gate's own controls


def plain_control(subject: Subject, edge: Edge) -> Attempt:
    """Copy without the edge, by the gate itself: what a test that can see must find wrong."""
    device, pages = subject.device, subject.room.pages
    flat = pages.reshape(-1)
    is_store = edge in (Edge.E1, Edge.E2)
    subject.prepare(pages=Epoch.OLD, host=Epoch.NEW)
    subject.staging.numpy()[:] = 0 if is_store else device.read(subject.late).reshape(-1)
    with device.on(Where.WORK):
        hold = device.hold(subject.timing.control_s)
        if edge is Edge.E1:
            device.copy(subject.late, pages)
        if edge is Edge.E3:
            device.copy(pages, subject.seen)
    with device.on(Where.OTHER if edge in (Edge.E1, Edge.E3) else Where.WORK):
        source, target = (flat, subject.staging) if is_store else (subject.staging, flat)
        device.copy(source, target)
        point = device.point()
    if edge in (Edge.E1, Edge.E3):
        poll(point.is_passed, subject.timing.control_s)
        hold.release()
        device.synchronize()
    if is_store:
        comparison = subject.compare_staging(Epoch.NEW)
    elif edge is Edge.E3:
        comparison = subject.compare_seen(Epoch.OLD)
    else:
        comparison = subject.compare_pages(Epoch.NEW)
    hold.release()
    device.synchronize()
    return Attempt(comparison, subject.num_bytes)


SCENARIOS: Final[dict[Edge, tuple[Direction, Scenario]]] = {
    Edge.E1: (Direction.STORE, store_after_compute),
    Edge.E2: (Direction.STORE, done_after_store),
    Edge.E3: (Direction.LOAD, load_after_use),
    Edge.E4: (Direction.LOAD, compute_after_load),
}
