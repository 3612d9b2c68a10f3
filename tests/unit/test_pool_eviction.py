"""What goes when the pool is full, and what may not go."""

import pytest

from millpond.model.names import Coverage
from millpond.model.namespace import PartSpec
from tests.pool_crowd import PAGES, SMALL, STATE, Crowd, S
from tests.pool_values import KEY_BYTES, chain

A, B, C = (chain(2, tag=tag) for tag in "abc")


def test_least_recently_used_prefix_goes_first() -> None:
    crowd = Crowd(1, (PAGES,))
    crowd.write(A, at=1)
    crowd.write(B, at=2)
    crowd.read(A, at=3)
    assert crowd.write(C, at=4) == 2
    assert [crowd.usable(keys) for keys in (A, B, C)] == [2, 0, 2]


def test_prefix_shrinks_from_its_end() -> None:
    crowd = Crowd(1, (PAGES,))
    crowd.write(chain(4), at=1)
    for left, tag in ((3, "x"), (2, "y")):
        crowd.write(chain(1, tag=tag), at=2)
        assert crowd.usable(chain(4)) == left


def test_end_of_a_prefix_hands_its_time_to_what_comes_before() -> None:
    crowd = Crowd(1, (PAGES,))
    older, younger = chain(1, tag="older"), chain(1, tag="younger")
    crowd.write(A, at=1)
    crowd.write(older, at=2)
    lease_id = crowd.pin(older, at=3)
    crowd.read(A, at=5)
    crowd.write(younger, at=6)
    crowd.write(chain(1, tag="x"), at=7)
    assert crowd.usable(A) == 1, "its end is all that could go"
    crowd.finish(lease_id, at=8)
    # What is left of A was used at 5, as a part of the whole, and the other at 3.
    crowd.write(chain(1, tag="y"), at=9)
    assert [crowd.usable(keys) for keys in (A, older, younger)] == [1, 0, 1]


def test_what_is_read_or_being_written_stays() -> None:
    crowd = Crowd(1, (PAGES,))
    crowd.write(A, at=1)
    lease_id = crowd.pin(A, at=2)
    written = crowd.reserve(B, at=3)
    refused = crowd.reserve(C, at=4)
    assert (refused.lease_id, refused.reason) == (None, "full")
    crowd.finish(lease_id, at=5)
    assert written.lease_id is not None
    crowd.finish(written.lease_id, at=5)
    assert crowd.write(C, at=6) == 2
    assert (crowd.usable(A), crowd.usable(B)) == (0, 2)


def test_end_of_a_read_prefix_keeps_what_comes_before_though_no_lease_holds_it() -> None:
    crowd = Crowd(1, (PAGES,))
    crowd.write(chain(3), at=1)
    crowd.pin(chain(3), at=2, first_block=2)
    assert crowd.write(C, at=3) == 1
    assert crowd.usable(chain(3)) == 3


def test_full_pool_grants_as_much_as_there_is_room_for() -> None:
    crowd = Crowd(1, (PAGES,))
    lease = crowd.reserve(chain(9), at=1)
    assert len(lease.offsets[0]) == 4
    crowd.pool.check_invariants()


def test_reservation_never_evicts_the_prefix_that_it_builds_on() -> None:
    crowd = Crowd(1, (PAGES,))
    crowd.write(A, at=1)  # the oldest, and all that can be evicted
    crowd.write(B, at=2)
    crowd.pin(B, at=3)
    lease = crowd.reserve(chain(1, tag="more", after=A), at=4)
    assert (lease.lease_id, lease.reason) == (None, "full")
    assert crowd.usable(A) == 2
    crowd.pool.check_invariants()


def test_pages_take_their_state_along() -> None:
    crowd = Crowd(2, (PAGES, STATE))
    crowd.write(A, at=1, states=(1,))
    crowd.write(B, at=2, states=(1,))
    crowd.write(C, at=3)
    sizes = crowd.pool.statistics()["slot_sizes"]
    assert isinstance(sizes, list)
    committed = {size["slot_bytes"]: size["num_slots"]["committed"] for size in sizes}
    assert committed == {PAGES.slot_bytes: 4, STATE.slot_bytes: 1}
    assert (crowd.usable(A), crowd.usable(B)) == (0, 2)


def test_deepest_states_come_first_when_there_is_not_room_for_all() -> None:
    crowd = Crowd(2, (PAGES, STATE))
    crowd.write(chain(4), at=1, states=range(4))
    assert [crowd.usable(chain(n)) for n in range(1, 5)] == [0, 0, 3, 4]


def test_oldest_state_goes_and_its_pages_stay() -> None:
    crowd = Crowd(2, (PAGES, STATE))
    crowd.write(chain(4), at=1, states=(1, 3))
    crowd.read(chain(2), at=2)
    lease = crowd.reserve(chain(4), at=3, states=(0,))
    assert lease.lease_id is not None
    crowd.finish(lease.lease_id, at=3)
    assert crowd.pool.statistics()["num_blocks"] == 4
    assert [crowd.usable(chain(n)) for n in range(1, 5)] == [1, 2, 2, 2]


