"""Which blocks of a prefix can be used: lookup and pin."""

from collections.abc import Sequence

import pytest

from millpond.model.limits import KEYS_PER_REQUEST_MAX, KIB, MIB
from millpond.model.names import Coverage, Outcome
from millpond.model.namespace import PartSpec
from millpond.pool.pool import Pool
from tests.pool_values import EVERY, KEY_BYTES, LAST, WINDOW, chain, namespace


class Replica:
    """One open session on a pool, and short forms of its verbs."""

    def __init__(self, pool: Pool, *parts: PartSpec, name: str = "north", ranks: int = 1) -> None:
        self.pool = pool
        self.parts = parts
        self.namespace_id = pool.add_namespace(namespace(*parts))
        self.session = pool.open_session(
            replica=name, namespace_id=self.namespace_id, num_ranks=ranks
        )

    def reserve(self, keys: bytes, *tails: Sequence[int], first_block: int = 0) -> int:
        lease = self.pool.reserve(
            self.session,
            keys,
            KEY_BYTES,
            first_block=first_block,
            parts=tails or tuple(() for _ in self.parts),
            now_ns=1,
        )
        assert lease.lease_id is not None
        return lease.lease_id

    def finish(self, lease_id: int, *, ok: bool = True) -> None:
        self.pool.finish(self.session, lease_id, rank=None, ok=ok, now_ns=1)

    def write(self, keys: bytes, *tails: Sequence[int]) -> None:
        self.finish(self.reserve(keys, *tails))

    def lookup(self, keys: bytes) -> tuple[int, Outcome]:
        found = self.pool.lookup(self.namespace_id, keys, KEY_BYTES)
        return found.num_blocks, found.outcome


@pytest.fixture
def pool() -> Pool:
    return Pool(epoch=1, arena_bytes=16 * MIB, extent_bytes=MIB)


@pytest.mark.parametrize("num_written", range(10))
@pytest.mark.parametrize("num_asked", range(1, 10))
def test_longest_prefix_is_found_at_every_length(
    pool: Pool, num_written: int, num_asked: int
) -> None:
    replica = Replica(pool, EVERY)
    if num_written:
        replica.write(chain(num_written))
    outcome = Outcome.HIT if num_asked <= num_written else Outcome.MISS
    assert replica.lookup(chain(num_asked)) == (min(num_asked, num_written), outcome)


def test_prefix_ends_where_another_chain_branches_off(pool: Pool) -> None:
    replica = Replica(pool, EVERY)
    replica.write(chain(6))
    assert replica.lookup(chain(4, tag="other", after=chain(3))) == (3, Outcome.MISS)


def test_block_that_is_being_written_is_pending_and_then_a_hit(pool: Pool) -> None:
    replica = Replica(pool, EVERY)
    replica.write(chain(2))
    lease_id = replica.reserve(chain(4))
    assert replica.lookup(chain(4)) == (2, Outcome.PENDING)
    assert replica.lookup(chain(2)) == (2, Outcome.HIT)
    replica.finish(lease_id)
    assert replica.lookup(chain(4)) == (4, Outcome.HIT)


def test_blocks_committed_before_those_they_follow_wait_for_them(pool: Pool) -> None:
    replica = Replica(pool, EVERY)
    first = replica.reserve(chain(2))
    second = replica.reserve(chain(5))
    replica.finish(second)
    assert replica.lookup(chain(5)) == (0, Outcome.PENDING)
    replica.finish(first)
    assert replica.lookup(chain(5)) == (5, Outcome.HIT)


def test_prefix_with_states_is_usable_up_to_the_last_state(pool: Pool) -> None:
    replica = Replica(pool, EVERY, LAST)
    replica.write(chain(6), (), (1, 4))
    lengths = [replica.lookup(chain(n))[0] for n in range(1, 7)]
    assert lengths == [0, 2, 2, 2, 5, 5]


def test_state_that_is_being_written_is_pending(pool: Pool) -> None:
    replica = Replica(pool, EVERY, LAST)
    replica.write(chain(4), (), (1,))
    lease_id = replica.reserve(chain(4), (), (3,))
    assert replica.lookup(chain(4)) == (2, Outcome.PENDING)
    replica.finish(lease_id)
    assert replica.lookup(chain(4)) == (4, Outcome.HIT)


def test_window_needs_its_last_blocks_or_all_of_a_short_prefix(pool: Pool) -> None:
    window = PartSpec("window", Coverage.WINDOW, 4 * KIB, window_blocks=3)
    replica = Replica(pool, EVERY, window)
    replica.write(chain(9), (), (0, 1, 2, 5, 6, 7, 8))
    lengths = [replica.lookup(chain(n))[0] for n in range(1, 10)]
    assert lengths == [1, 2, 3, 3, 3, 3, 3, 8, 9]


def test_states_alone_can_make_a_prefix(pool: Pool) -> None:
    replica = Replica(pool, LAST)
    replica.write(chain(5), (1, 3))
    assert [replica.lookup(chain(n))[0] for n in range(1, 6)] == [0, 2, 2, 4, 4]


