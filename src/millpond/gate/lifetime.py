"""E6: what a path was given, and what it has made for a copy, is given up while that waits.

Of any path: the arguments are taken away when the call comes back, and as much memory as was
copied is taken from the allocators and overwritten. Of our own engine besides: what a
submission keeps alive is overwritten the moment that nobody holds it any more, and so are the
tables of addresses on an emulated device; elsewhere it is noted that they were given up.
"""

import gc
import weakref
from dataclasses import replace
from typing import Final

import numpy as np

from millpond.gate.device import Hold, Where
from millpond.gate.own import OwnPath
from millpond.gate.patterns import Comparison, Epoch
from millpond.gate.subject import Call, Subject, poll
from millpond.gate.verdicts import Attempt, Control
from millpond.transfer.copies import Direction

_BUSY_S_MAX: Final = 1.0


class _Lent:
    """What a submission keeps alive."""


def outlive(subject: Subject, direction: Direction, control: Control) -> Attempt:
    """Run the scenario for any path."""
    device = subject.device
    if control is Control.EDGE_REMOVED:
        return _recycled(subject, direction)
    _prepare(subject, direction)
    device.recycle(subject.num_bytes)  # so that it is quick the next time
    with device.on(Where.WORK):
        hold = device.hold(_limit_s(subject, Control.NONE))
    pairs = list(subject.pairs)
    call = subject.call_with(pairs, direction, Where.WORK, hold)
    is_there = False
    if control is Control.NONE:
        pairs.clear()
        gc.collect()
        device.recycle(subject.num_bytes)
        poll(lambda: call.is_done() or hold.is_open(), subject.timing.delay_s)
        # Only a copy that did not wait can be there while the hold is closed.
        is_there = _compare(subject, direction).is_right and not hold.is_open()
    return replace(_end(subject, direction, call, hold), undelayed=is_there)


def outlive_own(subject: Subject, path: OwnPath, direction: Direction, control: Control) -> Attempt:
    """Run the scenario for our own engine, which must hold what it is told to keep alive."""
    device = subject.device
    _prepare(subject, direction)
    device.recycle(subject.num_bytes)
    # Of a real device nothing is used again, or the copies would go anywhere: it is enough to
    # know that it could have been. Nor is it behind a synchronize, where that must be right.
    path.watch.is_kept = control is Control.SYNCHRONIZED or not device.is_emulated
    with device.on(Where.WORK):
        hold = device.hold(_limit_s(subject, control))
        if control is Control.SYNCHRONIZED:
            hold.release()
            device.synchronize()
        call, lent, given_up = _lend(subject, path, direction, control, hold)
    if control is Control.SYNCHRONIZED:
        call.wait(subject.timing.done_s)
        device.synchronize()
    del lent
    if control is Control.NONE:
        device.recycle(subject.num_bytes)
        poll(lambda: hold.is_open() or bool(given_up), subject.timing.delay_s)
    attempt = _end(subject, direction, call, hold, given_up)
    path.watch.forget()
    return attempt


def _lend(
    subject: Subject, path: OwnPath, direction: Direction, control: Control, hold: Hold
) -> tuple[Call, _Lent, list[str]]:
    """Submit with something to keep alive; the list tells what was given up under the hold."""
    given_up: list[str] = []
    lent = _Lent()

    def reuse(what: str) -> None:
        if not hold.is_open():
            given_up.append(what)
            if direction is Direction.LOAD:
                subject.host.numpy()[subject.rows] = subject.image(Epoch.RECYCLED)

    weakref.finalize(lent, reuse, "memory that it was told to keep alive")
    keep_alive = None if control is Control.EDGE_REMOVED else lent
    number = path.watch.num_enqueued
    was_late = hold.is_open()
    completion = path.submit(direction, list(subject.pairs), keep_alive=keep_alive)
    call = Call(completion, None, was_blocked=hold.is_open(), was_late=was_late)
    # Tables are made when the lane enqueues the copies: a moment later, or behind the hold.
    if control is not Control.SYNCHRONIZED:
        poll(lambda: number in path.watch.given_up, subject.timing.delay_s / 2)
    if number in path.watch.given_up and not hold.is_open():
        given_up.append("the tables of its copies")
    return call, lent, given_up


def _recycled(subject: Subject, direction: Direction) -> Attempt:
    """Copy from memory that is overwritten while the copy waits: by the gate itself."""
    device, pages = subject.device, subject.room.pages
    is_load = direction is Direction.LOAD
    subject.prepare(pages=Epoch.OLD if is_load else Epoch.NEW, host=Epoch.EMPTY)
    if is_load:
        subject.staging.numpy()[:] = device.read(subject.late).reshape(-1)
    else:
        device.write(subject.seen, device.read(pages))
        device.write(subject.late, np.full(pages.shape, int(Epoch.RECYCLED), np.uint8))
    with device.on(Where.WORK):
        hold = device.hold(subject.timing.control_s)
        source, target = subject.staging, pages.reshape(-1)
        if not is_load:
            source, target = subject.seen.reshape(-1), subject.staging
        device.copy(source, target)
    if is_load:
        subject.staging.numpy()[:] = int(Epoch.RECYCLED)
    else:
        with device.on(Where.OTHER):
            device.copy(subject.late, subject.seen)
            point = device.point()
        poll(point.is_passed, subject.timing.control_s)
    hold.release()
    device.synchronize()
    found = subject.compare_pages(Epoch.NEW) if is_load else subject.compare_staging(Epoch.NEW)
    return Attempt(found, subject.num_bytes)


def _prepare(subject: Subject, direction: Direction) -> None:
    if direction is Direction.LOAD:
        subject.prepare(pages=Epoch.OLD, host=Epoch.NEW)
    else:
        subject.prepare(pages=Epoch.NEW, host=Epoch.EMPTY)


def _limit_s(subject: Subject, control: Control) -> float:
    # The host does a few things while the hold is closed, and may be busy.
    delay_s = max(2 * subject.timing.delay_s, _BUSY_S_MAX)
    return delay_s if control is Control.NONE else subject.timing.control_s


def _end(
    subject: Subject,
    direction: Direction,
    call: Call,
    hold: Hold,
    given_up: list[str] | None = None,
) -> Attempt:
    fault = subject.settle(call, hold)
    found = _compare(subject, direction)
    if given_up:
        fault = f"gave up {' and '.join(given_up)} while the copy waited; {found.describe()}"
    return Attempt(
        found,
        subject.num_bytes,
        canaries=subject.compare_canaries(),
        blocked=call.was_blocked,
        late=call.was_late,
        fault=fault,
    )


def _compare(subject: Subject, direction: Direction) -> Comparison:
    if direction is Direction.LOAD:
        return subject.compare_pages(Epoch.NEW)
    return subject.compare_host(Epoch.NEW)
