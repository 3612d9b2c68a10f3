"""Which recurrent states are kept, and which pages are of no use without one."""

import pytest

from millpond.model.limits import KIB, MIB
from millpond.model.names import Coverage
from millpond.model.namespace import PartSpec
from millpond.model.retention import Retention
from tests.pool_crowd import PAGES, STATE, Crowd
from tests.pool_values import chain

HYBRID = (PAGES, STATE)
A, B, C, D = (chain(2, tag=tag) for tag in "abcd")


def states_of(num_states: int, num_extents: int) -> Retention:
    """Return a budget of so many states of 512 KiB in extents of 1 MiB."""
    return Retention(state_ratio=num_states * 512 * KIB / (num_extents * MIB))


# ---------------------------------------------------------------- which state goes


def test_state_goes_that_a_deeper_one_of_its_chain_has_superseded() -> None:
    crowd = Crowd(5, HYBRID, retention=states_of(3, 5))
    crowd.write(A, at=1, states=(1,))
    crowd.write(chain(2, tag="turns"), at=2, states=(1,))
    crowd.write(chain(4, tag="turns"), at=3, states=(3,))
    assert crowd.num_spare() == [0, 1]
    crowd.write(C, at=4, states=(1,))
    # The older end of another conversation is still there, the end of the first turn is not.
    assert [crowd.usable(keys) for keys in (A, chain(4, tag="turns"), C)] == [2, 4, 2]
    assert crowd.usable(chain(3, tag="turns")) == 0
    assert crowd.now()["evictions"] == {"victim": 0, "spare": 1, "budget": 0, "extent": 0}


def test_states_of_one_step_supersede_each_other_in_the_order_of_the_chain() -> None:
    crowd = Crowd(4, HYBRID, retention=states_of(3, 4))
    crowd.write(chain(4), at=1, states=(0, 1, 3))
    assert crowd.num_spare() == [0, 2]
    crowd.write(B, at=2, states=(1,))
    crowd.write(C, at=3, states=(1,))
    assert [crowd.usable(keys) for keys in (chain(4), B, C)] == [4, 2, 2]


def test_state_before_a_fork_stays() -> None:
    crowd = Crowd(4, HYBRID)
    crowd.write(A, at=1, states=(1,))
    first, second = (chain(1, tag=tag, after=A) for tag in ("first", "second"))
    reserved = crowd.reserve(first, at=2, states=(2,))
    crowd.write(second, at=3, states=(2,))
    assert reserved.lease_id is not None
    crowd.finish(reserved.lease_id, at=4)
    assert crowd.num_spare() == [0, 0]


def test_state_that_is_resumed_from_is_not_superseded_any_more() -> None:
    crowd = Crowd(4, HYBRID)
    crowd.write(chain(4), at=1, states=(1, 3))
    assert crowd.num_spare() == [0, 1]
    crowd.read(chain(2), at=2)
    assert crowd.num_spare() == [0, 0]


@pytest.mark.parametrize("how", ["budget", "with its pages", "aborted"])
def test_state_is_not_superseded_by_one_that_has_left(how: str) -> None:
    crowd = Crowd(2, HYBRID)
    crowd.write(chain(2), at=1, states=(1,))
    deeper = crowd.reserve(chain(4), at=2, states=(3,))
    assert deeper.lease_id is not None
    crowd.finish(deeper.lease_id, at=2, ok=how != "aborted")
    if how == "budget":
        crowd.read(chain(2), at=3)
        crowd.write(chain(1), at=4, states=(0,))
        assert crowd.usable(chain(4)) == 2
    elif how == "with its pages":
        crowd.write(B, at=3)
    assert crowd.num_spare()[1] == 0
    assert crowd.usable(chain(2)) == 2


def test_state_in_the_middle_that_is_not_the_deepest_takes_from_nobody() -> None:
    crowd = Crowd(4, HYBRID, retention=states_of(2, 4))
    crowd.write(A, at=1, states=(1,))
    lease = crowd.reserve(chain(4), at=2, states=(0, 1, 3))
    assert [offset != 2**64 - 1 for offset in lease.offsets[1]] == [False, False, False, True]
    assert crowd.usable(A) == 2
    assert crowd.now()["refused"]["num_tails_without_room"] == 2


def test_deepest_state_takes_from_the_oldest_conversation() -> None:
    crowd = Crowd(4, HYBRID, retention=states_of(2, 4))
    for at, keys in enumerate((A, B, C)):
        crowd.write(keys, at=at, states=(1,))
    assert [crowd.usable(keys) for keys in (A, B, C)] == [0, 2, 2]
    assert crowd.now()["evictions"]["budget"] == 1


# ---------------------------------------------------------------- the budget


def test_states_keep_to_their_share_though_there_is_room() -> None:
    crowd = Crowd(8, HYBRID, retention=states_of(3, 8))
    for at, tag in enumerate("abcdef"):
        crowd.write(chain(1, tag=tag), at=at, states=(0,))
    assert crowd.num_committed() == [6, 3]


def test_states_that_are_read_do_not_make_way() -> None:
    crowd = Crowd(4, HYBRID, retention=states_of(1, 4))
    crowd.write(A, at=1, states=(1,))
    crowd.pin(A, at=2)
    lease = crowd.reserve(B, at=3, states=(1,))
    assert len(lease.offsets[0]) == 2, "its pages are stored all the same"
    assert lease.lease_id is not None
    crowd.finish(lease.lease_id, at=3)
    refused = crowd.reserve(B, at=4, states=(1,))
    assert (refused.lease_id, refused.reason) == (None, "full")


