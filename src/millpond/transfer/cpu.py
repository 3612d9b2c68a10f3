"""Copies on a machine without a GPU.

The engine's forward pass on a CPU has finished when it returns, so a fence taken behind it is
passed already; the lanes wait for it all the same, and run one protocol on both devices.
"""

from millpond.arena.arena import Arena
from millpond.transfer.copies import Direction
from millpond.transfer.device import Event, Fence, Stream
from millpond.transfer.streams import StreamCopyEngine
from millpond.transfer.threads import ThreadStream


class PassedFence:
    """The fence of a device whose work has finished by the time it returns."""

    def is_passed(self) -> bool:
        """Return True."""
        return True


class CpuDevice:
    """A ``Device`` whose streams are threads; mapped memory is ready for memory copies."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s

    def fence(self) -> Fence:
        """Return a passed fence: a CPU's forward pass has finished when it returns."""
        return PassedFence()

    @property
    def can_hold_back(self) -> bool:
        """Return False: the engine computes in its own thread, and there is no stream to hold."""
        return False

    def hold_back(self, end: Event) -> None:
        """Nothing is told of early here."""

    def stream(self, direction: Direction) -> Stream:
        """Make a stream for one direction."""
        return ThreadStream(direction.value, delay_s=self._delay_s)

    def enter_thread(self) -> None:
        """Nothing to prepare."""

    def adopt(self, arena: Arena) -> None:
        """Nothing to do."""

    def is_ready(self, end_offset: int) -> bool:
        """Return True for every offset."""
        return end_offset >= 0

    def release(self, timeout_s: float) -> None:
        """Nothing to give up."""


class CpuCopyEngine(StreamCopyEngine):
    """A ``CopyEngine`` of plain memory copies.

    ``delay_s`` is slept before each submission's first byte: the imposed delay under which
    the fault tests look for what is not ordered.
    """

    def __init__(self, *, delay_s: float = 0.0) -> None:
        super().__init__(CpuDevice(delay_s=delay_s))
