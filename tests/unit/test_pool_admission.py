"""Which of the blocks that are offered are stored: by policy, and by the limit of one reserve."""

import pytest

from millpond.model.leases import WriteLease
from millpond.model.names import Admission
from millpond.model.retention import Retention
from tests.pool_crowd import PAGES, STATE, Crowd
from tests.pool_values import chain

SECOND_TOUCH = Retention(admission=Admission.SECOND_TOUCH)
A = chain(3, tag="a")


def blocks_of(lease: WriteLease) -> range | str:
    """Return the granted blocks, or why there are none."""
    if lease.lease_id is None:
        return lease.reason
    return range(lease.first_block, lease.first_block + len(lease.offsets[0]))


def test_block_is_stored_when_a_second_request_offers_it() -> None:
    crowd = Crowd(4, (PAGES,), retention=SECOND_TOUCH)
    assert blocks_of(crowd.reserve(A, at=1, request_id="first")) == "not-admitted"
    longer = chain(2, tag="more", after=A)
    assert blocks_of(crowd.reserve(longer, at=2, request_id="second")) == range(3)
    assert crowd.now()["reserves"]["not-admitted"] == 1
    assert crowd.now()["refused"]["num_blocks_not_admitted"] == 3 + 2


def test_request_that_offers_again_with_each_step_is_one_request() -> None:
    crowd = Crowd(4, (PAGES,), retention=SECOND_TOUCH)
    for num_blocks in range(1, 4):
        lease = crowd.reserve(chain(num_blocks, tag="a"), at=num_blocks, request_id="first")
        assert blocks_of(lease) == "not-admitted"


def test_same_name_in_another_session_is_another_request() -> None:
    crowd = Crowd(4, (PAGES,), retention=SECOND_TOUCH)
    crowd.reserve(A, at=1, request_id="first")
    crowd.sessions = [crowd.pool.open_session(replica="south", namespace_id=0, num_ranks=1)]
    assert blocks_of(crowd.reserve(A, at=2, request_id="first")) == range(3)


def test_without_a_name_each_offer_is_a_request() -> None:
    crowd = Crowd(4, (PAGES,), retention=SECOND_TOUCH)
    assert blocks_of(crowd.reserve(A, at=1)) == "not-admitted"
    assert blocks_of(crowd.reserve(A, at=2)) == range(3)


def test_request_for_another_model_is_none() -> None:
    crowd = Crowd(4, (PAGES,), (PAGES, STATE), retention=SECOND_TOUCH)
    crowd.reserve(A, at=1, model=0)
    assert blocks_of(crowd.reserve(A, at=2, model=1)) == "not-admitted"
    assert blocks_of(crowd.reserve(A, at=3, model=1)) == range(3)


def test_state_is_stored_where_its_block_is() -> None:
    crowd = Crowd(4, (PAGES, STATE), retention=SECOND_TOUCH)
    assert blocks_of(crowd.reserve(A, at=1, states=(2,))) == "not-admitted"
    crowd.write(chain(2, tag="a"), at=2)
    lease = crowd.reserve(A, at=3, states=(1, 2))
    assert lease.first_block == 1
    assert [offset == 2**64 - 1 for offset in lease.offsets[0]] == [True, False]
    assert [offset == 2**64 - 1 for offset in lease.offsets[1]] == [False, False]


def test_what_was_evicted_is_admitted_at_once() -> None:
    crowd = Crowd(1, (PAGES,), retention=SECOND_TOUCH)
    for at in range(2):
        crowd.write(A, at=at)
    for at in range(2, 4):
        crowd.write(chain(4, tag="b"), at=at)
    assert crowd.usable(A) == 0
    assert crowd.write(A, at=4) == 3


def test_flush_forgets_what_was_asked_for() -> None:
    crowd = Crowd(4, (PAGES,), retention=SECOND_TOUCH)
    crowd.reserve(A, at=1)
    crowd.pool.flush()
    assert blocks_of(crowd.reserve(A, at=2)) == "not-admitted"


def test_hole_is_no_offer() -> None:
    crowd = Crowd(4, (PAGES,), retention=SECOND_TOUCH)
    lease = crowd.pool.reserve(
        crowd.sessions[0], A, 16, first_block=1, parts=((),), now_ns=1, request_id="first"
    )
    assert lease.reason == "hole"
    assert blocks_of(crowd.reserve(A, at=2, request_id="second")) == "not-admitted"


# ---------------------------------------------------------------- the limit of one reserve


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Crowd:
    monkeypatch.setattr("millpond.pool.reserving.BLOCKS_PER_RESERVE_MAX", 3)
    return Crowd(6, (PAGES, STATE))


def test_long_prefix_is_granted_piece_by_piece(limited: Crowd) -> None:
    granted: list[range | str] = []
    for at in range(4):
        lease = limited.reserve(chain(7), at=at)
        granted.append(blocks_of(lease))
        if lease.lease_id is not None:
            limited.finish(lease.lease_id, at=at)
    assert granted == [range(3), range(3, 6), range(6, 7), "present"]
    assert limited.now()["refused"]["num_blocks_beyond_limit"] == 4 + 1


def test_state_comes_with_the_piece_that_has_its_block(limited: Crowd) -> None:
    first = limited.reserve(chain(5), at=1, states=(1, 4))
    assert [offset != 2**64 - 1 for offset in first.offsets[1]] == [False, True, False]
    second = limited.reserve(chain(5), at=2, states=(1, 4))
    assert [offset != 2**64 - 1 for offset in second.offsets[1]] == [False, True]


def test_keys_beyond_the_limit_are_checked_when_they_are_granted(limited: Crowd) -> None:
    crossed = chain(4) + chain(1)
    lease = limited.reserve(crossed, at=1)
    assert lease.lease_id is not None
    limited.finish(lease.lease_id, at=1)
    with pytest.raises(ValueError, match="not one chain"):
        limited.reserve(crossed, at=2)
