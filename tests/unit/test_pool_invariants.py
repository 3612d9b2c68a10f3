"""Each contradiction that ``check_invariants`` looks for is planted once, and found."""

from collections.abc import Callable

import pytest

from millpond.model.errors import InvariantBroken
from millpond.model.limits import KIB, MIB
from millpond.pool.allocator import COMMITTED, FREE, QUARANTINED, RESERVED, SlotTable
from millpond.pool.index import ROOT, Index
from millpond.pool.pool import Pool
from millpond.pool.sessions import Writing
from tests.pool_values import EVERY, KEY_BYTES, LAST, WINDOW, chain, namespace


class Inside:
    """A pool with something of everything in it, and the ways to its inside."""

    def __init__(self) -> None:
        self.pool = Pool(epoch=1, arena_bytes=MIB, extent_bytes=128 * KIB)
        number = self.pool.add_namespace(namespace(EVERY, LAST, WINDOW))
        session = self.pool.open_session(replica="north", namespace_id=number, num_ranks=2)
        written = self._reserve(session, chain(4))
        self.pool.finish(session, written, rank=None, ok=True, now_ns=1)
        self.pool.pin(session, chain(2), KEY_BYTES, first_block=0, now_ns=1)
        self._reserve(session, chain(2, tag="branch", after=chain(1)))
        doomed = self._reserve(session, chain(2, tag="doomed"))
        self.pool.finish(session, doomed, rank=1, ok=False, now_ns=1)
        self.pool.check_invariants()

    def _reserve(self, session: int, keys: bytes) -> int:
        blocks = range(len(keys) // KEY_BYTES)
        lease = self.pool.reserve(
            session, keys, KEY_BYTES, first_block=0, parts=((), blocks, blocks), now_ns=0
        )
        assert lease.lease_id is not None
        return lease.lease_id

    @property
    def index(self) -> Index:
        return self.pool._store.indexes[0]

    @property
    def pages(self) -> SlotTable:
        return self.index.parts[0].table

    @property
    def states(self) -> SlotTable:
        return self.index.parts[1].table

    def node(self, block: int) -> int:
        node = self.index.find(chain(4), KEY_BYTES, block)
        assert node is not None
        return node

    def slot(self, block: int, part: int = 0) -> int:
        return self.index.slots[part][self.node(block)]

    def in_state(self, state: int) -> int:
        return self.pages.state.index(state, 1)

    def lease(self, number: int) -> Writing:
        lease = self.pool._sessions.by_id[1].leases[number]
        assert isinstance(lease, Writing)
        return lease


def unassigned_twice(inside: Inside) -> None:
    inside.pool._allocator.unassigned.append(0)


def unassigned_lost(inside: Inside) -> None:
    inside.pool._allocator.unassigned.pop()


def extent_of_two_sizes(inside: Inside) -> None:
    extent = next(inside.states.assigned())
    extent.number = next(inside.pages.assigned()).number


def free_slot_lost(inside: Inside) -> None:
    next(inside.pages.assigned()).free.pop()


def used_slot_offered(inside: Inside) -> None:
    next(inside.pages.assigned()).free.append(inside.slot(0))


def room_forgotten(inside: Inside) -> None:
    inside.pages.with_room.clear()


def offset_moved(inside: Inside) -> None:
    inside.pages.offset[inside.slot(0)] += 4096


def key_lost(inside: Inside) -> None:
    inside.index.keys[inside.node(1)] = b"?"


def block_unreachable(inside: Inside) -> None:
    inside.index.child[inside.node(2)] = ROOT


def blocks_in_a_ring(inside: Inside) -> None:
    inside.index.child[inside.node(3)] = inside.node(2)


def row_of_a_removed_block(inside: Inside) -> None:
    inside.index.rows[b"gone"] = inside.node(1)


def depth_wrong(inside: Inside) -> None:
    inside.index.depth[inside.node(3)] = 9


def parent_wrong(inside: Inside) -> None:
    inside.index.parent[inside.node(3)] = inside.node(1)


def siblings_disagree(inside: Inside) -> None:
    index = inside.index
    child = index.child[inside.node(0)]
    index.younger[index.older[child]] = ROOT


def ready_too_early(inside: Inside) -> None:
    node = inside.pages.node[inside.in_state(RESERVED)]
    inside.index.ready[node] = 1


def ready_forgotten(inside: Inside) -> None:
    inside.index.ready[inside.node(3)] = 0


def missing_miscounted(inside: Inside) -> None:
    inside.index.num_missing[inside.node(3)] = 1


def page_without_slot(inside: Inside) -> None:
    inside.index.slots[0][inside.node(3)] = 0


def slot_of_another_block(inside: Inside) -> None:
    inside.index.slots[0][inside.node(3)] = inside.slot(2)


def slot_of_another_part(inside: Inside) -> None:
    inside.pages.owner[inside.slot(3)] = 1


def committed_slot_that_is_free(inside: Inside) -> None:
    inside.pages.state[inside.slot(3)] = FREE


def quarantined_slot_in_the_index(inside: Inside) -> None:
    inside.states.state[inside.slot(1, part=1)] = QUARANTINED


def slot_that_nobody_refers_to(inside: Inside) -> None:
    inside.pages.node[inside.in_state(QUARANTINED)] = inside.node(0)


def quarantine_given_up(inside: Inside) -> None:
    inside.pages.state[inside.in_state(QUARANTINED)] = COMMITTED


def hold_forgotten(inside: Inside) -> None:
    inside.pages.num_holds[inside.slot(0)] -= 1


def hold_of_nobody(inside: Inside) -> None:
    inside.pages.num_holds[inside.slot(3)] += 1


def free_slot_held(inside: Inside) -> None:
    inside.pages.num_holds[inside.in_state(FREE)] = 1


def evictable_unknown_to_the_policy(inside: Inside) -> None:
    inside.pages.policy.discard(inside.slot(3))


def policy_would_leave_a_hole(inside: Inside) -> None:
    inside.pages.policy.add(inside.slot(2), 0)


def policy_would_evict_what_is_read(inside: Inside) -> None:
    inside.states.policy.add(inside.slot(1, part=1), 0)


def policy_keeps_a_free_slot(inside: Inside) -> None:
    inside.pages.policy.add(inside.in_state(FREE), 0)


def slot_waits_in_the_wrong_place(inside: Inside) -> None:
    inside.states.is_spare[inside.slot(3, part=1)] = 1


def evictable_twice(inside: Inside) -> None:
    inside.pages.spares.add(inside.slot(3), 0)


def deepest_state_goes_first(inside: Inside) -> None:
    inside.states.mark(inside.slot(3, part=1), is_spare=True)


def pages_with_a_state_go_first(inside: Inside) -> None:
    inside.pages.mark(inside.slot(3), is_spare=True)


def slots_miscounted(inside: Inside) -> None:
    inside.states.num_used -= 1


def states_beyond_their_budget(inside: Inside) -> None:
    inside.pool._evictor.state_bytes_max = LAST.slot_bytes


def lease_without_ranks(inside: Inside) -> None:
    inside.lease(3).ranks = 0


def lease_of_too_many_ranks(inside: Inside) -> None:
    inside.lease(3).ranks = 0b111


def aborted_lease_pending(inside: Inside) -> None:
    inside.lease(3).is_aborted = True


def pending_lease_forgotten(inside: Inside) -> None:
    del inside.pool._sessions.writing[3]


def lease_holds_what_does_not_exist(inside: Inside) -> None:
    inside.lease(3).slots[0].append(10**6)


def closed_session_that_writes(inside: Inside) -> None:
    inside.pool._sessions.by_id[1].is_open = False


def session_that_is_over(inside: Inside) -> None:
    session = inside.pool.open_session(replica="south", namespace_id=0, num_ranks=1)
    inside.pool._sessions.by_id[session].is_open = False


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (unassigned_twice, "extent 0 is listed wrong"),
        (unassigned_lost, "is listed wrong as unassigned"),
        (extent_of_two_sizes, "are in tables"),
        (free_slot_lost, "free slots do not add up"),
        (used_slot_offered, "free slots do not add up"),
        (room_forgotten, "extents with room"),
        (offset_moved, "lies elsewhere"),
        (key_lost, "its node has another key"),
        (block_unreachable, "lost its way to the root"),
        (blocks_in_a_ring, "form a ring"),
        (row_of_a_removed_block, "a node stands for two keys"),
        (depth_wrong, "wrong depth"),
        (parent_wrong, "wrong depth"),
        (siblings_disagree, "siblings disagree"),
        (ready_too_early, "ready flag is wrong"),
        (ready_forgotten, "ready flag is wrong"),
        (missing_miscounted, "parts are missing"),
        (page_without_slot, "parts are missing"),
        (slot_of_another_block, "belongs to another block"),
        (slot_of_another_part, "belongs to another block"),
        (committed_slot_that_is_free, "free slots do not add up"),
        (quarantined_slot_in_the_index, "its slot is in state"),
        (slot_that_nobody_refers_to, "index link"),
        (quarantine_given_up, "index link"),
        (hold_forgotten, "by 1 leases"),
        (hold_of_nobody, "evictable is"),
        (free_slot_held, "free and held"),
        (evictable_unknown_to_the_policy, "evictable is True, for the policy False"),
        (policy_would_leave_a_hole, "evictable is False, for the policy True"),
        (policy_would_evict_what_is_read, "evictable is False, for the policy True"),
        (policy_keeps_a_free_slot, "policy of"),
        (slot_waits_in_the_wrong_place, "evictable is True, for the policy False"),
        (evictable_twice, "policy of"),
        (deepest_state_goes_first, "part 1 is spare and of use"),
        (pages_with_a_state_go_first, "part 0 is spare and of use"),
        (slots_miscounted, "slots are in use"),
        (states_beyond_their_budget, "states take"),
        (lease_without_ranks, "all ranks have finished"),
        (lease_of_too_many_ranks, "waits for ranks"),
        (aborted_lease_pending, "list of pending writes"),
        (pending_lease_forgotten, "list of pending writes"),
        (lease_holds_what_does_not_exist, "do not exist"),
        (closed_session_that_writes, "cannot commit"),
        (session_that_is_over, "is over"),
    ],
)
def test_planted_contradiction_is_found(plant: Callable[[Inside], None], message: str) -> None:
    inside = Inside()
    plant(inside)
    with pytest.raises(InvariantBroken, match=message):
        inside.pool.check_invariants()
