"""What the pool does with a slot that a reader found damaged."""

import random

import pytest

from millpond.model.errors import LeaseUnknown
from millpond.model.leases import ReadLease, WriteLease
from millpond.model.limits import MIB
from millpond.model.names import Outcome, SlotState
from millpond.pool.damage import Damage
from millpond.pool.pool import Pool
from tests.pool_values import EVERY, KEY_BYTES, LAST, WINDOW, chain, namespace

ALL = namespace(EVERY, LAST, WINDOW)
NUM_BLOCKS = 4


class Shared:
    """A pool with a writer and a reader of two ranks, and one committed prefix."""

    def __init__(self) -> None:
        self.pool = Pool(epoch=1, arena_bytes=4 * MIB, extent_bytes=MIB)
        self.pool.add_namespace(ALL)
        self.north = self.pool.open_session(replica="north", namespace_id=0, num_ranks=1)
        self.south = self.pool.open_session(replica="south", namespace_id=0, num_ranks=2)
        self.written = self.write()

    def reserve(self, *, tag: str = "", num_blocks: int = NUM_BLOCKS) -> WriteLease:
        tails = tuple(range(num_blocks))
        return self.pool.reserve(
            self.north,
            chain(num_blocks, tag=tag),
            KEY_BYTES,
            first_block=0,
            parts=((), tails, tails),
            now_ns=1,
        )

    def write(self, *, tag: str = "", num_blocks: int = NUM_BLOCKS) -> WriteLease:
        lease = self.reserve(tag=tag, num_blocks=num_blocks)
        assert lease.lease_id is not None, lease.reason
        self.pool.finish(self.north, lease.lease_id, rank=None, ok=True, now_ns=1)
        return lease

    def pin(self, num_blocks: int = NUM_BLOCKS) -> tuple[int, ReadLease]:
        lease = self.pool.pin(self.south, chain(num_blocks), KEY_BYTES, first_block=0, now_ns=2)
        assert lease.lease_id is not None
        return lease.lease_id, lease

    def tell(self, lease_id: int, *offsets: int, num_checked: int = 1) -> list[Damage]:
        found = self.pool.note_checked(
            self.south, lease_id, num_checked=num_checked, damaged=offsets
        )
        self.pool.check_invariants()
        return found

    def release(self, lease_id: int) -> None:
        self.pool.finish(self.south, lease_id, rank=None, ok=True, now_ns=3)
        self.pool.check_invariants()

    def usable(self, num_blocks: int = NUM_BLOCKS) -> int:
        return self.pool.lookup(0, chain(num_blocks), KEY_BYTES).num_blocks

    def checks(self) -> object:
        return self.pool.statistics()["checks"]


@pytest.fixture
def shared() -> Shared:
    return Shared()


def pages_of(lease: ReadLease) -> list[int]:
    return lease.offsets[0][1::2].tolist()


def test_a_damaged_block_and_what_follows_it_are_a_miss(shared: Shared) -> None:
    lease_id, lease = shared.pin()
    offset = pages_of(lease)[2]
    (found,) = shared.tell(lease_id, offset)
    assert (found.offset_bytes, found.part, found.key) == (offset, 0, chain(3)[-KEY_BYTES:])
    assert (found.writer.name, found.reader.name) == ("north", "south")
    assert shared.usable() == 2
    shared.release(lease_id)
    assert shared.pool.slot_state(shared.pool.slot_at(offset)) is SlotState.QUARANTINED
    assert shared.checks() == {"num_slots_checked": 1, "num_slots_damaged": 1}


@pytest.mark.parametrize("part", [1, 2], ids=["state", "window"])
def test_without_a_damaged_tail_a_request_resumes_earlier(shared: Shared, part: int) -> None:
    lease_id, lease = shared.pin()
    (found,) = shared.tell(lease_id, lease.offsets[part][-1])
    assert (found.part, found.key) == (part, chain(4)[-KEY_BYTES:])
    assert shared.usable() == 3
    shared.release(lease_id)


