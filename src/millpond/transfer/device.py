"""What the lanes need of a device: streams that run work in order, and events between them.

Real on CUDA (``cuda.py``); threads on a machine without a GPU (``threads.py``).
"""

from typing import Protocol

from millpond.arena.arena import Arena
from millpond.model.errors import ExpectedError
from millpond.transfer.copies import Copies, Direction


class CopyFailed(ExpectedError):
    """The device could not do what was enqueued; what it should have copied is undefined."""


class Fence(Protocol):
    """A point in the order of a device's work."""

    def is_passed(self) -> bool:
        """Say whether all work before the fence has ended, or failed; does not block or raise."""
        ...


class Event(Fence, Protocol):
    """A fence that a host thread can wait for."""

    def wait(self) -> None:
        """Block this thread, without the interpreter lock, until the fence is passed.

        Raises ``CopyFailed`` where the work before it failed.
        """
        ...


class Stream(Protocol):
    """A queue of the device: its work runs in order, and unordered against other streams.

    Used by one thread at a time, and none of it waits for the device.
    """

    def portion(self, copies: Copies) -> int:
        """Return how many copies, like these, are handed over at a time."""
        ...

    def awaited(self, copies: Copies) -> Event | None:
        """Return what has to be waited for before there is room for a portion; None if nothing."""
        ...

    def wait_for(self, fence: Fence) -> None:
        """Hold back what is enqueued from now on until ``fence`` is passed."""
        ...

    def copy(self, copies: Copies) -> object:
        """Enqueue the copies; the result and their memory must be kept alive until they end.

        Raises ``CopyFailed`` where they cannot be enqueued, or not all of them.
        """
        ...

    def record(self) -> Event:
        """Return an event behind everything that was enqueued so far."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Give up what the stream holds; all its work has ended. False when time ran out."""
        ...


class Device(Protocol):
    """Where an engine's pages are."""

    def fence(self) -> Fence:
        """Return a fence behind all work submitted so far to the caller's current stream."""
        ...

    @property
    def can_hold_back(self) -> bool:
        """Whether the caller's current stream can wait for an event."""
        ...

    def hold_back(self, end: Event) -> None:
        """Hold back what the caller's current stream is given from now on until ``end`` is passed.

        Raises ``CopyFailed`` where the device has failed.
        """
        ...

    def stream(self, direction: Direction) -> Stream:
        """Make a stream of its own for one direction; loads go before stores."""
        ...

    def enter_thread(self) -> None:
        """Prepare a new thread of this process for the device."""
        ...

    def adopt(self, arena: Arena) -> None:
        """As ``CopyEngine.adopt``."""
        ...

    def is_ready(self, end_offset: int) -> bool:
        """As ``CopyEngine.is_ready``."""
        ...

    def release(self, timeout_s: float) -> None:
        """Give up the adopted arena; no copy is in flight."""
        ...
