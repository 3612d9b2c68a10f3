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
    subject.prepare(pages=Epoch.NEW, host=Epoch.EMPTY)
    return _relied_on(subject, Direction.STORE, control, lambda: subject.compare_host(Epoch.NEW))


def compute_after_load(subject: Subject, control: Control) -> Attempt:
    """E4: what a user of the pages reads, who relies on what the path promises."""
    subject.prepare(pages=Epoch.OLD, host=Epoch.NEW)
    return _relied_on(subject, Direction.LOAD, control, lambda: subject.compare_pages(Epoch.NEW))


def _relied_on(
    subject: Subject, direction: Direction, control: Control, found: Callable[[], Comparison]
) -> Attempt:
    """Hold the copy up, and look when the path says that it has ended."""
    device = subject.device
    with device.on(Where.WORK):
        hold = device.hold(_done_limit_s(subject, control))
    call = subject.call(direction, Where.WORK, hold)
    if control is Control.EDGE_REMOVED:
        # As if being enqueued were being done.
        return _finished(subject, call, hold, found())
    if control is Control.SYNCHRONIZED:
        fault = subject.settle(call, hold)
        return _result(subject, call, found(), fault)
    if subject.path.promise is Promise.STREAM and direction is Direction.LOAD:
        with device.on(Where.WORK):  # a kernel that reads the pages, as the model's do
            device.copy(subject.room.pages, subject.seen)
    is_early = subject.is_done_early(call, hold, subject.timing.delay_s)
    # Only a copy that did not wait can be there while the hold is closed.
    now = found()
    is_there = now.is_right and (is_early or not hold.is_open())
    if is_early:
        return _finished(subject, call, hold, now, undelayed=is_there)
    attempt = _when_done(subject, call, hold, found)
    if subject.path.promise is Promise.STREAM and direction is Direction.LOAD:
        device.synchronize()
        attempt = replace(attempt, comparison=subject.compare_seen(Epoch.NEW))
    return replace(attempt, undelayed=is_there)


# ---------------------------------------------------------------- parts


def _limit_s(subject: Subject, control: Control) -> float:
    return subject.timing.delay_s if control is Control.NONE else subject.timing.control_s


def _done_limit_s(subject: Subject, control: Control) -> float:
    # The host looks while the hold is closed, which takes a while on a busy machine. These
    # controls look at once: a call that blocks is not to block for long.
    delay_s = 2 * subject.timing.delay_s
    return delay_s if control is Control.NONE else max(delay_s, _LOOK_S_MAX)


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
    subject: Subject, call: Call, hold: Hold, found: Callable[[], Comparison]
) -> Attempt:
    """Look as soon as the path says that it is done."""
    hold.release()
    is_done = call.wait(subject.timing.done_s)
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
        late=call.was_late,
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
