"""A load that gets onto its stream in portions, for the engine computes meanwhile (E4).

    who comes by       pace ──────── nothing for a while ──────── pace  pace  …
    load's stream          └ portion ┤                              └ portion └ … ┤ told of here

While nobody tells another pace, most of the load is not even on its stream: whoever is told of it
by then reads old bytes.
"""

import time
from dataclasses import replace
from typing import Final

from millpond.gate.device import Where
from millpond.gate.errors import CannotTest
from millpond.gate.own import OwnPath
from millpond.gate.patterns import Comparison, Epoch
from millpond.gate.subject import Call, Subject, poll
from millpond.gate.verdicts import Attempt, Control
from millpond.transfer.copies import Direction
from millpond.transfer.engine import Pace

NAME: Final = "in portions"
_NUM_PORTIONS_MIN: Final = 4
_BUSY_S: Final = 0.02
_ENDS_S: Final = 600.0
"""Longer than any test takes: a lane that keeps no pace any more hands over all at once."""


def compute_behind_portions(subject: Subject, path: OwnPath, control: Control) -> Attempt:
    """Read the pages as soon as the load is told of, of which a part is held back for a while."""
    device, timing = subject.device, subject.timing
    subject.prepare(pages=Epoch.OLD, host=Epoch.NEW)
    num_before = path.watch.num_enqueued
    if control is not Control.SYNCHRONIZED:
        _pace(subject, path)
    try:
        call = subject.call(Direction.LOAD, Where.WORK)
        found: Comparison | None = None
        if control is Control.EDGE_REMOVED:
            # As if the first portion were all.
            poll(lambda: call.is_done() or path.watch.num_enqueued > num_before, timing.control_s)
            device.synchronize()
            found = subject.compare_pages(Epoch.NEW)
        elif control is Control.NONE and poll(call.is_done, timing.delay_s):
            found = subject.compare_pages(Epoch.NEW)
        if control is Control.NONE:
            poll(lambda: _goes_on(subject, path, call), timing.done_s)
    finally:
        path.engine.pace(None)
    is_done = call.wait(timing.done_s)
    if control is Control.SYNCHRONIZED:
        device.synchronize()
    found = found or subject.compare_pages(Epoch.NEW)
    device.synchronize()
    num_portions = path.watch.num_enqueued - num_before
    if control is Control.NONE and found.is_right and num_portions < _NUM_PORTIONS_MIN:
        raise CannotTest(f"the load came in {num_portions} portions")
    attempt = Attempt(found, subject.num_bytes, canaries=subject.compare_canaries())
    return attempt if is_done else replace(attempt, fault=subject.never_done())


def _pace(subject: Subject, path: OwnPath) -> None:
    now_s = time.monotonic()
    bytes_per_s = subject.num_bytes / _NUM_PORTIONS_MIN / _BUSY_S
    path.engine.pace(Pace(bytes_per_s, now_s + _BUSY_S, now_s + _ENDS_S))


def _goes_on(subject: Subject, path: OwnPath, call: Call) -> bool:
    """Come by as an engine does that computes."""
    _pace(subject, path)
    return call.is_done()
