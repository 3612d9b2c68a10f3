"""Streams that are threads: the device of a machine without a GPU.

A stream is a queue and a thread that runs what is in it, in order. Streams do not wait for
each other unless told to, as CUDA's non-blocking streams do not. The gate drives the same
streams under imposed delays, where no GPU is there to show the edges on.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from millpond.model.limits import MIB
from millpond.transfer.copies import Copies
from millpond.transfer.device import CopyFailed, Event, Fence

_FENCE_POLL_S = 0.0002
_FENCE_WAIT_S_MAX = 60.0
_TWO_THREADS_BYTES_MIN = 4 * MIB
"""A millisecond of copying: ten times what a second thread costs."""


class ThreadEvent:
    """A point on a thread's stream."""

    def __init__(self) -> None:
        self._passed = threading.Event()
        self._error: str | None = None

    def is_passed(self) -> bool:
        """Say whether the stream has come past it."""
        return self._passed.is_set()

    def wait(self) -> None:
        """Wait until the stream has come past it; ``CopyFailed`` if the work before it did."""
        self._passed.wait()
        if self._error is not None:
            raise CopyFailed(self._error)

    def pass_now(self, error: str | None) -> None:
        """Say that the stream has come here, or what went wrong on the way."""
        self._error = error
        self._passed.set()


class ThreadStream:
    """Runs what is enqueued, one after the other, in a thread of its own.

    What fails is reported by the next event; work between the two is left out. ``delay_s`` is
    slept before each copy: the imposed delay of the fault tests.
    """

    def __init__(self, name: str, *, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._queue: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name=f"millpond-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        """Queue ``work``; it reports what fails as ``CopyFailed``."""
        with self._changed:
            if self._closed:
                raise ValueError("work for a closed stream")
            self._queue.append(work)
            self._changed.notify_all()

    def wait_for(self, fence: Fence) -> None:
        """Hold back later work until ``fence`` is passed, for a minute at most."""
        self.enqueue(lambda: _wait_passed(fence))

    def portion(self, copies: Copies) -> int:
        """Return the number of all copies: they are one entry of a queue."""
        return max(1, len(copies.lengths))

    def awaited(self, copies: Copies) -> Event | None:
        """Return None: there is always room."""
        del copies

    def copy(self, copies: Copies) -> object:
        """Queue memory copies; they release the interpreter lock."""
        self.enqueue(lambda: self._move(copies))
        return None

    def record(self) -> ThreadEvent:
        """Return an event behind all that was enqueued."""
        event = ThreadEvent()

        def come_past() -> None:
            error, self._error = self._error, None
            event.pass_now(error)

        self.enqueue(come_past)
        return event

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued and end the thread; False when the time ran out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _move(self, copies: Copies) -> None:
        if self._error is not None:
            return
        if self._delay_s:
            time.sleep(self._delay_s)
        _move_on_all_cores(copies)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue) or self._closed)
                if not self._queue:
                    return
                work = self._queue.popleft()
            try:
                work()
            except Exception as failure:  # noqa: BLE001 - as in streams.py: an error of its copies
                self._error = self._error or str(failure) or type(failure).__name__


def _move_on_all_cores(copies: Copies) -> None:
    """Copy on two threads where there are cores and bytes for them.

    One core alone moves pages at two thirds of the speed of one large memcpy, which writes
    around the caches from some size on that is larger than any page.
    """
    num_copies = len(copies.lengths)
    half = num_copies // 2
    if half and copies.num_bytes >= _TWO_THREADS_BYTES_MIN and len(os.sched_getaffinity(0)) > 1:
        other = threading.Thread(target=_move, args=(copies, slice(half, num_copies)))
        other.start()
        _move(copies, slice(0, half))
        other.join()
    else:
        _move(copies, slice(0, num_copies))


def _move(copies: Copies, some: slice) -> None:
    for source, target, length in zip(
        copies.sources[some].tolist(),
        copies.targets[some].tolist(),
        copies.lengths[some].tolist(),
        strict=True,
    ):
        ctypes.memmove(target, source, length)


def _wait_passed(fence: Fence) -> None:
    deadline_s = time.monotonic() + _FENCE_WAIT_S_MAX
    while not fence.is_passed():
        if time.monotonic() > deadline_s:
            raise CopyFailed(f"the fence was not passed within {_FENCE_WAIT_S_MAX:.0f} s")
        time.sleep(_FENCE_POLL_S)