def test_budget_is_one_for_the_states_of_all_models() -> None:
    small = PartSpec("state", Coverage.LAST, 128 * KIB)
    crowd = Crowd(8, HYBRID, (PAGES, small), retention=states_of(2, 8))
    for at, tag in enumerate("abcdefgh"):
        crowd.write(chain(1, tag=tag), at=at, states=(0,), model=1)
    assert crowd.num_committed() == [8, 0, 8]
    crowd.write(A, at=9, states=(1,))
    assert crowd.num_committed() == [10, 1, 4], "a state of 512 KiB took four of 128"
    assert [crowd.usable(chain(1, tag=tag), model=1) for tag in "de"] == [0, 1]


def test_models_of_nothing_but_states_have_no_budget() -> None:
    crowd = Crowd(2, (STATE,), retention=states_of(1, 2))
    for at, tag in enumerate("abcd"):
        lease = crowd.pool.reserve(
            crowd.sessions[0],
            chain(1, tag=tag),
            16,
            first_block=0,
            parts=((0,),),
            now_ns=at,
        )
        assert lease.lease_id is not None
        crowd.finish(lease.lease_id, at=at)
    assert crowd.num_committed() == [4]


def test_states_share_no_extent_with_pages_of_the_same_size() -> None:
    crowd = Crowd(2, (PAGES, PartSpec("state", Coverage.LAST, PAGES.slot_bytes)))
    crowd.write(A, at=1, states=(1,))
    sizes = [
        (size["slot_bytes"], size["holds_states"], size["num_extents"])
        for size in crowd.now()["slot_sizes"]
    ]
    assert sizes == [(PAGES.slot_bytes, False, 1), (PAGES.slot_bytes, True, 1)]


# ---------------------------------------------------------------- pages without a state


def test_prefix_whose_states_are_gone_is_no_hit_though_its_pages_are_there() -> None:
    crowd = Crowd(4, HYBRID, retention=states_of(1, 4))
    crowd.write(A, at=1, states=(1,))
    crowd.write(B, at=2, states=(1,))
    assert crowd.usable(A) == 0
    pages = [block for block in crowd.pool.blocks(10) if block["slots"]]
    assert len(pages) == 4


def test_pages_whose_last_state_is_gone_go_before_older_ones() -> None:
    crowd = Crowd(3, HYBRID, retention=states_of(2, 3))
    crowd.write(B, at=1, states=(1,))
    lease_id = crowd.pin(B, at=2)
    crowd.write(A, at=3, states=(1,))
    crowd.write(C, at=4, states=(1,))  # the state of B is in use, so that of A goes
    crowd.finish(lease_id, at=5)
    assert [crowd.usable(keys) for keys in (A, B, C)] == [0, 2, 2]
    assert crowd.write(chain(4, tag="d"), at=6) == 4
    assert [crowd.usable(keys) for keys in (A, B, C)] == [0, 2, 2]
    assert crowd.now()["evictions"]["spare"] == 2


def test_pages_up_to_the_state_before_are_stranded_and_no_more() -> None:
    crowd = Crowd(5, HYBRID, retention=states_of(2, 5))
    crowd.write(chain(2), at=1, states=(1,))
    crowd.read(chain(2), at=1)
    crowd.write(chain(4), at=1, states=(3,))
    crowd.read(chain(2), at=5)  # not superseded then
    crowd.write(B, at=6, states=(1,))
    assert (crowd.usable(chain(4)), crowd.usable(B)) == (2, 2)
    assert crowd.num_spare() == [1, 0], "the end; the block before it follows when it has gone"
    assert crowd.write(chain(12, tag="x"), at=7) == 12, "of sixteen, ten were free"
    assert crowd.usable(chain(4)) == 2
    assert crowd.now()["evictions"]["spare"] == 2


def test_pages_that_get_a_state_again_are_of_use_again() -> None:
    crowd = Crowd(4, HYBRID, retention=states_of(1, 4))
    crowd.write(A, at=1, states=(1,))
    crowd.write(B, at=2, states=(1,))
    assert crowd.num_spare() == [1, 0]
    crowd.write(A, at=3, states=(1,))
    assert crowd.usable(A) == 2
    assert crowd.num_spare() == [1, 0], "those of the other one now"


def test_pages_that_are_still_waiting_for_their_state_are_not_stranded() -> None:
    crowd = Crowd(4, HYBRID)
    crowd.write(A, at=1)
    crowd.write(B, at=2, states=(1,))
    assert crowd.num_spare() == [0, 0]


def test_evicted_end_with_a_state_strands_what_it_leaves() -> None:
    crowd = Crowd(2, HYBRID)
    crowd.write(A, at=1, states=(1,))
    crowd.write(B, at=5, states=(1,))
    crowd.write(chain(1, tag="c"), at=6)
    assert crowd.num_spare() == [1, 0]
    crowd.read(B, at=7)
    crowd.write(chain(1, tag="d"), at=8)
    assert crowd.usable(B) == 2


def test_extent_of_states_that_falls_empty_serves_pages() -> None:
    crowd = Crowd(2, HYBRID)
    lease = crowd.reserve(A, at=1, states=(0, 1))
    assert lease.lease_id is not None
    crowd.finish(lease.lease_id, at=1, ok=False)
    assert crowd.write(chain(8, tag="b"), at=2) == 8