def test_window_of_the_middle_goes_before_the_end_that_is_used() -> None:
    window = PartSpec("window", Coverage.WINDOW, 256 * 1024, window_blocks=2)
    crowd = Crowd(2, (SMALL, window))
    crowd.write(chain(4), at=1, states=range(4))
    crowd.read(chain(4), at=2)
    crowd.write(C, at=3, states=range(2))
    assert (crowd.usable(chain(4)), crowd.usable(C)) == (4, 2)
    assert crowd.usable(chain(3)) == 0


def test_blocks_without_pages_go_with_their_last_state() -> None:
    crowd = Crowd(1, (STATE,))
    for at, tag in enumerate("abcdef"):
        lease = crowd.pool.reserve(
            crowd.sessions[0],
            chain(9, tag=tag),
            KEY_BYTES,
            first_block=0,
            parts=((8,),),
            now_ns=at * S,
        )
        assert lease.lease_id is not None
        crowd.finish(lease.lease_id, at=at)
    assert crowd.pool.statistics()["num_blocks"] == 2 * 9


# ---------------------------------------------------------------- between slot sizes


def test_extent_that_falls_empty_serves_another_size() -> None:
    crowd = Crowd(1, (PAGES,), (SMALL,))
    lease = crowd.reserve(A, at=1)
    assert lease.lease_id is not None
    assert crowd.write(B, at=2, model=1) == 0
    crowd.finish(lease.lease_id, at=3, ok=False)
    assert crowd.write(B, at=4, model=1) == 2
    assert crowd.pool.statistics()["num_extents_reclaimed"] == 0


def test_size_with_nothing_takes_an_extent_from_another() -> None:
    crowd = Crowd(2, (PAGES,), (SMALL,))
    for at, tag in enumerate("abcd"):
        crowd.write(chain(2, tag=tag), at=at)
    assert crowd.write(B, at=5, model=1) == 2
    assert crowd.usable(B, model=1) == 2
    assert crowd.pool.statistics()["num_extents_reclaimed"] == 1


def test_size_with_old_entries_gives_an_extent_to_one_with_young_ones() -> None:
    crowd = Crowd(2, (PAGES,), (SMALL,))
    crowd.write(A, at=1)
    crowd.write(chain(8), at=100, model=1)
    # At 110 the small ones are 10 s old, the large ones 109 s.
    assert crowd.write(chain(8, tag="x"), at=110, model=1) == 8
    assert (crowd.usable(A), crowd.usable(chain(8), model=1)) == (0, 8)


def test_sizes_of_about_the_same_age_keep_their_extents() -> None:
    crowd = Crowd(2, (PAGES,), (SMALL,))
    crowd.write(A, at=1)
    crowd.write(chain(8), at=2, model=1)
    assert crowd.write(chain(8, tag="x"), at=100, model=1) == 8
    assert (crowd.usable(A), crowd.usable(chain(8), model=1)) == (2, 0)


@pytest.mark.parametrize("use", ["reading", "writing", "quarantined"])
def test_extent_in_use_is_not_taken(use: str) -> None:
    crowd = Crowd(1, (PAGES,), (SMALL,))
    crowd.write(A, at=1)
    if use == "reading":
        crowd.pin(A, at=2)
    elif use == "writing":
        crowd.reserve(B, at=2)
    else:
        crowd.pin(A, at=2)
        crowd.pool.flush()
        crowd.write(B, at=3)
    refused = crowd.reserve(C, at=100, model=1)
    assert (refused.lease_id, refused.reason) == (None, "full")
    crowd.pool.check_invariants()


def test_extent_is_not_taken_from_before_blocks_that_are_read_elsewhere() -> None:
    crowd = Crowd(2, (PAGES,), (SMALL,))
    crowd.write(chain(8), at=1)  # 4 blocks in either extent
    crowd.pin(chain(8), at=2, first_block=7)
    refused = crowd.reserve(C, at=100, model=1)
    assert (refused.lease_id, refused.reason) == (None, "full")
    assert crowd.usable(chain(8)) == 8


def test_one_extent_in_use_does_not_starve_another_size() -> None:
    crowd = Crowd(3, (PAGES,), (SMALL,))
    oldest = chain(1, tag="oldest")
    crowd.write(oldest, at=1)
    for at, tag in enumerate("abcdefghijk", start=2):
        crowd.write(chain(1, tag=tag), at=at)
    # One of the oldest entry's extent is held for good; the other extents can go.
    crowd.pin(chain(1, tag="b"), at=20)
    assert crowd.write(C, at=100, model=1) == 2
    assert crowd.usable(oldest) == 1
