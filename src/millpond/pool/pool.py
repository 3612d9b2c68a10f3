"""The brain of Millpond: which blocks are kept, where, and who may touch them.

SKELETON: signatures are final, bodies follow.
"""

from collections.abc import Sequence

from millpond.model.leases import LookupResult, ReadLease, WriteLease
from millpond.model.names import SlotRef, SlotState
from millpond.model.namespace import Namespace


def default_extent_bytes(arena_bytes: int) -> int:
    """Return the extent size for a slot area of ``arena_bytes``."""
    raise NotImplementedError


class Pool:
    """Which blocks are kept, where, and who may touch them; owned by one thread."""

    def __init__(self, *, epoch: int, arena_bytes: int, extent_bytes: int) -> None:
        raise NotImplementedError

    @property
    def enabled(self) -> bool:
        raise NotImplementedError

    def add_namespace(self, namespace: Namespace) -> int:
        """Return the id of ``namespace``; the same id for an equal one (by digest).

        Raises ``HandshakeRefused`` with code ``too-large`` (a slot larger than an extent) or
        ``full`` (NAMESPACES_MAX), ready to be sent on.
        """
        raise NotImplementedError

    def open_session(self, *, replica: str, namespace_id: int, num_ranks: int) -> int:
        """Open a session, one incarnation of an engine; its id (>= 1) is never used again.

        ``HandshakeRefused`` with code ``full`` when too many replica names have been seen.
        """
        raise NotImplementedError

    def close_session(self, session: int) -> None:
        """Take no more requests from ``session``; idempotent, unknown sessions are ignored.

        Its unfinished writes leave the index at once. Slots of its live leases stay out of
        use until each rank has finished them or is drained.
        """
        raise NotImplementedError

    def drain_rank(self, session: int, rank: int) -> None:
        """Note that ``rank`` of ``session`` has no copy in flight, or that it is dead.

        Ends that rank's part of every live lease of the session, aborting write leases that
        it had not finished. Idempotent; a session that is gone is ignored. A rank outside
        the session's ``num_ranks`` is a ``ValueError``.
        """
        raise NotImplementedError

    def lookup(self, namespace_id: int, keys: bytes, key_bytes: int) -> LookupResult:
        """Return how many blocks of ``keys`` could be loaded now; changes nothing.

        ``ValueError`` for keys of a wrong length or too many of them (all verbs).
        """
        raise NotImplementedError

    def pin(
        self, session: int, keys: bytes, key_bytes: int, *, first_block: int, now_ns: int
    ) -> ReadLease:
        """Look up and hold the longest usable prefix if it has more than ``first_block`` blocks.

        ``reason`` where nothing is granted: ``off``, ``miss`` or ``limit``
        (LEASES_PER_SESSION_MAX). ``ValueError`` for a session that is not open.
        """
        raise NotImplementedError

    def reserve(
        self,
        session: int,
        keys: bytes,
        key_bytes: int,
        *,
        first_block: int,
        parts: tuple[Sequence[int], ...],
        now_ns: int,
    ) -> WriteLease:
        """Reserve slots for what is missing of a chain of blocks that starts at block 0.

        ``parts[p]`` lists the blocks that part p can be written for (LAST, WINDOW); it is
        empty for an EVERY part, which is written for every missing block from
        ``first_block`` on. ``reason`` where nothing is granted: ``off``, ``present``,
        ``hole`` (blocks before ``first_block`` are missing), ``full`` or ``limit``.
        ``ValueError`` for a session that is not open, blocks out of range or a broken chain.
        """
        raise NotImplementedError

    def finish(
        self, session: int, lease_id: int, *, rank: int | None, ok: bool, now_ns: int
    ) -> None:
        """End the copies of ``rank`` (None: of all ranks) under a lease, read or write.

        A write lease commits when all ranks have finished ok; the first that is not ok aborts
        it. ``LeaseUnknown`` for a lease that is not live, belongs to another session, or that
        this rank has finished already; nothing changes then. Works on closed sessions too.
        """
        raise NotImplementedError

    def expire(self, now_ns: int) -> int:
        """Abort write leases older than WRITE_LEASE_S_MAX; return how many. Cheap each second."""
        raise NotImplementedError

    def set_enabled(self, *, enabled: bool) -> None:
        """Switch the pool; off, lookups miss and nothing is granted. Live leases go on."""
        raise NotImplementedError

    def flush(self) -> int:
        """Forget every block; return how many. Slots under lease are freed as leases end."""
        raise NotImplementedError

    def slot_at(self, offset_bytes: int) -> SlotRef:
        """Name the slot at an offset handed out by a lease; ``StaleSlot`` if there is none."""
        raise NotImplementedError

    def resolve(self, ref: SlotRef) -> int:
        """Return the offset of a slot; ``StaleSlot`` when epoch or generation has moved."""
        raise NotImplementedError

    def slot_state(self, ref: SlotRef) -> SlotState:
        """Return the state of a slot; ``StaleSlot`` when epoch or generation has moved."""
        raise NotImplementedError

    def statistics(self) -> dict[str, object]:
        """Return counts and sizes as plain dicts, lists, strings and numbers (msgpack-able)."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Raise ``InvariantBroken`` naming what is wrong; walks everything, not for hot paths."""
        raise NotImplementedError
