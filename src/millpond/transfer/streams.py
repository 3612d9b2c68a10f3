"""Copies on streams of their own, and every edge between them and the engine.

    engine's thread    fence()     a point behind the work on the engine's current stream
                       submit()    enqueues in the direction's lane: its stream waits for the
                                   fence, takes the copies, marks their end
    enqueuing thread   does the same for submissions that are not quick to enqueue
    ending thread      waits for the end on the device, then ``on_done``

Each direction is a lane: loads never queue behind stores. Handing many thousands of copies to
a driver takes milliseconds, which are not the engine's; handing few to another thread takes as
long as the engine's keeps the interpreter lock, which may be five. The gate breaks each step
that has a line "guards:", one at a time, and must notice (docs/ORDERING.md).

Whatever goes wrong with a copy, expected or not, becomes the error of its ticket: compilers,
drivers and allocators raise what they like, and the worst outcome has to be a miss. A lane
whose thread died would leave every later request waiting.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from millpond.arena.arena import Arena
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import CopyFailed, Device, Event, Fence
from millpond.transfer.engine import Ticket

logger = logging.getLogger("vllm.millpond")


@dataclass(frozen=True, slots=True)
class Submission:
    """Copies on their way: ``keep_alive`` is what must outlive them beside themselves."""

    direction: Direction
    copies: Copies
    after: Fence
    keep_alive: object
    on_done: Callable[[Ticket], None]
    submitted_ns: int


@dataclass(frozen=True, slots=True)
class InFlight:
    """A submission that is on the stream: ``staged`` is what its copies use."""

    submission: Submission
    end: Event | None
    error: str | None
    staged: object


class Lane:
    """One direction: its stream, and its two threads."""

    def __init__(self, direction: Direction, device: Device) -> None:
        self._device = device
        self._stream = device.stream(direction)
        self._changed = threading.Condition()
        self._waiting: deque[Submission] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._num_unfinished = 0
        self._is_enqueuing = False
        """Whether some thread is about to put a submission on the stream: one at a time."""
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=f"millpond-{direction.value}-{name}", daemon=True)
            for name, run in (("enqueue", self._run_enqueuing), ("end", self._run_ending))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, submission: Submission) -> None:
        """Enqueue a submission, at once if that is quick; ``ValueError`` once closed."""
        with self._changed:
            if self._closed:
                raise ValueError("submit to a closed copy engine")
            is_next = not self._waiting and not self._is_enqueuing
            is_quick = is_next and self._stream.is_quick(submission.copies)
            self._num_unfinished += 1
            if not is_quick:
                self._waiting.append(submission)
                self._changed.notify_all()
                return
            self._is_enqueuing = True
        self._put_on_stream(submission)

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until nothing is queued or in flight; False when the time ran out."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._num_unfinished == 0, max(0.0, deadline_s - time.monotonic())
            )

    def close(self, deadline_s: float) -> bool:
        """Take no more, finish what is queued, end the threads; False when time ran out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        return self._stream.close(max(0.0, deadline_s - time.monotonic()))

    # -------------------------------------------------------------- enqueuing

    def _run_enqueuing(self) -> None:
        self._device.enter_thread()
        while True:
            with self._changed:
                self._changed.wait_for(self._has_turn)
                if not self._waiting:
                    return
                self._is_enqueuing = True
                submission = self._waiting.popleft()
            self._put_on_stream(submission)
            del submission  # or the last one's memory would be held until the next

    def _has_turn(self) -> bool:
        return not self._is_enqueuing and (bool(self._waiting) or self._closed)

    def _put_on_stream(self, submission: Submission) -> None:
        item = self._enqueue(submission)
        with self._changed:
            self._is_enqueuing = False
            self._in_flight.append(item)
            self._changed.notify_all()

    def _enqueue(self, submission: Submission) -> InFlight:
        """Put one submission on the stream."""
        error: str | None = None
        end: Event | None = None
        staged: object = None
        try:
            self._order_behind(submission)
            staged = self._stream.copy(submission.copies)
        except Exception as failure:  # noqa: BLE001 - see the module
            error = _described(failure)
        try:
            # Behind a failure as well: a part of the copies may be on its way.
            end = self._mark_end(submission)
        except Exception as failure:  # noqa: BLE001 - see the module
            error = error or _described(failure)
        return self._hold(submission, end, error, staged)

    def _order_behind(self, submission: Submission) -> None:
        # guards: a store must not read a page before the kernels that write it have (E1); a
        # load must not write a page before the kernels that read or zero it have (E3).
        self._stream.wait_for(submission.after)

    def _mark_end(self, submission: Submission) -> Event:
        # guards: "done" must not precede the last byte, neither for who commits it (E2) nor
        # for who computes with it (E4): the event stands behind the last copy of the stream.
        del submission
        return self._stream.record()

    def _hold(
        self, submission: Submission, end: Event | None, error: str | None, staged: object
    ) -> InFlight:
        # guards: the arena's mapping, staging buffers and address tables must not be given
        # up before the copies that use them have ended (E6).
        return InFlight(submission, end, error, staged)

    # -------------------------------------------------------------- ending thread

    def _run_ending(self) -> None:
        self._device.enter_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._in_flight) or self._is_over())
                if not self._in_flight:
                    return
                item = self._in_flight.popleft()
            self._report(item)
            del item  # or the last one's memory would be held until the next
            with self._changed:
                self._num_unfinished -= 1
                self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._closed and self._num_unfinished == 0

    def _report(self, item: InFlight) -> None:
        error = item.error
        if item.end is not None:
            try:
                item.end.wait()
            except Exception as failure:  # noqa: BLE001 - see the module
                error = _described(failure)
        submission = item.submission
        # guards: a slot, or a page of the engine, must not be used again while a copy from or
        # to it is in flight (E5): leases and references end in on_done, behind the event.
        ticket = Ticket(
            submission.direction,
            submission.copies.num_bytes,
            time.monotonic_ns() - submission.submitted_ns,
            error,
        )
        try:
            submission.on_done(ticket)
        except Exception:
            logger.exception("event=end_failed direction=%s", submission.direction.value)