def test_the_block_can_be_written_anew_elsewhere(shared: Shared) -> None:
    lease_id, lease = shared.pin()
    offset = pages_of(lease)[0]
    shared.tell(lease_id, offset)
    shared.release(lease_id)
    again = shared.write()
    assert shared.usable() == NUM_BLOCKS
    assert offset not in again.offsets[0]


def test_it_is_never_handed_out_again(shared: Shared) -> None:
    lease_id, lease = shared.pin()
    offset = pages_of(lease)[1]
    shared.tell(lease_id, offset)
    shared.release(lease_id)
    chance = random.Random(1)
    for step in range(400):  # many times what the pool holds
        lease = shared.write(tag=str(step), num_blocks=chance.randint(1, 8))
        assert offset not in lease.offsets[0]
        if step % 100 == 99:
            shared.pool.flush()
            shared.pool.check_invariants()
    assert shared.pool.statistics()["num_evictions"]
    assert shared.pool.slot_state(shared.pool.slot_at(offset)) is SlotState.QUARANTINED


def test_whoever_finds_it_next_changes_nothing(shared: Shared) -> None:
    first, lease = shared.pin()
    second, _ = shared.pin()
    offset = pages_of(lease)[0]
    assert len(shared.tell(first, offset)) == 1
    assert shared.tell(first, offset) == []  # the other rank
    assert shared.tell(second, offset) == []
    shared.release(first)
    shared.release(second)
    assert shared.checks() == {"num_slots_checked": 3, "num_slots_damaged": 1}


def test_all_are_named_though_some_leave_with_others(shared: Shared) -> None:
    lease_id, lease = shared.pin()
    offsets = [pages_of(lease)[1], pages_of(lease)[3], lease.offsets[1][-1]]
    found = shared.tell(lease_id, *offsets)
    keys = [chain(num_blocks)[-KEY_BYTES:] for num_blocks in (2, 4, 4)]
    assert [(each.offset_bytes, each.key) for each in found] == list(
        zip(offsets, keys, strict=True)
    )
    shared.release(lease_id)


def test_it_stays_out_of_use_if_its_block_had_left_already(shared: Shared) -> None:
    lease_id, lease = shared.pin()
    offset = pages_of(lease)[0]
    shared.pool.flush()
    (found,) = shared.tell(lease_id, offset)
    assert (found.key, found.writer.name) == (None, "north")
    shared.release(lease_id)
    assert shared.pool.slot_state(shared.pool.slot_at(offset)) is SlotState.QUARANTINED


def test_who_builds_on_it_commits_nothing(shared: Shared) -> None:
    lease_id, lease = shared.pin()
    writing = shared.reserve(num_blocks=6)
    assert writing.lease_id is not None
    shared.tell(lease_id, pages_of(lease)[3])
    shared.pool.finish(shared.north, writing.lease_id, rank=None, ok=True, now_ns=4)
    shared.release(lease_id)
    found = shared.pool.lookup(0, chain(6), KEY_BYTES)
    assert (found.num_blocks, found.outcome) == (3, Outcome.MISS)


def test_figures_name_who_wrote_and_who_read(shared: Shared) -> None:
    lease_id, lease = shared.pin()
    shared.tell(lease_id, *pages_of(lease)[:2], num_checked=3)
    replicas: dict[str, dict[str, int]] = shared.pool.statistics()["replicas"]
    figures = {
        name: (each["num_slots_checked"], each["num_slots_damaged"])
        for name, each in replicas.items()
    }
    assert figures == {"north": (0, 2), "south": (3, 0)}
    shared.release(lease_id)


