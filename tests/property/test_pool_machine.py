"""Random interleavings of everything that replicas can do to a pool, against the model."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millpond.model.errors import LeaseUnknown, StaleSlot
from millpond.model.leases import NO_SLOT, ReadLease, WriteLease
from millpond.model.limits import KIB, WRITE_LEASE_S_MAX
from millpond.model.names import Admission, Coverage, Eviction, Outcome, SlotState
from millpond.model.namespace import PartSpec
from millpond.model.retention import Retention
from millpond.pool.pool import Pool
from tests.pool_values import EVERY, KEY_BYTES, LAST, WINDOW, namespace
from tests.property.pool_model import Entry, Model, ModelLease, ModelSession, Path, key, packed

EXTENT_BYTES = 48 * KIB
EPOCH = 7
NAMESPACES = [
    namespace(EVERY, model="attention"),
    namespace(EVERY, LAST, model="hybrid"),
    namespace(PartSpec("pages", Coverage.EVERY, 16 * KIB), WINDOW, model="window"),
    namespace(LAST, model="recurrent"),
    namespace(EVERY, PartSpec("more", Coverage.EVERY, 4 * KIB), LAST, WINDOW, model="all"),
]

# Few prefixes that share their beginnings, so that replicas meet on them all the time.
STEMS = ("aaaaaaa", "aaabbbb", "abababa", "bbbbbbb")
PATHS = sorted({tuple(stem[:n]) for stem in STEMS for n in range(1, 8)})
paths = st.sampled_from(PATHS)
choices = st.sampled_from(range(60))  # of what there is, modulo how much; 60 for no bias
request_ids = st.sampled_from([None, "first", "second"])
tail_blocks = st.one_of(st.just(set(range(7))), st.sets(st.integers(0, 6)))


class PoolMachine(RuleBasedStateMachine):
    """``num_extents`` decides whether there is room for all or for next to nothing."""

    num_extents = 400
    num_extents_first: int | None = None
    """How many are there at the beginning; None for all."""
    retention = Retention()

    @initialize(served=st.sampled_from(list(itertools.combinations(range(len(NAMESPACES)), 2))))
    def start(self, served: tuple[int, int]) -> None:
        self.arena_bytes = self.num_extents * EXTENT_BYTES + 4 * KIB
        self.usable_bytes = self.arena_bytes
        if self.num_extents_first is not None:
            self.usable_bytes = self.num_extents_first * EXTENT_BYTES
        self.pool = Pool(
            epoch=EPOCH,
            arena_bytes=self.arena_bytes,
            extent_bytes=EXTENT_BYTES,
            retention=self.retention,
            usable_bytes=self.usable_bytes,
        )
        self.model = Model(NAMESPACES, self.retention.admission)
        for namespace_id, each in enumerate(NAMESPACES):
            assert self.pool.add_namespace(each) == namespace_id
        self.now_ns = 1
        self.ended: list[Entry] = []
        self.places = {key(path): path for path in PATHS}
        for namespace_id in served:
            self.open_session("north", namespace_id, 1)
            self.open_session("south", namespace_id, 2)

    @precondition(lambda self: self.usable_bytes < self.arena_bytes)
    @rule(num_bytes=st.sampled_from([4 * KIB, EXTENT_BYTES]))
    def grow(self, num_bytes: int) -> None:
        self.usable_bytes = min(self.usable_bytes + num_bytes, self.arena_bytes)
        self.pool.grow(self.usable_bytes)

    # ------------------------------------------------------------ sessions

    @precondition(lambda self: len(self.model.sessions) < 14)
    @rule(
        replica=st.sampled_from(["north", "south"]),
        namespace_id=st.sampled_from(range(len(NAMESPACES))),
        num_ranks=st.integers(1, 2),
    )
    def open_session(self, replica: str, namespace_id: int, num_ranks: int) -> None:
        session = self.pool.open_session(
            replica=replica, namespace_id=namespace_id, num_ranks=num_ranks
        )
        assert session not in self.model.sessions
        self.model.sessions[session] = ModelSession(replica, namespace_id, num_ranks)

    @precondition(lambda self: self.model.sessions)
    @rule(choice=choices, chance=st.integers(0, 2))
    def close_session(self, choice: int, chance: int) -> None:
        if chance:
            return
        session = self._session(choice)
        self.pool.close_session(session)
        self.model.sessions[session].is_open = False
        for lease in self.model.leases.values():
            if lease.session == session:
                self.model.abort(lease)
        self.model.forget_session(session)

    @precondition(lambda self: self.model.sessions)
    @rule(choice=choices, rank=st.integers(0, 1))
    def drain_rank(self, choice: int, rank: int) -> None:
        session = self._session(choice)
        if rank >= self.model.sessions[session].num_ranks:
            with pytest.raises(ValueError, match="rank"):
                self.pool.drain_rank(session, rank)
            return
        self.pool.drain_rank(session, rank)
        for lease_id, lease in list(self.model.leases.items()):
            if lease.session == session and rank in lease.ranks:
                self.model.abort(lease)
                self.model.end_rank(lease_id, {rank})

    # ------------------------------------------------------------ requests

    @precondition(lambda self: self.model.sessions)
    @rule(choice=choices, path=paths)
    def lookup(self, choice: int, path: Path) -> None:
        namespace_id = self.model.sessions[self._session(choice)].namespace_id
        found = self.pool.lookup(namespace_id, packed(path), KEY_BYTES)
        num_blocks, outcomes = self.model.usable(namespace_id, path)
        if not self.pool.enabled:
            num_blocks, outcomes = 0, {Outcome.MISS}
        assert found.num_blocks == num_blocks
        assert found.outcome in outcomes

    @precondition(lambda self: self._open_sessions())
    @rule(choice=choices, path=paths, first_block=st.sampled_from([0, 0, 0, 1, 2, 3]))
    def pin(self, choice: int, path: Path, first_block: int) -> None:
        session = self._session(choice, must_be_open=True)
        namespace_id = self.model.sessions[session].namespace_id
        lease = self.pool.pin(
            session, packed(path), KEY_BYTES, first_block=first_block, now_ns=self._tick()
        )
        num_blocks, outcomes = self.model.usable(namespace_id, path)
        if not self.pool.enabled or num_blocks <= first_block:
            assert lease.lease_id is None
            assert lease.reason == ("miss" if self.pool.enabled else "off")
            return
        assert lease.num_blocks == num_blocks
        assert lease.outcome in outcomes
        self._check_read_lease(session, path[:num_blocks], first_block, lease)

    def _check_read_lease(
        self, session: int, path: Path, first_block: int, lease: ReadLease
    ) -> None:
        record = self.model.sessions[session]
        entries: list[Entry] = []
        for part, pairs in enumerate(lease.offsets):
            assert list(pairs[0::2]) == sorted(pairs[0::2])
            for block, offset in zip(pairs[0::2], pairs[1::2], strict=True):
                entry = self.model.index[record.namespace_id, path[: block + 1], part]
                assert entry.offset == offset
                entries.append(entry)
        expected = self.model.to_read(record.namespace_id, path, first_block)
        assert {(entry.path, entry.part) for entry in entries} == expected
        assert len(entries) == len(expected)
        first_part = next(iter(self.model.every(record.namespace_id)), 0)
        writers = sorted(entry.writer for entry in entries if entry.part == first_part)
        assert sorted(w for w, count in lease.writers for _ in range(count)) == writers
        assert lease.lease_id is not None
        self._add_lease(lease.lease_id, session, entries, writes=False)

    @precondition(lambda self: self._open_sessions())
    @rule(
        choice=choices,
        path=paths,
        first_block=st.sampled_from([0, 0, 0, 1, 2]),
        tails=tail_blocks,
        request_id=request_ids,
    )
    def reserve(
        self, choice: int, path: Path, first_block: int, tails: set[int], request_id: str | None
    ) -> None:
        self._reserve(choice, path, first_block, tails, request_id)

    @precondition(lambda self: self._open_sessions())
    @rule(choice=choices, path=paths, tails=tail_blocks, request_id=request_ids)
    def write(self, choice: int, path: Path, tails: set[int], request_id: str | None) -> None:
        """Reserve and commit at once, so that there is something to hit."""
        lease_id = self._reserve(choice, path, 0, tails, request_id)
        if lease_id is not None:
            session = self.model.leases[lease_id].session
            self.pool.finish(session, lease_id, rank=None, ok=True, now_ns=self._tick())
            self.model.end_rank(lease_id, set(range(2)))

    def _reserve(
        self, choice: int, path: Path, first_block: int, tails: set[int], request_id: str | None
    ) -> int | None:
        session = self._session(choice, must_be_open=True)
        namespace_id = self.model.sessions[session].namespace_id
        first_block = min(first_block, len(path))
        blocks = {
            part: {block for block in tails if block < len(path)}
            for part in self.model.tails(namespace_id)
        }
        before = self.model.num_present(namespace_id, path)
        lease = self.pool.reserve(
            session,
            packed(path),
            KEY_BYTES,
            first_block=first_block,
            parts=tuple(
                sorted(blocks.get(part, ())) for part in range(len(NAMESPACES[namespace_id].parts))
            ),
            now_ns=self._tick(),
            request_id=request_id,
        )
        granted = self._granted(lease)
        in_grant = {(namespace_id, path[: block + 1], part) for block, part in granted}
        there = {p: offset for p, (offset, _) in self._pool_entries().items() if p not in in_grant}
        num_evicted = self.model.note_evicted(there)
        assert self.num_extents < 100 or not num_evicted
        # The prefix that is built on stays, whatever is evicted.
        if self.model.every(namespace_id):
            assert self.model.num_present(namespace_id, path) == before
        missing = self.model.missing(namespace_id, path, blocks)
        is_hole = bool(self.model.every(namespace_id)) and before < first_block
        if not self.pool.enabled or is_hole:
            assert lease.reason == ("hole" if self.pool.enabled else "off")
            return None
        stop = self.model.offer(namespace_id, path, before, (session, request_id))
        missing = {(block, part) for block, part in missing if block < stop}
        assert set(granted) <= missing
        if self.num_extents >= 100:
            assert set(granted) == missing
        if lease.lease_id is None:
            refused = "not-admitted" if stop < len(path) else "present"
            assert lease.reason == ("full" if missing else refused)
        self._check_no_hole(namespace_id, path, granted)
        self._note_write_lease(session, path, lease, granted)
        return lease.lease_id

    def _granted(self, lease: WriteLease) -> dict[tuple[int, int], int]:
        """Return the granted offsets by block and part."""
        granted = {
            (lease.first_block + i, part): offset
            for part, row in enumerate(lease.offsets)
            for i, offset in enumerate(row)
            if offset != NO_SLOT
        }
        assert (lease.lease_id is not None) == bool(granted)
        assert bool(lease.reason) != bool(granted)
        if granted:
            num_blocks = max(block for block, _ in granted) + 1 - lease.first_block
            assert {len(row) for row in lease.offsets} == {num_blocks}
        return granted

    def _check_no_hole(
        self, namespace_id: int, path: Path, granted: dict[tuple[int, int], int]
    ) -> None:
        """Pages come without a gap, and states only where their pages are."""
        every = self.model.every(namespace_id)
        for block, _ in granted:
            for earlier in range(block + 1):
                for part in every:
                    place = namespace_id, path[: earlier + 1], part
                    assert place in self.model.index or (earlier, part) in granted

    def _note_write_lease(
        self, session: int, path: Path, lease: WriteLease, granted: dict[tuple[int, int], int]
    ) -> None:
        if lease.lease_id is None:
            return
        record = self.model.sessions[session]
        entries = [
            Entry(
                namespace_id=record.namespace_id,
                path=path[: block + 1],
                part=part,
                offset=offset,
                num_bytes=self.model.slot_bytes(record.namespace_id, part),
                ref=self.pool.slot_at(offset),
                writer=record.replica,
            )
            for (block, part), offset in granted.items()
        ]
        for entry in entries:
            assert entry.place not in self.model.index
            self.model.index[entry.place] = entry
        self._add_lease(lease.lease_id, session, entries, writes=True)

    # ------------------------------------------------------------ ends

    @precondition(lambda self: self.model.leases)
    @rule(
        choice=choices,
        rank=st.sampled_from([None, 0, 0, 1, 1]),
        ok=st.sampled_from([True] * 4 + [False]),
    )
    def finish(self, choice: int, rank: int | None, ok: bool) -> None:
        lease_id = sorted(self.model.leases)[choice % len(self.model.leases)]
        lease = self.model.leases[lease_id]
        num_ranks = self.model.sessions[lease.session].num_ranks
        ranks = set(range(num_ranks)) if rank is None else {min(rank, num_ranks - 1)}
        wire_rank = None if rank is None else min(ranks)

        def finish(session: int) -> None:
            self.pool.finish(session, lease_id, rank=wire_rank, ok=ok, now_ns=self._tick())

        for other in self.model.sessions.keys() - {lease.session}:
            with pytest.raises(LeaseUnknown):
                finish(other)
        if not ranks & lease.ranks:
            with pytest.raises(LeaseUnknown):
                finish(lease.session)
            return
        finish(lease.session)
        if not ok:
            self.model.abort(lease)
        self.model.end_rank(lease_id, ranks)
        self.ended = (self.ended + lease.entries)[-50:]
        if lease_id not in self.model.leases:
            with pytest.raises(LeaseUnknown):
                finish(lease.session)

    @rule(seconds=st.sampled_from([0, 1, 50, int(WRITE_LEASE_S_MAX)]))
    def wait_and_expire(self, seconds: int) -> None:
        self.now_ns += seconds * 10**9
        old = [
            lease
            for lease in self.model.leases.values()
            if lease.writes
            and not lease.aborted
            and self.now_ns - lease.granted_ns >= WRITE_LEASE_S_MAX * 10**9
        ]
        assert self.pool.expire(self.now_ns) == len(old)
        for lease in old:
            self.model.abort(lease)

    @rule(chance=st.integers(0, 9))
    def flush(self, chance: int) -> None:
        if not chance:
            self.pool.flush()
            self.model.flush()

    @precondition(lambda self: self._open_sessions())
    @rule(choice=choices, path=paths, chance=st.integers(0, 3))
    def ask_while_off(self, choice: int, path: Path, chance: int) -> None:
        if not chance:
            self.pool.set_enabled(enabled=False)
            self.lookup(choice, path)
            self.pin(choice, path, 0)
            self.reserve(choice, path, 0, set(), None)
            self.pool.set_enabled(enabled=True)

    # ------------------------------------------------------------ what always holds

    @invariant()
    def pool_is_sound(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()

    @invariant()
    def pool_has_what_the_model_has(self) -> None:
        if hasattr(self, "pool"):
            expected = {
                place: (entry.offset, entry.committed) for place, entry in self.model.index.items()
            }
            assert self._pool_entries() == expected

    @invariant()
    def nothing_alive_overlaps(self) -> None:
        if not hasattr(self, "pool"):
            return
        end = 0
        for entry in sorted(self.model.alive(), key=lambda entry: entry.offset):
            assert entry.offset >= end, f"{entry.place} overlaps another"
            end = entry.offset + entry.num_bytes
        assert end <= self.usable_bytes // EXTENT_BYTES * EXTENT_BYTES

    @invariant()
    def states_have_their_pages_and_keep_to_their_budget(self) -> None:
        if not hasattr(self, "pool"):
            return
        for namespace_id, path, part in self.model.index:
            if NAMESPACES[namespace_id].parts[part].coverage is Coverage.LAST:
                for n, page in itertools.product(range(len(path)), self.model.every(namespace_id)):
                    assert (namespace_id, path[: n + 1], page) in self.model.index
        num_bytes = sum(
            entry.num_bytes
            for entry in self.model.alive()
            if NAMESPACES[entry.namespace_id].parts[entry.part].coverage is Coverage.LAST
            and self.model.every(entry.namespace_id)
        )
        assert num_bytes <= self.retention.state_ratio * self.usable_bytes

    @invariant()
    def references_name_what_they_named(self) -> None:
        if not hasattr(self, "pool"):
            return
        alive = self.model.alive()
        for entry in alive:
            assert self.pool.resolve(entry.ref) == entry.offset
            state = SlotState.COMMITTED if entry.committed else SlotState.RESERVED
            if self.model.index.get(entry.place) is not entry:
                state = SlotState.QUARANTINED
            assert self.pool.slot_state(entry.ref) is state
        for entry in self.ended:
            if entry not in alive:
                with contextlib.suppress(StaleSlot):
                    assert self.pool.slot_state(entry.ref) is SlotState.FREE

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for session, record in list(self.model.sessions.items()):
            self.pool.close_session(session)
            for rank in range(record.num_ranks):
                self.pool.drain_rank(session, rank)
        self.pool.flush()
        self.pool.check_invariants()
        statistics = self.pool.statistics()
        assert statistics["num_extents_unassigned"] == self.usable_bytes // EXTENT_BYTES
        assert statistics["num_sessions"] == statistics["num_leases"] == 0
        assert statistics["num_blocks"] == statistics["num_write_leases"] == 0

    # ------------------------------------------------------------ small change

    def _tick(self) -> int:
        self.now_ns += 10**8
        return self.now_ns

    def _open_sessions(self) -> list[int]:
        return sorted(s for s, record in self.model.sessions.items() if record.is_open)

    def _session(self, choice: int, *, must_be_open: bool = False) -> int:
        sessions = self._open_sessions() if must_be_open else sorted(self.model.sessions)
        return sessions[choice % len(sessions)]

    def _add_lease(
        self, lease_id: int, session: int, entries: list[Entry], *, writes: bool
    ) -> None:
        assert lease_id not in self.model.leases
        record = self.model.sessions[session]
        self.model.leases[lease_id] = ModelLease(
            session,
            record.namespace_id,
            entries,
            set(range(record.num_ranks)),
            self.now_ns,
            writes,
        )

    def _pool_entries(self) -> dict[tuple[int, Path, int], tuple[int, bool]]:
        """Return what the pool's indexes hold: the offset, and whether it is committed."""
        entries: dict[tuple[int, Path, int], tuple[int, bool]] = {}
        for namespace_id, index in enumerate(self.pool._store.indexes):
            for block_key, node in index.rows.items():
                for part in index.parts:
                    slot = index.slots[part.number][node]
                    if slot:
                        offset = part.table.offset[slot]
                        state = self.pool.slot_state(self.pool.slot_at(offset))
                        path = self.places[block_key]
                        entries[namespace_id, path, part.number] = (
                            offset,
                            state is SlotState.COMMITTED,
                        )
        return entries


