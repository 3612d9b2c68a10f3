"""The life of leases: ranks, aborts, expiry, sessions that end, and quarantine."""

import pytest

from millpond.model.errors import LeaseUnknown, StaleSlot
from millpond.model.leases import NO_SLOT, ReadLease, WriteLease
from millpond.model.limits import KIB, MIB, WRITE_LEASE_S_MAX
from millpond.model.names import Coverage, SlotState
from millpond.model.namespace import PartSpec
from millpond.pool.pool import Pool
from tests.pool_values import EVERY, KEY_BYTES, LAST, chain, namespace

SECOND_NS = 10**9
HYBRID = namespace(EVERY, LAST)


@pytest.fixture
def pool() -> Pool:
    pool = Pool(epoch=1, arena_bytes=8 * MIB, extent_bytes=MIB)
    pool.add_namespace(HYBRID)
    return pool


def open_session(pool: Pool, *, ranks: int = 1, replica: str = "north") -> int:
    return pool.open_session(replica=replica, namespace_id=0, num_ranks=ranks)


def reserve(
    pool: Pool,
    session: int,
    keys: bytes,
    *,
    states: tuple[int, ...] = (),
    first_block: int = 0,
    now_ns: int = 1,
) -> WriteLease:
    return pool.reserve(
        session, keys, KEY_BYTES, first_block=first_block, parts=((), states), now_ns=now_ns
    )


def write(pool: Pool, session: int, num_blocks: int) -> WriteLease:
    """Write a chain of which each prefix can be resumed."""
    lease = reserve(pool, session, chain(num_blocks), states=tuple(range(num_blocks)))
    assert lease.lease_id is not None
    pool.finish(session, lease.lease_id, rank=None, ok=True, now_ns=1)
    return lease


def pin(pool: Pool, session: int, num_blocks: int, *, first_block: int = 0) -> ReadLease:
    lease = pool.pin(session, chain(num_blocks), KEY_BYTES, first_block=first_block, now_ns=2)
    assert lease.lease_id is not None
    return lease


def state_at(pool: Pool, lease: WriteLease, block: int = 0) -> SlotState | None:
    """Return the state of the pages' slot; None when the slot's extent is unassigned."""
    try:
        return pool.slot_state(pool.slot_at(lease.offsets[0][block]))
    except StaleSlot:
        return None


def num_usable(pool: Pool, num_blocks: int) -> int:
    return pool.lookup(0, chain(num_blocks), KEY_BYTES).num_blocks


# ---------------------------------------------------------------- what is granted


def test_missing_blocks_are_granted_and_present_ones_are_not(pool: Pool) -> None:
    session = open_session(pool)
    write(pool, session, 3)
    lease = reserve(pool, session, chain(5))
    assert lease.first_block == 3
    assert len(lease.offsets[0]) == 2
    assert list(lease.offsets[1]) == [NO_SLOT, NO_SLOT]


def test_blocks_that_another_is_writing_are_not_granted_again(pool: Pool) -> None:
    north, south = open_session(pool), open_session(pool, replica="south")
    reserve(pool, north, chain(3))
    lease = reserve(pool, south, chain(3))
    assert (lease.lease_id, lease.reason) == (None, "present")


def test_states_are_granted_for_old_and_new_blocks_where_they_are_missing(pool: Pool) -> None:
    session = open_session(pool)
    granted = reserve(pool, session, chain(3), states=(1,))
    assert granted.lease_id is not None
    pool.finish(session, granted.lease_id, rank=None, ok=True, now_ns=1)
    lease = reserve(pool, session, chain(4), states=(1, 2, 3))
    assert lease.first_block == 2
    assert lease.offsets[0][0] == NO_SLOT
    assert NO_SLOT not in {lease.offsets[0][1], *lease.offsets[1]}


def test_writer_without_the_blocks_before_gets_nothing(pool: Pool) -> None:
    session = open_session(pool)
    lease = reserve(pool, session, chain(4), first_block=2)
    assert (lease.lease_id, lease.reason) == (None, "hole")
    assert pool.statistics()["num_blocks"] == 0


