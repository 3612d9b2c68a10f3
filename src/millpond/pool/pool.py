"""The brain of Millpond: which blocks are kept, where, and who may touch them.

The pool is a state machine without I/O: no clock (times come in as ``now_ns``, from any
clock that does not go back), no thread, no log. It never touches the memory it manages. The
daemon, the planner and the property tests drive it alike, each from one thread.

The hazard that shapes it: **a lease cannot be taken back**. A slow or dead process's copy
lands in shared memory whenever it lands. So a lease holds its slots until every rank says
that its copies are over, or is known dead (``drain_rank``). Until then a slot that has left
the index is QUARANTINED and not handed out; time alone frees nothing.

    reserve ──▶ RESERVED ──all ranks finished ok──▶ COMMITTED ──evicted, unheld──▶ FREE
                    │                                   │
      abort, expiry, │ a block before it left            │ left the index while a reader
                    ▼                                   ▼ holds it
                 QUARANTINED ──last hold ends──▶ FREE ◀─┘
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from zlib import crc32

from millpond.model.errors import HandshakeRefused, LeaseUnknown
from millpond.model.leases import LookupResult, ReadLease, WriteLease
from millpond.model.limits import (
    BLOCKS_SHOWN_MAX,
    KEY_BYTES,
    KEYS_PER_REQUEST_MAX,
    LEASES_PER_SESSION_MAX,
    NAMESPACES_MAX,
    PARTS_MAX,
    RANKS_MAX,
    WRITE_LEASE_S_MAX,
)
from millpond.model.names import Coverage, Outcome, SlotRef, SlotState
from millpond.model.namespace import Namespace, aligned_slot_bytes
from millpond.model.retention import DEFAULT_RETENTION, Retention
from millpond.pool.allocator import RESERVED, STATES, Allocator, default_extent_bytes
from millpond.pool.damage import Damage, condemn
from millpond.pool.evicting import Evictor
from millpond.pool.index import Index, Part
from millpond.pool.inspection import describe_blocks
from millpond.pool.invariants import check_invariants
from millpond.pool.policies.chosen import ADMISSION, EVICTION
from millpond.pool.reading import blocks_to_read, longest_usable, pairs_of
from millpond.pool.reserving import Wish, grant_slots
from millpond.pool.sessions import Lease, Reading, Replica, Session, Sessions, Writing
from millpond.pool.statistics import Counts, pool_statistics
from millpond.pool.store import Store

__all__ = ["Pool", "default_extent_bytes"]

_WRITE_LEASE_NS_MAX = int(WRITE_LEASE_S_MAX * 1e9)


class Pool:
    """Which blocks are kept, where, and who may touch them; owned by one thread.

    ``arena_bytes`` is the slot area, without the arena's header; all offsets count from its
    start. ``retention`` says which blocks are stored and which leave first. ``usable_bytes`` of
    the arena are there to begin with (None: all), the rest comes by ``grow``.
    """

    def __init__(
        self,
        *,
        epoch: int,
        arena_bytes: int,
        extent_bytes: int,
        retention: Retention = DEFAULT_RETENTION,
        usable_bytes: int | None = None,
    ) -> None:
        self._arena_bytes = arena_bytes
        self._usable_bytes = 0
        self._retention = retention
        self._allocator = Allocator(
            epoch=epoch,
            arena_bytes=arena_bytes,
            extent_bytes=extent_bytes,
            make_policy=EVICTION[self._retention.eviction],
        )
        self._store = Store(self._allocator)
        self._evictor = Evictor(self._store)
        self.grow(arena_bytes if usable_bytes is None else usable_bytes)
        self._admission = ADMISSION[self._retention.admission]()
        self._sessions = Sessions()
        self._namespace_ids: dict[bytes, int] = {}
        self._enabled = True
        self._counts = Counts()
        self._num_reserves = 0

    # ------------------------------------------------------------ who takes part

    def add_namespace(self, namespace: Namespace) -> int:
        """Return the id of ``namespace``; the same id for an equal one (by digest).

        Raises ``HandshakeRefused`` with code ``too-large`` (a slot larger than an extent) or
        ``full`` (NAMESPACES_MAX), ready to be sent on.
        """
        digest = namespace.digest()
        known = self._namespace_ids.get(digest)
        if known is not None:
            return known
        namespace_id = len(self._namespace_ids)
        if namespace_id == NAMESPACES_MAX:
            raise HandshakeRefused(
                "full", "namespace", f"the pool serves {NAMESPACES_MAX} namespaces already"
            )
        extent_bytes = self._allocator.extent_bytes
        for spec in namespace.parts:
            if aligned_slot_bytes(spec.slot_bytes) > extent_bytes:
                raise HandshakeRefused(
                    "too-large",
                    "parts",
                    f"part {spec.name!r} needs slots of {spec.slot_bytes} bytes; an extent of "
                    f"this pool has {extent_bytes}: start the pool with a larger size",
                )
        has_pages = any(spec.coverage is Coverage.EVERY for spec in namespace.parts)
        parts = tuple(
            Part(
                number=number,
                coverage=spec.coverage,
                window_blocks=spec.window_blocks,
                table=self._allocator.table(
                    aligned_slot_bytes(spec.slot_bytes),
                    holds_states=has_pages and spec.coverage is Coverage.LAST,
                ),
                owner=namespace_id * PARTS_MAX + number,
            )
            for number, spec in enumerate(namespace.parts)
        )
        self._store.indexes.append(Index(parts))
        self._namespace_ids[digest] = namespace_id
        return namespace_id

    def open_session(self, *, replica: str, namespace_id: int, num_ranks: int) -> int:
        """Open a session, one incarnation of an engine; its id (>= 1) is never used again.

        ``HandshakeRefused`` with code ``full`` when too many replica names have been seen.
        """
        if not 1 <= num_ranks <= RANKS_MAX:
            raise ValueError(f"num_ranks is {num_ranks}, must be 1 to {RANKS_MAX}")
        return self._sessions.open(replica, self._index(namespace_id), num_ranks).session_id

    def close_session(self, session: int) -> None:
        """Take no more requests from ``session``; idempotent, unknown sessions are ignored.

        Its unfinished writes leave the index at once. Slots of its live leases stay out of
        use until each rank has finished them or is drained.
        """
        record = self._sessions.by_id.get(session)
        if record is None:
            return
        record.is_open = False
        for lease in record.leases.values():
            if isinstance(lease, Writing):
                self._abort(lease)
        self._sessions.forget_if_over(record)

    def drain_rank(self, session: int, rank: int) -> None:
        """Note that ``rank`` of ``session`` has no copy in flight, or that it is dead.

        Ends that rank's part of every live lease of the session, aborting write leases that
        it had not finished. Idempotent; a session that is gone is ignored. A rank outside
        the session's ``num_ranks`` is a ``ValueError``.
        """
        record = self._sessions.by_id.get(session)
        if record is None:
            return
        bit = _rank_bit(record, rank)
        for lease in list(record.leases.values()):
            if lease.ranks & bit:
                # An aborted lease commits nothing: no time is needed.
                if isinstance(lease, Writing):
                    self._abort(lease)
                self._end_ranks(lease, bit, now_ns=0)

    def may_copy(self, session: int, rank: int) -> bool:
        """Return whether ``rank`` of ``session`` has a lease that it has not finished."""
        record = self._sessions.by_id.get(session)
        if record is None:
            return False
        bit = _rank_bit(record, rank)
        return any(lease.ranks & bit for lease in record.leases.values())

    # ------------------------------------------------------------ reading

    def lookup(self, namespace_id: int, keys: bytes, key_bytes: int) -> LookupResult:
        """Return how many blocks of ``keys`` could be loaded now; changes nothing.

        ``ValueError`` for keys of a wrong length or too many of them (all verbs).
        """
        num_keys = _num_keys(keys, key_bytes)
        index = self._index(namespace_id)
        if not self._enabled:
            return LookupResult(0, Outcome.MISS)
        num_blocks, _, outcome = longest_usable(index, keys, key_bytes, num_keys)
        self._counts.lookups[outcome] += 1
        return LookupResult(num_blocks, outcome)

    def pin(
        self, session: int, keys: bytes, key_bytes: int, *, first_block: int, now_ns: int
    ) -> ReadLease:
        """Look up and hold the longest usable prefix if it has more than ``first_block`` blocks.

        ``reason`` where nothing is granted: ``off``, ``miss`` or ``limit``
        (LEASES_PER_SESSION_MAX). ``ValueError`` for a session that is not open.
        """
        record = self._sessions.opened(session)
        num_keys = _num_keys(keys, key_bytes)
        if first_block < 0:
            raise ValueError(f"first_block {first_block} < 0")
        if not self._enabled:
            return self._refuse_pin(0, Outcome.MISS, "off")
        index = record.index
        num_blocks, node, outcome = longest_usable(index, keys, key_bytes, num_keys)
        if num_blocks <= first_block:
            return self._refuse_pin(num_blocks, outcome, "miss")
        if len(record.leases) >= LEASES_PER_SESSION_MAX:
            return self._refuse_pin(num_blocks, outcome, "limit")
        slots: list[array[int]] = []
        offsets: list[array[int]] = []
        for part, blocks in blocks_to_read(index, first_block, num_blocks):
            held = self._store.hold(part, index, index.path(node, len(blocks)), now_ns)
            slots.append(held)
            offsets.append(pairs_of(blocks, map(part.table.offset.__getitem__, held)))
        self._store.refresh(index, node)
        lease = Reading(self._sessions.next_lease_id(), record, tuple(slots), record.all_ranks)
        record.leases[lease.lease_id] = lease
        self._counts.pins["granted"] += 1
        writers = self._note_read(record, slots)
        return ReadLease(lease.lease_id, num_blocks, outcome, tuple(offsets), writers)

    def _refuse_pin(self, num_blocks: int, outcome: Outcome, reason: str) -> ReadLease:
        self._counts.pins[reason] += 1
        return ReadLease(None, num_blocks, outcome, reason=reason)

    def _note_read(self, record: Session, slots: list[array[int]]) -> tuple[tuple[str, int], ...]:
        first = record.index.first_part
        replicas = self._sessions.replicas
        numbers = Counter(map(first.table.writer.__getitem__, slots[first.number]))
        writers = tuple((replicas[number].name, count) for number, count in numbers.items())
        reader = record.replica
        reader.num_read_leases += 1
        for part in record.index.parts:
            reader.num_bytes_read += len(slots[part.number]) * part.table.slot_bytes
        for name, count in writers:
            reader.num_blocks_read += count
            by_writer = reader.num_blocks_read_by_writer
            by_writer[name] = by_writer.get(name, 0) + count
        return writers

    # ------------------------------------------------------------ writing

    def reserve(  # noqa: PLR0913 (the fields of one frame of the wire, and the time)
        self,
        session: int,
        keys: bytes,
        key_bytes: int,
        *,
        first_block: int,
        parts: tuple[Sequence[int], ...],
        now_ns: int,
        request_id: str | None = None,
    ) -> WriteLease:
        """Reserve slots for what is missing of a chain of blocks that starts at block 0.

        ``parts[p]`` lists the blocks that part p can be written for (LAST, WINDOW); it is
        empty for an EVERY part, which is written for every missing block from
        ``first_block`` on, at most BLOCKS_PER_RESERVE_MAX. ``request_id`` tells the requests
        of a session apart, for admission by second touch; without it, each reserve counts as
        a request. ``reason`` where nothing is granted: ``off``, ``present``, ``hole`` (blocks
        before ``first_block`` are missing), ``full``, ``not-admitted`` or ``limit``.
        ``ValueError`` for a session that is not open, blocks out of range or a broken chain.
        """
        record = self._sessions.opened(session)
        wish = Wish(
            index=record.index,
            keys=keys,
            key_bytes=key_bytes,
            num_keys=_num_keys(keys, key_bytes),
            first_block=first_block,
            parts=parts,
            request=self._request_number(session, request_id),
        )
        replica = record.replica
        if not self._enabled:
            return self._refuse_reserve(replica, first_block, "off")
        if len(record.leases) >= LEASES_PER_SESSION_MAX:
            return self._refuse_reserve(replica, first_block, "limit")
        grant = grant_slots(self._evictor, self._admission, wish, now_ns)
        self._counts.note_refused(grant.refused)
        if grant.reason:
            return self._refuse_reserve(replica, first_block, grant.reason)
        for part, slots in zip(record.index.parts, grant.slots, strict=True):
            for slot in slots:
                part.table.writer[slot] = replica.number
        lease = Writing(
            self._sessions.next_lease_id(),
            record,
            grant.slots,
            record.all_ranks,
            granted_ns=now_ns,
        )
        record.leases[lease.lease_id] = lease
        self._sessions.writing[lease.lease_id] = lease
        replica.num_write_leases += 1
        self._counts.reserves["granted"] += 1
        return WriteLease(lease.lease_id, grant.first_block, grant.offsets)

    def _request_number(self, session: int, request_id: str | None) -> int:
        if request_id is None:
            self._num_reserves += 1
            return self._num_reserves
        return session << 32 | crc32(request_id.encode())

    def _refuse_reserve(self, replica: Replica, first_block: int, reason: str) -> WriteLease:
        self._counts.reserves[reason] += 1
        replica.num_reserves_refused[reason] += 1
        return WriteLease(None, first_block, reason=reason)

    # ------------------------------------------------------------ the ends of leases

    def finish(
        self, session: int, lease_id: int, *, rank: int | None, ok: bool, now_ns: int
    ) -> None:
        """End the copies of ``rank`` (None: of all ranks) under a lease, read or write.

        A write lease commits when all ranks have finished ok; the first that is not ok aborts
        it. ``LeaseUnknown`` for a lease that is not live, belongs to another session, or that
        this rank has finished already; nothing changes then. Works on closed sessions too.
        """
        lease = self._sessions.lease(session, lease_id)
        bits = lease.ranks if rank is None else _rank_bit(lease.session, rank)
        if not lease.ranks & bits:
            raise LeaseUnknown(lease_id)
        if isinstance(lease, Writing) and not ok:
            self._abort(lease)
        self._end_ranks(lease, bits, now_ns)

    def note_checked(
        self, session: int, lease_id: int, *, num_checked: int, damaged: Sequence[int]
    ) -> list[Damage]:
        """Note that a reader has compared ``num_checked`` slots of its lease with their sums.

        Those at the offsets ``damaged`` had other bytes than were written: their blocks are
        forgotten and the slots never used again. Returns what was not known before.
        ``LeaseUnknown`` as for ``finish``, before which this is to be called; ``ValueError``
        for a write lease, and for slots or counts that are none of the lease's.
        """
        lease = self._sessions.lease(session, lease_id)
        num_slots = sum(map(len, lease.slots))
        if not isinstance(lease, Reading) or not 0 <= num_checked <= num_slots:
            raise ValueError(f"{num_checked} slots of lease {lease_id} checked, of {num_slots}")
        found = condemn(self._store, self._sessions.replicas, lease, damaged)
        lease.session.replica.num_slots_checked += num_checked
        self._counts.num_slots_checked += num_checked
        self._counts.num_slots_damaged += len(found)
        for damage in found:
            damage.writer.num_slots_damaged += 1
        return found

    def expire(self, now_ns: int) -> int:
        """Abort write leases older than WRITE_LEASE_S_MAX; return how many.

        Their keys can then be written by somebody else, but their slots wait in quarantine
        for the ranks. Read leases do not expire: to end one early would free nothing that is
        safe to use, since the reader could still be copying, and its blocks are no worse for
        being held. Only looks at what has expired, so that it may be called every second.
        """
        num_expired = 0
        while self._sessions.writing:
            oldest = next(iter(self._sessions.writing.values()))
            if now_ns - oldest.granted_ns < _WRITE_LEASE_NS_MAX:
                break
            self._abort(oldest)
            num_expired += 1
        self._counts.num_write_leases_expired += num_expired
        return num_expired

    def _end_ranks(self, lease: Lease, bits: int, now_ns: int) -> None:
        lease.ranks &= ~bits
        if lease.ranks:
            return
        index = lease.session.index
        if isinstance(lease, Writing) and not lease.is_aborted:
            self._commit(lease, now_ns)
        for part, slots in zip(index.parts, lease.slots, strict=True):
            self._store.release(part, index, slots)
        del lease.session.leases[lease.lease_id]
        self._sessions.forget_if_over(lease.session)

    def _commit(self, lease: Writing, now_ns: int) -> None:
        index = lease.session.index
        first = index.first_part
        for part, slots in zip(index.parts, lease.slots, strict=True):
            # Slots of blocks whose ancestors left meanwhile are in quarantine. States were
            # taken from the deepest up: each is to find the one before it committed.
            in_order = slots if part.is_every else reversed(slots)
            written = [slot for slot in in_order if part.table.state[slot] == RESERVED]
            for slot in written:
                self._store.commit(part, index, slot, now_ns)
            if part is first:
                lease.session.replica.num_blocks_written += len(written)
        del self._sessions.writing[lease.lease_id]

    def _abort(self, lease: Writing) -> None:
        """Take the keys of a write lease out of the index; its holds stay until it ends."""
        if lease.is_aborted:
            return
        lease.is_aborted = True
        del self._sessions.writing[lease.lease_id]
        lease.session.replica.num_write_leases_aborted += 1
        index = lease.session.index
        for part, slots in zip(index.parts, lease.slots, strict=True):
            table = part.table
            for slot in slots:
                if table.state[slot] != RESERVED:
                    continue  # left with a block before it
                if part.is_every:
                    self._store.drop_subtree(index, table.node[slot])
                else:
                    self._store.drop_tail(part, index, table.node[slot])

    # ------------------------------------------------------------ the whole pool

    def grow(self, usable_bytes: int) -> None:
        """Use the arena up to ``usable_bytes``, whose memory is there now.

        The pool's capacity is what it may use at the time, in whole extents, and never what is
        still to come: a full pool evicts, ``state_ratio`` is of ``usable_bytes``, and statistics
        know no other extents. ``ValueError`` for less than before or more than the arena.
        """
        if not self._usable_bytes <= usable_bytes <= self._arena_bytes:
            raise ValueError(
                f"usable_bytes {usable_bytes} after {self._usable_bytes}, of {self._arena_bytes}"
            )
        self._usable_bytes = usable_bytes
        self._allocator.grow(usable_bytes)
        self._evictor.state_bytes_max = int(self._retention.state_ratio * usable_bytes)

    @property
    def enabled(self) -> bool:
        """Whether lookups can hit and leases are granted."""
        return self._enabled

    def set_enabled(self, *, enabled: bool) -> None:
        """Switch the pool; off, lookups miss and nothing is granted. Live leases go on."""
        self._enabled = enabled

    def flush(self) -> int:
        """Forget every block, and that it was asked for; return how many there were.

        Slots under lease are freed as leases end.
        """
        self._admission.clear()
        return self._store.clear()

    def slot_at(self, offset_bytes: int) -> SlotRef:
        """Name the slot at an offset handed out by a lease; ``StaleSlot`` if there is none."""
        return self._allocator.slot_at(offset_bytes)

    def resolve(self, ref: SlotRef) -> int:
        """Return the offset of a slot; ``StaleSlot`` when epoch or generation has moved."""
        table, slot = self._allocator.locate(ref)
        return table.offset[slot]

    def slot_state(self, ref: SlotRef) -> SlotState:
        """Return the state of a slot; ``StaleSlot`` when epoch or generation has moved."""
        table, slot = self._allocator.locate(ref)
        return STATES[table.state[slot]]

    def statistics(self) -> dict[str, object]:
        """Return counts and sizes as plain dicts, lists, strings and numbers (msgpack-able)."""
        return {
            "enabled": self._enabled,
            "retention": {
                "eviction": self._retention.eviction.value,
                "admission": self._retention.admission.value,
                "state_ratio": self._retention.state_ratio,
                "state_bytes_max": self._evictor.state_bytes_max,
            },
            "admission": self._admission.statistics(),
            **pool_statistics(self._evictor, self._sessions, self._counts),
        }

    def blocks(self, num_max: int) -> list[dict[str, object]]:
        """Return where at most ``num_max`` blocks lie, as plain values; not for hot paths.

        ``ValueError`` for more than BLOCKS_SHOWN_MAX.
        """
        if not 0 < num_max <= BLOCKS_SHOWN_MAX:
            raise ValueError(f"num_max is {num_max}, must be 1 to {BLOCKS_SHOWN_MAX}")
        return describe_blocks(self._store, self._sessions, num_max)

    def check_invariants(self) -> None:
        """Raise ``InvariantBroken`` naming what is wrong; walks everything, not for hot paths."""
        check_invariants(self._evictor, self._sessions)

    def _index(self, namespace_id: int) -> Index:
        if not 0 <= namespace_id < len(self._store.indexes):
            raise ValueError(f"namespace {namespace_id} does not exist")
        return self._store.indexes[namespace_id]


def _num_keys(keys: bytes, key_bytes: int) -> int:
    if key_bytes not in KEY_BYTES or len(keys) % key_bytes:
        raise ValueError(f"{len(keys)} bytes of keys of {key_bytes} bytes each")
    num_keys = len(keys) // key_bytes
    if num_keys > KEYS_PER_REQUEST_MAX:
        raise ValueError(f"{num_keys} keys in one request, at most {KEYS_PER_REQUEST_MAX}")
    return num_keys


def _rank_bit(session: Session, rank: int) -> int:
    if not 0 <= rank < session.num_ranks:
        raise ValueError(f"rank {rank} in a session of {session.num_ranks}")
    return 1 << rank