def _described(failure: Exception) -> str:
    if not isinstance(failure, CopyFailed):
        logger.error("event=copy_failed reason=%r", failure, exc_info=failure)
    return str(failure) or type(failure).__name__


class StreamCopyEngine:
    """A ``CopyEngine`` over the streams of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lanes: dict[Direction, Lane] = {
            direction: Lane(direction, device) for direction in Direction
        }

    def fence(self) -> Fence:
        """Return a fence behind all work on the calling thread's current stream."""
        return self._device.fence()

    def adopt(self, arena: Arena) -> None:
        """Make the arena ready for copies, in the background; an earlier one is given up."""
        self._device.adopt(arena)

    def is_ready(self, end_offset: int) -> bool:
        """Say whether the adopted arena can be copied from and to before ``end_offset``."""
        return self._device.is_ready(end_offset)

    def submit(
        self,
        direction: Direction,
        copies: Copies,
        *,
        after: Fence,
        keep_alive: object,
        on_done: Callable[[Ticket], None],
    ) -> None:
        """Queue the copies in the direction's lane; ``ValueError`` once closed."""
        submission = Submission(direction, copies, after, keep_alive, on_done, time.monotonic_ns())
        self._lanes[direction].put(submission)

    def release(self, timeout_s: float) -> None:
        """Give up the adopted arena; no copy is in flight."""
        self._device.release(timeout_s)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or in flight; False when the time ran out."""
        deadline_s = time.monotonic() + timeout_s
        return all([lane.wait_idle(deadline_s) for lane in self._lanes.values()])

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and stop; False when the time ran out."""
        deadline_s = time.monotonic() + timeout_s
        is_closed = all([lane.close(deadline_s) for lane in self._lanes.values()])
        if is_closed:
            self._device.release(max(0.0, deadline_s - time.monotonic()))
        return is_closed
