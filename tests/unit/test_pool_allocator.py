"""Extents, slots, and the references that outlive them."""

import itertools

import pytest

from millpond.model.errors import HandshakeRefused, InvariantBroken, StaleSlot
from millpond.model.limits import EXTENT_BYTES_MAX, EXTENT_BYTES_MIN, GIB, KIB, MIB, NAMESPACES_MAX
from millpond.model.names import Coverage, SlotRef, SlotState
from millpond.model.namespace import PartSpec
from millpond.pool.allocator import Allocator, SlotTable
from millpond.pool.policies.lru import LruPolicy
from millpond.pool.pool import Pool, default_extent_bytes
from tests.pool_values import EVERY, namespace


def allocator(num_extents: int = 3, extent_bytes: int = 64 * KIB, epoch: int = 9) -> Allocator:
    arena_bytes = num_extents * extent_bytes + 4 * KIB
    made = Allocator(
        epoch=epoch, arena_bytes=arena_bytes, extent_bytes=extent_bytes, make_policy=LruPolicy
    )
    made.grow(arena_bytes)
    return made


def take(slots: Allocator, table: SlotTable) -> int | None:
    return next(iter(slots.take(table, 1)), None)


@pytest.mark.parametrize(
    ("arena_bytes", "extent_bytes"),
    [
        (2 * MIB, 2 * MIB),
        (16 * MIB, EXTENT_BYTES_MIN),
        (256 * MIB, EXTENT_BYTES_MIN),
        (10 * GIB, 160 * MIB),
        (10 * GIB + 65 * MIB, 160 * MIB),
        (256 * GIB, 4 * GIB),
        (2048 * GIB, EXTENT_BYTES_MAX),
    ],
)
def test_default_extent_is_a_64th_within_bounds(arena_bytes: int, extent_bytes: int) -> None:
    assert default_extent_bytes(arena_bytes) == extent_bytes


@pytest.mark.parametrize("extent_bytes", [0, -4096, 4095, 3 * MIB])
def test_impossible_extents_are_misuse(extent_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"extent_bytes {extent_bytes}"):
        Pool(epoch=1, arena_bytes=2 * MIB, extent_bytes=extent_bytes)


def test_slots_of_two_sizes_fill_the_arena_without_overlap() -> None:
    slots = allocator()
    large, small = slots.table(24 * KIB), slots.table(16 * KIB)
    taken: list[tuple[int, int]] = []
    for table in itertools.cycle((large, small)):
        slot = take(slots, table)
        if slot is None:
            break
        taken.append((table.offset[slot], table.slot_bytes))
    taken.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))
    assert taken[-1][0] + taken[-1][1] <= 3 * 64 * KIB
    # Two large ones fit into an extent, four small ones; sizes do not share extents.
    assert len(taken) == 2 + 4 + 2


def test_new_slots_go_where_others_are() -> None:
    slots = allocator()
    table = slots.table(16 * KIB)
    taken = [take(slots, table) for _ in range(8)]
    for slot in (taken[5], taken[1]):
        assert slot is not None
        table.num_holds[slot] = 0
        slots.give(table, slot)
    assert [take(slots, table), take(slots, table)] == [taken[5], taken[1]]
    assert slots.unassigned == [2]


def test_slot_in_use_cannot_be_freed() -> None:
    slots = allocator()
    table = slots.table(16 * KIB)
    slot = take(slots, table)
    assert slot is not None
    with pytest.raises(InvariantBroken, match="freed while in use"):
        slots.give(table, slot)
    table.num_holds[slot] = 0
    slots.give(table, slot)
    with pytest.raises(InvariantBroken):
        slots.give(table, slot)


def test_reference_is_stale_once_its_slot_is_reserved_again() -> None:
    slots = allocator()
    table = slots.table(16 * KIB)
    kept, slot = take(slots, table), take(slots, table)
    assert kept is not None
    assert slot is not None
    ref = slots.slot_at(table.offset[slot])
    assert slots.locate(ref) == (table, slot)
    table.num_holds[slot] = 0
    slots.give(table, slot)
    assert slots.locate(ref) == (table, slot)
    assert take(slots, table) == slot
    with pytest.raises(StaleSlot):
        slots.locate(ref)


