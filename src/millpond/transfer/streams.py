"""Copies on streams of their own, and every edge between them and the engine.

    engine's thread    fence()     a point behind the work on the engine's current stream
                       submit()    enqueues in the direction's lane: its stream waits for the
                                   fence, takes the copies, marks their end
                       step()      goes on with what is left, a portion a call; tells of loads
                                   whose end the device has come past, or, early, of one all
                                   of whose copies are on the stream
                       hold_back() the engine's current stream waits for what was told early
                       begin_step() goes on with stores
                       pace()      loads take the link for so long and no longer
    enqueuing thread   goes on where the engine's thread does not come by, or has to wait
    ending thread      waits for the end on the device, then ``on_done``

Small copies of the engine's own queue behind all copies of the same direction that are on any
stream: the tokens that a step gives, behind stores; the inputs of a step, behind loads, where
something is pending on the engine's stream (H200: 77 to 83 ms behind 4 GiB). So beside an engine
that computes, loads come in portions that end before the next step's inputs, one at a time and
none before its fence is passed. Stores come with the next step, or some milliseconds later, when
the copy of the tokens of their own step has been queued.

Each direction is a lane: loads never queue behind stores. Handing many thousands of copies to
a driver takes milliseconds, which are not the engine's to give at once. Nor can other threads
be relied upon: one that has slept gets the interpreter lock when the engine's lets go of it,
which took some tenths of a second beside an engine that asks in a loop whether its load is
there. So all of a load is done by the engine's thread while it comes by, and by the others
while it computes. The gate breaks each step that has a line "guards:", one at a time, and must
notice (docs/ORDERING.md).

Whatever goes wrong with a copy, expected or not, becomes the error of its ticket: compilers,
drivers and allocators raise what they like, and the worst outcome has to be a miss. A lane
whose thread died would leave every later request waiting.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from millpond.arena.arena import Arena
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import CopyFailed, Device, Event, Fence
from millpond.transfer.engine import Ends, Pace, Ticket

logger = logging.getLogger("vllm.millpond")

_AT_ONCE_COPIES_MAX: Final = 2048
"""Copies that each ``submit`` hands over itself: half a millisecond a thousand (H200)."""
_STEP_S: Final = 0.002
"""Who comes by more often is left to hand over the rest. And by so much a store is later than its
step: from there to the copy of its tokens the host takes 0.3 ms (H200)."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Copies on their way: ``keep_alive`` is what must outlive them beside themselves."""

    direction: Direction
    copies: Copies
    after: Fence
    keep_alive: object
    ends: Ends
    submitted_ns: int