@pytest.mark.parametrize(
    ("keys", "first_block", "parts"),
    [
        (chain(2), 3, ((), ())),
        (chain(2), -1, ((), ())),
        (chain(2), 0, ((),)),
        (chain(2), 0, ((0,), ())),
        (chain(2), 0, ((), (2,))),
        (chain(2), 0, ((), (-1,))),
        (chain(1) * 2, 0, ((), ())),
        (chain(2, tag="x") + chain(2)[KEY_BYTES:], 0, ((), ())),
        (chain(1, tag="x") + chain(3)[KEY_BYTES:], 0, ((), (0,))),
    ],
    ids=[
        "first block beyond the end",
        "first block negative",
        "a part too few",
        "blocks for a part that has all",
        "state beyond the end",
        "state before the start",
        "a key twice",
        "a known block under another prefix",
        "state for a block of another prefix",
    ],
)
def test_malformed_reservation_is_misuse_and_changes_nothing(
    pool: Pool, keys: bytes, first_block: int, parts: tuple[tuple[int, ...], ...]
) -> None:
    session = open_session(pool)
    granted = reserve(pool, session, chain(3))
    assert granted.lease_id is not None
    pool.finish(session, granted.lease_id, rank=None, ok=True, now_ns=1)
    before = pool.statistics()
    with pytest.raises(ValueError, match=r"part|block|chain"):
        pool.reserve(session, keys, KEY_BYTES, first_block=first_block, parts=parts, now_ns=1)
    assert pool.statistics() == before
    pool.check_invariants()


# ---------------------------------------------------------------- ranks


def test_blocks_are_a_hit_only_when_every_rank_has_committed(pool: Pool) -> None:
    session = open_session(pool, ranks=3)
    lease = reserve(pool, session, chain(2), states=(1,))
    assert lease.lease_id is not None
    for rank in (1, 0):
        pool.finish(session, lease.lease_id, rank=rank, ok=True, now_ns=1)
        assert num_usable(pool, 2) == 0
    pool.finish(session, lease.lease_id, rank=2, ok=True, now_ns=1)
    assert num_usable(pool, 2) == 2


def test_first_failure_takes_the_keys_away_and_the_last_rank_frees_the_slots(pool: Pool) -> None:
    session = open_session(pool, ranks=2)
    lease = reserve(pool, session, chain(2))
    assert lease.lease_id is not None
    pool.finish(session, lease.lease_id, rank=0, ok=False, now_ns=1)
    assert pool.statistics()["num_blocks"] == 0
    assert state_at(pool, lease) is SlotState.QUARANTINED
    pool.finish(session, lease.lease_id, rank=1, ok=True, now_ns=1)
    assert state_at(pool, lease) is None
    assert num_usable(pool, 2) == 0


def test_finishing_twice_or_for_another_changes_nothing(pool: Pool) -> None:
    session, other = open_session(pool, ranks=2), open_session(pool, ranks=2)
    lease = reserve(pool, session, chain(2), states=(1,))
    assert lease.lease_id is not None
    pool.finish(session, lease.lease_id, rank=0, ok=True, now_ns=1)
    for who, lease_id in ((session, lease.lease_id), (other, lease.lease_id), (session, 99)):
        with pytest.raises(LeaseUnknown):
            pool.finish(who, lease_id, rank=0, ok=False, now_ns=1)
    assert num_usable(pool, 2) == 0
    pool.finish(session, lease.lease_id, rank=1, ok=True, now_ns=1)
    assert num_usable(pool, 2) == 2


def test_rank_that_does_not_exist_is_misuse(pool: Pool) -> None:
    session = open_session(pool, ranks=2)
    lease = reserve(pool, session, chain(2))
    assert lease.lease_id is not None
    with pytest.raises(ValueError, match="rank 2"):
        pool.finish(session, lease.lease_id, rank=2, ok=True, now_ns=1)
    with pytest.raises(ValueError, match="rank 2"):
        pool.drain_rank(session, 2)


