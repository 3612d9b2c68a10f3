"""The interface of copy engines: fences in, completions out, never a block of the caller.

The edges that every engine must keep, with the names of docs/ORDERING.md:

    E1  a store reads a page only after the kernels that write it   (``after`` of a store)
    E2  a commit follows the last byte in host memory               (``on_done``)
    E3  a load writes a page only after its earlier uses            (``after`` of a load)
    E4  the model reads a page only after the load's last byte      (``on_landed``, ``on_done``)
    E5  a slot is reused only after the copies from and to it       (leases end in ``on_done``)
    E6  memory outlives the copies that use it                      (``keep_alive``)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from millpond.arena.arena import Arena
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import Fence


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a finished submission is reported with: bytes moved, time taken, what failed."""

    direction: Direction
    num_bytes: int
    elapsed_ns: int
    error: str | None


@dataclass(frozen=True, slots=True)
class Ends:
    """Who is told of the end of a submission, and of its landing: see ``CopyEngine``."""

    on_done: Callable[[Ticket], None]
    on_landed: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """Until when loads may keep the link busy, by ``time.monotonic``.

    From ``ends_s`` on nothing is limited, where no other pace has been told. ``bytes_per_s``,
    which is positive, is what the link gives.
    """

    bytes_per_s: float
    busy_until_s: float
    ends_s: float


class CopyEngine(Protocol):
    """Runs copies in order, one lane a direction, loads never behind stores.

    ``on_done`` is called once for every submission, from the engine's own thread, after the
    last byte has landed or after the failure is final: never on enqueue. Before it, for what
    did not fail, ``on_landed``, from that thread or from within ``step``: it must be short.
    From then on the pages may be used, but see ``step``.
    """

    def fence(self) -> Fence:
        """Return a fence after all work submitted so far to the caller's current stream."""
        ...

    def adopt(self, arena: Arena) -> None:
        """Make the arena's memory ready for copies, in the background; replaces an earlier one.

        No copy from or to the earlier one may be in flight.
        """
        ...

    def release(self, timeout_s: float) -> None:
        """Give up the adopted arena's memory; no copy is in flight. Bounded."""
        ...

    def is_ready(self, end_offset: int) -> bool:
        """Say whether the adopted arena can be copied from and to before ``end_offset``."""
        ...

    def submit(
        self,
        direction: Direction,
        copies: Copies,
        *,
        after: Fence,
        keep_alive: object,
        ends: Ends,
    ) -> None:
        """Queue ``copies`` behind ``after``; return at once."""
        ...

    def step(self, *, early: bool = False) -> None:
        """Go on with what is queued, and tell of what has landed; waits for nothing.

        For the thread that submits, as often as it comes by: see ``streams.py``. With ``early``
        the oldest load that has not landed is told of as well, if all of its copies are on their
        stream and none is under way that was told of so. Who asks for that calls ``hold_back``
        before it enqueues anything that may use any page.
        """
        ...

    def hold_back(self) -> None:
        """Hold the caller's current stream back until a load that was told of early has landed.

        All that is enqueued there from now on waits, whatever it is; the caller does not.
        Raises ``CopyFailed`` where the device has failed.
        """
        ...

    def begin_step(self) -> None:
        """Go on with stores, by a portion: the tokens of the step before are on their way.

        For an engine that tells of its steps; elsewhere it is done without.
        """
        ...

    def pace(self, pace: Pace | None) -> None:
        """Put on the stream what of the loads is over in time; None: all there is room for.

        For the thread that submits, where small copies of its own would have to wait for what is
        on the stream by then. With a pace it goes on with what is queued, by a portion.
        """
        ...

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or in flight; False when the time ran out."""
        ...

    def close(self, timeout_s: float) -> bool:
        """Refuse new work, finish what is queued, stop the threads; False on time-out."""
        ...