@dataclass(slots=True)
class Handover:
    """A submission on its way to the stream; ``staged`` is what its copies so far use."""

    submission: Submission
    is_ordered: bool = False
    num_copies: int = 0
    staged: list[object] = field(default_factory=list[object])
    error: str | None = None

    @property
    def is_over(self) -> bool:
        """Whether all copies are on the stream, or no more of them will be."""
        return self.error is not None or self.num_copies == len(self.submission.copies.lengths)

    def fail(self, error: str | None) -> None:
        """Take note of an error; None takes back none that another thread has found meanwhile."""
        if error is not None:
            self.error = error


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A submission that is on the stream: ``staged`` is what its copies use."""

    submission: Submission
    end: Event | None
    error: str | None
    staged: object


class Lane:
    """One direction: its stream, and its two threads."""

    def __init__(self, direction: Direction, device: Device) -> None:
        self._direction = direction
        self._device = device
        self._stream = device.stream(direction)
        self._changed = threading.Condition()
        self._waiting: deque[Handover] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._not_landed: list[InFlight] = []
        """Those of ``_in_flight`` whose landing somebody wants to hear of, and has not."""
        self._told_early: Event | None = None
        """The end of the load that was told of early last."""
        self._is_held_back = True
        """Whether a stream waits for it."""
        self._num_unfinished = 0
        self._is_enqueuing = False
        """Whether some thread puts a submission on the stream: one at a time."""
        self._stepped_s = 0.0
        self._pace: Pace | None = None
        self._busy_until_s = 0.0
        """When what is on the stream will be over, at that pace."""
        self._last_portion: Event | None = None
        self._earlier_portion: Event | None = None
        """The last that was put on the stream before the pace was told."""
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=f"millpond-{direction.value}-{name}", daemon=True)
            for name, run in (("enqueue", self._run_enqueuing), ("end", self._run_ending))
        ]
        for thread in self._threads:
            thread.start()

    def put(self, submission: Submission) -> None:
        """Enqueue a submission, a load at once as far as that is quick.

        Raises ``ValueError`` once closed.
        """
        with self._changed:
            if self._closed:
                raise ValueError("submit to a closed copy engine")
            self._num_unfinished += 1
            self._waiting.append(Handover(submission))
        self._stepped_s = time.monotonic()
        if submission.direction is Direction.LOAD:
            self._hand_over(_AT_ONCE_COPIES_MAX)
        with self._changed:
            if self._waiting:
                self._changed.notify_all()

    def step(self, *, early: bool = False) -> None:
        """As ``CopyEngine.step``."""
        if self._waiting and self._direction is Direction.LOAD:
            self._stepped_s = time.monotonic()
            self._hand_over(1)
        for item in tuple(self._not_landed):
            if self._has_landed(item):
                _tell(lambda item=item: self._end_landing(item, is_landed=True))
        if early and self._not_landed and self._device.can_hold_back:
            self._tell_early(self._not_landed[0])

    def hold_back(self) -> None:
        """As ``CopyEngine.hold_back``."""
        end = self._told_early
        if end is not None and not self._is_held_back:
            # guards: what the engine enqueues once it has been told early must not read or
            # write a page before the load's last byte (E4): its stream waits for the event.
            self._device.hold_back(end)
            self._is_held_back = True

    def pace(self, pace: Pace | None) -> None:
        """As ``CopyEngine.pace``."""
        self._pace, self._earlier_portion = pace, self._last_portion
        if pace is not None and self._waiting:
            self._stepped_s = time.monotonic()
            self._hand_over(1)

    def begin_step(self) -> None:
        """As ``CopyEngine.begin_step``."""
        if self._waiting:
            self._stepped_s = time.monotonic()
            self._hand_over(1)

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
                self._changed.wait_for(lambda: bool(self._waiting) or self._closed)
                if not self._waiting:
                    return
            is_left_alone = self._is_left_alone()
            with self._changed:
                if self._is_enqueuing or not is_left_alone:
                    self._changed.wait(_STEP_S)
                    continue
            stopped = self._hand_over(1)
            if stopped is not None:
                item, awaited = stopped
                item.fail(_wait(awaited))
                del item, awaited
            del stopped  # or its memory would be held until the next

    def _is_left_alone(self) -> bool:
        """Say whether it is for the lane's thread to go on."""
        return time.monotonic() - self._stepped_s >= _STEP_S and self._room() != 0

    def _room(self) -> int | None:
        """Return how many bytes may be put on the stream now; None where there is no limit."""
        pace, now_s = self._pace, time.monotonic()
        if pace is None or self._closed or now_s >= pace.ends_s:
            return None
        with self._changed:
            oldest = self._waiting[0].submission if self._waiting else None
        # Behind a fence, or behind an earlier portion, nobody knows when it would be over.
        points = (oldest and oldest.after, self._earlier_portion)
        if not all(point.is_passed() for point in points if point is not None):
            return 0
        return max(0, int(pace.bytes_per_s * (pace.busy_until_s - max(now_s, self._busy_until_s))))

    def _hand_over(self, num_copies: int) -> tuple[Handover, Event] | None:
        """Put portions on the stream, of so many copies or a little more, without waiting.

        Returns who has to wait for what before the next one, if there is no room for it.
        """
        with self._changed:
            if self._is_enqueuing:
                return None
            self._is_enqueuing = True
        try:
            while self._waiting and num_copies > 0 and self._room() != 0:
                item = self._waiting[0]
                before = item.num_copies
                awaited = self._advance(item, num_copies)
                if awaited is not None:
                    return item, awaited
                if item.is_over:
                    self._put_in_flight(item)
                num_copies -= max(1, item.num_copies - before)
            return None
        finally:  # also where a signal's exception comes this way
            with self._changed:
                self._is_enqueuing = False

    def _advance(self, item: Handover, num_copies: int) -> Event | None:
        """Enqueue portions of a submission; return what to wait for if there is no room."""
        if item.error is not None:
            return None
        copies = item.submission.copies
        until = min(item.num_copies + num_copies, len(copies.lengths))
        try:
            if not item.is_ordered:
                self._order_behind(item.submission)
                item.is_ordered = True
            while item.num_copies < until and (room := self._room()) != 0:
                rest = copies.part(slice(item.num_copies, None))
                some = rest.part(slice(0, self._stream.portion(rest)))
                if room is not None:
                    some = some.within(room)
                awaited = self._stream.awaited(some)
                if awaited is not None:
                    return awaited
                item.staged.append(self._stream.copy(some))
                item.num_copies += len(some.lengths)
                self._note_portion(some.num_bytes)
        except Exception as failure:  # noqa: BLE001 - see the module
            item.fail(_described(failure))
        return None

    def _note_portion(self, num_bytes: int) -> None:
        if (pace := self._pace) is None:
            return
        # Of a device whose failures last, as CUDA's do: this event would take one that does not.
        self._last_portion = self._stream.record()
        now_s = time.monotonic()
        self._busy_until_s = max(now_s, self._busy_until_s) + num_bytes / pace.bytes_per_s

    def _put_in_flight(self, item: Handover) -> None:
        error, end = item.error, None
        try:
            # Behind a failure as well: a part of the copies may be on its way.
            end = self._last_portion = self._mark_end(item.submission)
        except Exception as failure:  # noqa: BLE001 - see the module
            error = error or _described(failure)
        held = self._hold(item.submission, end, error, item.staged)
        with self._changed:
            self._waiting.popleft()
            if error is None and item.submission.ends.on_landed is not None:
                self._not_landed.append(held)
            self._in_flight.append(held)
            self._changed.notify_all()

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

    # -------------------------------------------------------------- landing

    def _has_landed(self, item: InFlight) -> bool:
        # guards: the model must not read a page before the load's last byte (E4): it is the
        # event behind it that is asked, and a failure that the event tells of is no landing.
        return item.end is not None and item.end.is_passed() and _wait(item.end) is None

    def _tell_early(self, item: InFlight) -> None:
        """Tell of a load before it has landed, unless one that was told of so is under way.

        The requests of several loads would run together, behind the last one.
        """
        if self._told_early is not None and not self._told_early.is_passed():
            return
        self._told_early, self._is_held_back = self._end_for_early(item), False
        _tell(lambda: self._end_landing(item, is_landed=True))

    def _end_for_early(self, item: InFlight) -> Event | None:
        # guards: what is waited for is the event behind the load's last byte (E4).
        return item.end

    def _end_landing(self, item: InFlight, *, is_landed: bool) -> None:
        """Tell of a landing, or that there will be none, unless that has been done."""
        with self._changed:  # kept: whoever finds that it has been told of may rely on it
            if item not in self._not_landed:
                return
            self._not_landed.remove(item)
            if is_landed and item.submission.ends.on_landed is not None:
                item.submission.ends.on_landed()

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
        submission = item.submission
        error = item.error
        if item.end is not None:
            failed = _wait(item.end)  # behind an error as well: a part may be on its way
            error = error or failed
        _tell(lambda: self._end_landing(item, is_landed=error is None))
        # guards: a slot, or a page of the engine, must not be used again while a copy from or
        # to it is in flight (E5): leases and references end in on_done, behind the event.
        ticket = Ticket(
            submission.direction,
            submission.copies.num_bytes,
            time.monotonic_ns() - submission.submitted_ns,
            error,
        )
        _tell(lambda: submission.ends.on_done(ticket))


def _tell(call: Callable[[], None]) -> None:
    """Tell who wants to know; what goes wrong there is not the lane's."""
    try:
        call()
    except Exception:
        logger.exception("event=end_failed")


def _wait(event: Event) -> str | None:
    """Wait for an event; return what failed before it, or None."""
    try:
        event.wait()
    except Exception as failure:  # noqa: BLE001 - see the module
        return _described(failure)
    return None


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
        ends: Ends,
    ) -> None:
        """Queue the copies in the direction's lane; ``ValueError`` once closed."""
        submission = Submission(direction, copies, after, keep_alive, ends, time.monotonic_ns())
        self._lanes[direction].put(submission)

    def step(self, *, early: bool = False) -> None:
        """As ``CopyEngine.step``."""
        for lane in self._lanes.values():
            lane.step(early=early)

    def hold_back(self) -> None:
        """As ``CopyEngine.hold_back``."""
        for lane in self._lanes.values():
            lane.hold_back()

    def begin_step(self) -> None:
        """As ``CopyEngine.begin_step``."""
        self._lanes[Direction.STORE].begin_step()

    def pace(self, pace: Pace | None) -> None:
        """As ``CopyEngine.pace``."""
        self._lanes[Direction.LOAD].pace(pace)

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