# ---------------------------------------------------------------- blocks that leave


def test_abort_takes_along_what_others_wrote_after_it(pool: Pool) -> None:
    north, south = open_session(pool), open_session(pool, replica="south")
    first = reserve(pool, north, chain(2))
    second = reserve(pool, south, chain(3))
    third = reserve(pool, south, chain(4))
    assert first.lease_id is not None
    assert second.lease_id is not None
    assert third.lease_id is not None
    pool.finish(south, second.lease_id, rank=None, ok=True, now_ns=1)
    assert state_at(pool, second) is SlotState.COMMITTED
    pool.finish(north, first.lease_id, rank=None, ok=False, now_ns=1)
    assert pool.statistics()["num_blocks"] == 0
    assert state_at(pool, second) is SlotState.FREE
    assert state_at(pool, third) is SlotState.QUARANTINED
    # The third was written well, and still there is nothing that it could follow.
    pool.finish(south, third.lease_id, rank=None, ok=True, now_ns=1)
    assert pool.statistics()["num_blocks"] == 0
    assert state_at(pool, third) is None
    pool.check_invariants()


def test_flush_leaves_readers_their_slots_until_they_finish(pool: Pool) -> None:
    session = open_session(pool, ranks=2)
    written = write(pool, session, 3)
    lease = pin(pool, session, 3)
    assert lease.lease_id is not None
    assert pool.flush() == 3
    assert num_usable(pool, 3) == 0
    assert state_at(pool, written) is SlotState.QUARANTINED
    rewritten = reserve(pool, session, chain(3))
    assert set(rewritten.offsets[0]).isdisjoint(lease.offsets[0][1::2])
    pool.finish(session, lease.lease_id, rank=0, ok=True, now_ns=3)
    assert state_at(pool, written) is SlotState.QUARANTINED
    pool.finish(session, lease.lease_id, rank=1, ok=True, now_ns=3)
    assert state_at(pool, written) is SlotState.FREE
    pool.check_invariants()


def test_flush_makes_writes_under_way_worthless(pool: Pool) -> None:
    session = open_session(pool)
    lease = reserve(pool, session, chain(2), states=(1,))
    assert lease.lease_id is not None
    pool.flush()
    pool.finish(session, lease.lease_id, rank=None, ok=True, now_ns=1)
    assert num_usable(pool, 2) == 0
    assert pool.statistics()["num_blocks"] == 0


# ---------------------------------------------------------------- time


def test_expired_write_leaves_the_index_and_keeps_its_slots_from_others(pool: Pool) -> None:
    session = open_session(pool, ranks=2)
    lease = reserve(pool, session, chain(2), states=(1,), now_ns=5)
    assert lease.lease_id is not None
    deadline_ns = 5 + int(WRITE_LEASE_S_MAX) * SECOND_NS
    assert pool.expire(deadline_ns - 1) == 0
    assert pool.expire(deadline_ns) == 1
    assert pool.expire(deadline_ns) == 0
    again = reserve(pool, session, chain(2))
    assert set(again.offsets[0]).isdisjoint(lease.offsets[0])
    for rank in (0, 1):
        assert state_at(pool, lease) is SlotState.QUARANTINED
        pool.finish(session, lease.lease_id, rank=rank, ok=True, now_ns=deadline_ns)
    assert state_at(pool, lease) is SlotState.FREE
    assert num_usable(pool, 2) == 0


def test_only_leases_that_are_old_enough_expire(pool: Pool) -> None:
    session = open_session(pool)
    reserve(pool, session, chain(1), now_ns=0)
    young = reserve(pool, session, chain(1, tag="young"), now_ns=60 * SECOND_NS)
    assert pool.expire(int(WRITE_LEASE_S_MAX) * SECOND_NS) == 1
    assert state_at(pool, young) is SlotState.RESERVED


