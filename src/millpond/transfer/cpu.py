"""Copies on a machine without a GPU: memory copies in a thread a direction.

The engine's forward pass on a CPU has finished when it returns, so a fence taken behind it is
passed already; the lanes check it all the same, so that both kinds of engine run one protocol.
"""

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from millpond.arena.arena import Arena
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.engine import Fence, Ticket

logger = logging.getLogger(__name__)

_FENCE_POLL_S = 0.0002
_FENCE_WAIT_S_MAX = 60.0


class PassedFence:
    """The fence of a device whose work has finished by the time it returns."""

    def is_passed(self) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class _Submission:
    direction: Direction
    copies: Copies
    after: Fence
    keep_alive: object
    on_done: Callable[[Ticket], None]


class _Lane:
    """One direction: a queue and the thread that empties it in order."""

    def __init__(self, direction: Direction, delay_s: float) -> None:
        self._queue: deque[_Submission] = deque()
        self._changed = threading.Condition()
        self._num_unfinished = 0
        self._closed = False
        self._delay_s = delay_s
        self._thread = threading.Thread(
            target=self._run, name=f"millpond-{direction.value}", daemon=True
        )
        self._thread.start()

    def put(self, submission: _Submission) -> None:
        with self._changed:
            if self._closed:
                raise ValueError("submit to a closed copy engine")
            self._queue.append(submission)
            self._num_unfinished += 1
            self._changed.notify_all()

    def wait_idle(self, deadline_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._num_unfinished == 0, max(0.0, deadline_s - time.monotonic())
            )

    def close(self, deadline_s: float) -> bool:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                submission = self._queue.popleft()
            ticket = _perform(submission, self._delay_s)
            submission.on_done(ticket)
            with self._changed:
                self._num_unfinished -= 1
                self._changed.notify_all()


class CpuCopyEngine:
    """A ``CopyEngine`` of plain memory copies.

    ``delay_s`` is slept before each submission's first byte: the imposed delay under which
    the correctness gate and the fault tests look for what is not ordered.
    """

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self._lanes = {direction: _Lane(direction, delay_s) for direction in Direction}

    def fence(self) -> Fence:
        """Return a passed fence: a CPU's forward pass has finished when it returns."""
        return PassedFence()

    def adopt(self, arena: Arena) -> None:
        """Nothing to do: mapped memory is ready for memory copies."""

    def is_ready(self, end_offset: int) -> bool:
        """Return True for every offset."""
        return end_offset >= 0

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
        self._lanes[direction].put(_Submission(direction, copies, after, keep_alive, on_done))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until both lanes are empty; False when the time ran out."""
        deadline_s = time.monotonic() + timeout_s
        return all([lane.wait_idle(deadline_s) for lane in self._lanes.values()])

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and stop; False when the time ran out."""
        deadline_s = time.monotonic() + timeout_s
        return all([lane.close(deadline_s) for lane in self._lanes.values()])


def _perform(submission: _Submission, delay_s: float) -> Ticket:
    start_ns = time.monotonic_ns()
    error: str | None = None
    # guards: a store must not read before compute has written (E1), a load must not write
    # before compute has read (E3).
    if not _wait_passed(submission.after):
        error = f"the fence was not passed within {_FENCE_WAIT_S_MAX:.0f} s"
    else:
        if delay_s:
            time.sleep(delay_s)
        copies = submission.copies
        # memmove releases the interpreter lock, so the engine's threads run on beside it.
        for source, target, length in zip(
            copies.sources.tolist(), copies.targets.tolist(), copies.lengths.tolist(), strict=True
        ):
            ctypes.memmove(target, source, length)
    # guards: "done" must not be said before the last byte (E2, E4): memmove has returned.
    return Ticket(
        submission.direction,
        submission.copies.num_bytes,
        time.monotonic_ns() - start_ns,
        error,
    )


def _wait_passed(fence: Fence) -> bool:
    deadline_s = time.monotonic() + _FENCE_WAIT_S_MAX
    while not fence.is_passed():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_FENCE_POLL_S)
    return True