def test_reference_is_stale_once_its_extent_serves_another_size() -> None:
    slots = allocator(num_extents=1)
    table = slots.table(16 * KIB)
    slot = take(slots, table)
    assert slot is not None
    ref = slots.slot_at(table.offset[slot])
    table.num_holds[slot] = 0
    slots.give(table, slot)
    with pytest.raises(StaleSlot):
        slots.locate(ref)
    assert take(slots, slots.table(8 * KIB)) is not None
    with pytest.raises(StaleSlot):
        slots.locate(ref)


def test_reference_into_another_life_of_the_daemon_is_stale() -> None:
    before, after = allocator(epoch=1), allocator(epoch=2)
    refs: list[SlotRef] = []
    for slots in (before, after):
        table = slots.table(16 * KIB)
        slot = take(slots, table)
        assert slot is not None
        refs.append(slots.slot_at(table.offset[slot]))
    assert refs[0].generation == refs[1].generation
    with pytest.raises(StaleSlot):
        after.locate(refs[0])


@pytest.mark.parametrize("offset", [1, 4 * KIB, 64 * KIB, 192 * KIB, -16 * KIB])
def test_no_slot_starts_there(offset: int) -> None:
    slots = allocator()
    assert take(slots, slots.table(16 * KIB)) is not None
    with pytest.raises(StaleSlot):
        slots.slot_at(offset)


def test_pool_names_slots_and_their_states() -> None:
    pool = Pool(epoch=3, arena_bytes=MIB, extent_bytes=MIB)
    session = pool.open_session(
        replica="north", namespace_id=pool.add_namespace(namespace(EVERY)), num_ranks=1
    )
    lease = pool.reserve(session, b"k" * 16, 16, first_block=0, parts=((),), now_ns=0)
    assert lease.lease_id is not None
    ref = pool.slot_at(lease.offsets[0][0])
    assert (ref.epoch, pool.resolve(ref)) == (3, lease.offsets[0][0])
    assert pool.slot_state(ref) is SlotState.RESERVED
    pool.finish(session, lease.lease_id, rank=0, ok=True, now_ns=0)
    assert pool.slot_state(ref) is SlotState.COMMITTED


def test_slot_larger_than_an_extent_is_refused_with_its_part() -> None:
    pool = Pool(epoch=1, arena_bytes=2 * MIB, extent_bytes=MIB)
    pool.add_namespace(namespace(PartSpec("pages", Coverage.EVERY, MIB)))
    with pytest.raises(HandshakeRefused, match="'pages'") as refused:
        pool.add_namespace(namespace(PartSpec("pages", Coverage.EVERY, MIB + 1)))
    assert (refused.value.code, refused.value.field) == ("too-large", "parts")


def test_namespaces_are_bounded() -> None:
    pool = Pool(epoch=1, arena_bytes=MIB, extent_bytes=MIB)
    for number in range(NAMESPACES_MAX):
        assert pool.add_namespace(namespace(EVERY, model=str(number))) == number
    assert pool.add_namespace(namespace(EVERY, model="7")) == 7
    with pytest.raises(HandshakeRefused) as refused:
        pool.add_namespace(namespace(EVERY, model="one more"))
    assert (refused.value.code, refused.value.field) == ("full", "namespace")


def test_namespace_that_does_not_exist_is_misuse() -> None:
    pool = Pool(epoch=1, arena_bytes=MIB, extent_bytes=MIB)
    for namespace_id in (0, -1):
        with pytest.raises(ValueError, match=f"namespace {namespace_id}"):
            pool.open_session(replica="north", namespace_id=namespace_id, num_ranks=1)


def test_replica_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.pool.sessions.REPLICAS_MAX", 2)
    pool = Pool(epoch=1, arena_bytes=MIB, extent_bytes=MIB)
    number = pool.add_namespace(namespace(EVERY))
    for name in ("north", "south", "north"):
        pool.open_session(replica=name, namespace_id=number, num_ranks=1)
    with pytest.raises(HandshakeRefused) as refused:
        pool.open_session(replica="west", namespace_id=number, num_ranks=1)
    assert (refused.value.code, refused.value.field) == ("full", "replica")