def test_reads_do_not_expire(pool: Pool) -> None:
    session = open_session(pool)
    written = write(pool, session, 1)
    lease = pin(pool, session, 1)
    pool.expire(10**6 * SECOND_NS)
    pool.flush()
    assert state_at(pool, written) is SlotState.QUARANTINED
    assert lease.lease_id is not None
    pool.finish(session, lease.lease_id, rank=0, ok=True, now_ns=10**6 * SECOND_NS)
    assert state_at(pool, written) is None


# ---------------------------------------------------------------- sessions


def test_session_that_ends_aborts_its_writes_and_keeps_slots_until_ranks_are_drained(
    pool: Pool,
) -> None:
    session = open_session(pool, ranks=2)
    lease = reserve(pool, session, chain(2))
    pool.close_session(session)
    assert pool.statistics()["num_blocks"] == 0
    for rank in (0, 1):
        assert state_at(pool, lease) is SlotState.QUARANTINED
        pool.drain_rank(session, rank)
    assert state_at(pool, lease) is None
    assert pool.statistics()["num_sessions"] == 0
    pool.check_invariants()


def test_worker_of_a_closed_session_can_still_say_that_it_finished(pool: Pool) -> None:
    session = open_session(pool)
    write(pool, session, 2)
    lease = pin(pool, session, 2)
    assert lease.lease_id is not None
    pool.close_session(session)
    assert pool.statistics()["num_leases"] == 1
    pool.finish(session, lease.lease_id, rank=0, ok=True, now_ns=3)
    assert pool.statistics()["num_leases"] == pool.statistics()["num_sessions"] == 0
    assert num_usable(pool, 2) == 2


def test_rank_that_dies_aborts_only_what_it_had_not_finished(pool: Pool) -> None:
    session = open_session(pool, ranks=2)
    done, not_done = reserve(pool, session, chain(1), states=(0,)), reserve(pool, session, chain(2))
    assert done.lease_id is not None
    pool.finish(session, done.lease_id, rank=0, ok=True, now_ns=1)
    pool.drain_rank(session, 0)
    pool.finish(session, done.lease_id, rank=1, ok=True, now_ns=1)
    assert num_usable(pool, 1) == 1
    assert pool.statistics()["num_blocks"] == 1
    assert state_at(pool, not_done) is SlotState.QUARANTINED


def test_ended_sessions_are_ignored_or_refused(pool: Pool) -> None:
    session = open_session(pool)
    pool.close_session(session)
    pool.close_session(session)
    pool.drain_rank(session, 0)
    with pytest.raises(ValueError, match=f"session {session} is not open"):
        reserve(pool, session, chain(1))
    with pytest.raises(ValueError, match=f"session {session} is not open"):
        pool.pin(session, chain(1), KEY_BYTES, first_block=0, now_ns=1)
    with pytest.raises(LeaseUnknown):
        pool.finish(session, 1, rank=0, ok=True, now_ns=1)
    assert open_session(pool) != session


@pytest.mark.parametrize("num_ranks", [0, 65])
def test_number_of_ranks_is_bounded(pool: Pool, num_ranks: int) -> None:
    with pytest.raises(ValueError, match=f"num_ranks is {num_ranks}"):
        open_session(pool, ranks=num_ranks)


def test_writer_of_two_page_sizes_gets_whole_blocks_only() -> None:
    more = PartSpec("more", Coverage.EVERY, 512 * KIB)
    pool = Pool(epoch=1, arena_bytes=2 * MIB, extent_bytes=MIB)
    namespace_id = pool.add_namespace(namespace(EVERY, more))
    session = pool.open_session(replica="north", namespace_id=namespace_id, num_ranks=1)
    lease = pool.reserve(session, chain(9), KEY_BYTES, first_block=0, parts=((), ()), now_ns=1)
    assert [len(row) for row in lease.offsets] == [2, 2]
    assert NO_SLOT not in {*lease.offsets[0], *lease.offsets[1]}
    pool.check_invariants()