class CrowdedPoolMachine(PoolMachine):
    """So little room that nearly each reservation evicts, and sizes fight over extents."""

    num_extents = 4


class AdaptivePoolMachine(PoolMachine):
    num_extents = 4
    retention = Retention(eviction=Eviction.ARC)


class FewStatesMachine(PoolMachine):
    """Room for two states of the hybrid models among pages."""

    num_extents = 6
    retention = Retention(state_ratio=0.1)


class GrowingPoolMachine(PoolMachine):
    """Memory comes while the pool is crowded already."""

    num_extents = 8
    num_extents_first = 1
    retention = Retention(state_ratio=0.3)


class SecondTouchMachine(PoolMachine):
    retention = Retention(admission=Admission.SECOND_TOUCH)


class CrowdedSecondTouchMachine(PoolMachine):
    num_extents = 4
    retention = Retention(Eviction.ARC, Admission.SECOND_TOUCH, state_ratio=0.3)


@pytest.mark.parametrize(
    "machine",
    [
        PoolMachine,
        CrowdedPoolMachine,
        AdaptivePoolMachine,
        FewStatesMachine,
        GrowingPoolMachine,
        SecondTouchMachine,
        CrowdedSecondTouchMachine,
    ],
)
def test_pool_does_what_the_model_does(machine: Callable[[], Any]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=40, stateful_step_count=60, deadline=None)
    )