def test_namespaces_do_not_see_each_other(pool: Pool) -> None:
    Replica(pool, EVERY).write(chain(3))
    other = Replica(pool, EVERY, LAST)
    assert other.lookup(chain(3)) == (0, Outcome.MISS)


def test_equal_namespaces_are_one(pool: Pool) -> None:
    Replica(pool, EVERY).write(chain(3))
    assert Replica(pool, EVERY, name="south").lookup(chain(3)) == (3, Outcome.HIT)


def test_keys_out_of_step_are_no_hit(pool: Pool) -> None:
    replica = Replica(pool, EVERY)
    replica.write(chain(4))
    assert replica.lookup(chain(4)[2 * KEY_BYTES :]) == (0, Outcome.MISS)


@pytest.mark.parametrize(
    ("keys", "key_bytes"),
    [
        (b"x" * 15, 16),
        (b"x" * 48, 32),
        (b"x" * 8, 8),
        (b"", 0),
        (bytes(16 * (KEYS_PER_REQUEST_MAX + 1)), 16),
    ],
)
def test_malformed_keys_are_misuse(pool: Pool, keys: bytes, key_bytes: int) -> None:
    replica = Replica(pool, EVERY)
    with pytest.raises(ValueError, match="keys"):
        pool.lookup(replica.namespace_id, keys, key_bytes)


def test_pin_lists_what_each_part_needs(pool: Pool) -> None:
    replica = Replica(pool, EVERY, LAST, WINDOW)
    replica.write(chain(6), (), (2, 5), range(6))
    lease = pool.pin(replica.session, chain(6), KEY_BYTES, first_block=2, now_ns=2)
    blocks = [list(pairs[0::2]) for pairs in lease.offsets]
    assert blocks == [[2, 3, 4, 5], [5], [4, 5]]
    assert (lease.num_blocks, lease.outcome) == (6, Outcome.HIT)
    assert lease.writers == (("north", 4),)


def test_readers_get_the_offsets_that_writers_got(pool: Pool) -> None:
    replica = Replica(pool, EVERY)
    written = pool.reserve(
        replica.session, chain(4), KEY_BYTES, first_block=0, parts=((),), now_ns=1
    )
    assert written.lease_id is not None
    replica.finish(written.lease_id)
    lease = pool.pin(replica.session, chain(4), KEY_BYTES, first_block=0, now_ns=2)
    assert list(lease.offsets[0][1::2]) == list(written.offsets[0])


def test_pin_names_each_writer(pool: Pool) -> None:
    north, south = Replica(pool, EVERY), Replica(pool, EVERY, name="south")
    north.write(chain(2))
    south.write(chain(5))
    lease = pool.pin(south.session, chain(5), KEY_BYTES, first_block=0, now_ns=2)
    assert dict(lease.writers) == {"north": 2, "south": 3}


def test_without_pages_the_state_says_who_wrote(pool: Pool) -> None:
    replica = Replica(pool, WINDOW, LAST)
    replica.write(chain(3), (1, 2), (2,))
    lease = pool.pin(replica.session, chain(3), KEY_BYTES, first_block=0, now_ns=2)
    assert lease.writers == (("north", 1),)


def test_pin_grants_nothing_that_the_reader_has_already(pool: Pool) -> None:
    replica = Replica(pool, EVERY)
    replica.write(chain(3))
    lease = pool.pin(replica.session, chain(5), KEY_BYTES, first_block=3, now_ns=2)
    assert (lease.lease_id, lease.num_blocks, lease.reason) == (None, 3, "miss")
    assert pool.statistics()["num_leases"] == 0


def test_pool_that_is_off_misses_and_grants_nothing(pool: Pool) -> None:
    replica = Replica(pool, EVERY)
    replica.write(chain(3))
    pool.set_enabled(enabled=False)
    assert replica.lookup(chain(3)) == (0, Outcome.MISS)
    read = pool.pin(replica.session, chain(3), KEY_BYTES, first_block=0, now_ns=2)
    write = pool.reserve(replica.session, chain(4), KEY_BYTES, first_block=0, parts=((),), now_ns=2)
    assert (read.lease_id, read.reason, read.num_blocks) == (None, "off", 0)
    assert (write.lease_id, write.reason) == (None, "off")
    pool.set_enabled(enabled=True)
    assert replica.lookup(chain(3)) == (3, Outcome.HIT)


def test_leases_of_one_session_are_bounded(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.pool.pool.LEASES_PER_SESSION_MAX", 3)
    replica = Replica(pool, EVERY)
    replica.write(chain(1))
    for _ in range(3):
        pool.pin(replica.session, chain(1), KEY_BYTES, first_block=0, now_ns=2)
    read = pool.pin(replica.session, chain(1), KEY_BYTES, first_block=0, now_ns=2)
    write = pool.reserve(replica.session, chain(2), KEY_BYTES, first_block=0, parts=((),), now_ns=2)
    assert (read.lease_id, read.reason) == (None, "limit")
    assert (write.lease_id, write.reason) == (None, "limit")
