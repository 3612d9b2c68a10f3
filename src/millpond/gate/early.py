"""A load that is told of before its bytes are there, for the engine's stream waits for them (E4).

    OTHER    ─ hold ─ fence ─┐
    load's stream            └─ load ─┐
    WORK     ── held back ────────────┴─ kernel that reads the pages

The hold is in the load's way only: a reader that does not wait has read when it opens.
"""

from millpond.gate.device import Where
from millpond.gate.own import OwnPath
from millpond.gate.patterns import Epoch
from millpond.gate.subject import Call, Subject, poll
from millpond.gate.verdicts import Attempt, Control
from millpond.transfer.copies import Direction
from millpond.transfer.device import Fence

NAME = "told of early"
_NUM_PAGES_MAX = 8


def compute_behind_load(subject: Subject, path: OwnPath, control: Control) -> Attempt:
    """Read the pages on a stream that was held back, and look at what was read."""
    device, timing = subject.device, subject.timing
    subject.prepare(pages=Epoch.OLD, host=Epoch.NEW)
    limit_s = timing.delay_s if control is Control.NONE else timing.control_s
    with device.on(Where.OTHER):
        hold = device.hold(limit_s)
    # Few: a lane stops behind a fence that is not passed, and what is left is not told of.
    pairs = list(subject.pairs[:_NUM_PAGES_MAX])
    call = subject.call_with(pairs, Direction.LOAD, Where.OTHER, hold)
    fault = None
    if control is Control.SYNCHRONIZED:
        fault = subject.settle(call, hold)
    elif control is Control.NONE:
        if not poll(lambda: _is_told(path, call), timing.done_s):
            fault = subject.never_done()
        with device.on(Where.WORK):
            path.engine.hold_back()
    point = _read(subject)
    was_late = call.was_late or (control is Control.NONE and hold.is_open())
    poll(lambda: point.is_passed() or hold.is_open(), limit_s)
    fault = subject.settle(call, hold) or fault
    return Attempt(
        subject.compare_seen(Epoch.NEW, num_pages=len(pairs)),
        len(pairs) * subject.room.page_bytes,
        canaries=subject.compare_canaries(),
        blocked=call.was_blocked,
        late=was_late,
        fault=fault,
    )


def _is_told(path: OwnPath, call: Call) -> bool:
    """Come by as an engine does that has nothing to compute."""
    path.engine.step(early=True)
    return call.is_done()


def _read(subject: Subject) -> Fence:
    with subject.device.on(Where.WORK):
        subject.device.copy(subject.room.pages, subject.seen)
        return subject.device.point()