def test_only_slots_of_the_lease_can_be_damaged(shared: Shared) -> None:
    lease_id, lease = shared.pin(2)
    other = next(o for o in shared.written.offsets[0] if o not in pages_of(lease))
    for offsets in ((other,), (pages_of(lease)[0], other), (2**64,), (-1,)):
        with pytest.raises(ValueError, match="no slot of lease"):
            shared.tell(lease_id, *offsets)
    for num_checked in (-1, 2 + 1 + 2 + 1):  # pages, a state, a window
        with pytest.raises(ValueError, match="checked"):
            shared.tell(lease_id, num_checked=num_checked)
    assert shared.usable() == NUM_BLOCKS
    assert shared.checks() == {"num_slots_checked": 0, "num_slots_damaged": 0}


def test_only_readers_with_a_live_lease_tell(shared: Shared) -> None:
    writing = shared.reserve(tag="new")
    assert writing.lease_id is not None
    with pytest.raises(ValueError, match="checked"):
        shared.pool.note_checked(shared.north, writing.lease_id, num_checked=1, damaged=())
    lease_id, lease = shared.pin()
    with pytest.raises(LeaseUnknown):  # another's
        shared.pool.note_checked(shared.north, lease_id, num_checked=1, damaged=pages_of(lease)[:1])
    shared.release(lease_id)
    with pytest.raises(LeaseUnknown):
        shared.tell(lease_id, pages_of(lease)[0])
    assert shared.usable() == NUM_BLOCKS


class Walk(Shared):
    """Random steps of a writer and a reader; ``damaged`` is what must never be seen again."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)
        self.writing: list[int] = []
        self.reading: list[tuple[int, ReadLease]] = []
        self.damaged: set[int] = set()

    def step(self) -> None:
        names = ("grant", "commit", "commit", "abort", "read", "end_read", "damage", "flush")
        getattr(self, self.chance.choice(names))()
        self.pool.check_invariants()

    def grant(self) -> None:
        lease = self.reserve(tag=self.chance.choice("abcd"), num_blocks=self.chance.randint(1, 6))
        if lease.lease_id is not None:
            assert not self.damaged & {o for offsets in lease.offsets for o in offsets}
            self.writing.append(lease.lease_id)

    def commit(self, *, ok: bool = True) -> None:
        if self.writing:
            lease_id = self.writing.pop(self.chance.randrange(len(self.writing)))
            self.pool.finish(self.north, lease_id, rank=None, ok=ok, now_ns=2)

    def abort(self) -> None:
        self.commit(ok=False)

    def read(self) -> None:
        keys = chain(self.chance.randint(1, 6), tag=self.chance.choice("abcd"))
        lease = self.pool.pin(self.south, keys, KEY_BYTES, first_block=0, now_ns=3)
        assert not self.damaged & {o for pairs in lease.offsets for o in pairs[1::2]}
        if lease.lease_id is not None:
            self.reading.append((lease.lease_id, lease))

    def end_read(self) -> None:
        if self.reading:
            lease_id, _ = self.reading.pop(self.chance.randrange(len(self.reading)))
            self.release(lease_id)

    def damage(self) -> None:
        if self.reading and len(self.damaged) < 20:
            lease_id, lease = self.chance.choice(self.reading)
            offset = self.chance.choice([o for pairs in lease.offsets for o in pairs[1::2]])
            assert len(self.tell(lease_id, offset)) == (offset not in self.damaged)
            self.damaged.add(offset)

    def flush(self) -> None:
        if not self.chance.randrange(20):
            self.pool.flush()


@pytest.mark.parametrize("seed", range(10))
def test_damage_at_any_time_leaves_the_pool_consistent(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(300):
        walk.step()
    for session, num_ranks in ((walk.north, 1), (walk.south, 2)):
        walk.pool.close_session(session)
        for rank in range(num_ranks):
            walk.pool.drain_rank(session, rank)
    walk.pool.flush()
    walk.pool.check_invariants()
    slots: dict[str, int] = walk.pool.statistics()["num_slots"]
    assert walk.damaged
    assert (slots["quarantined"], slots["reserved"], slots["committed"]) == (
        len(walk.damaged),
        0,
        0,
    )
