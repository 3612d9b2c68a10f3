"""The pool's figures, and what a million blocks cost it."""

import json
import tracemalloc
from typing import Any

import pytest

from millpond.model.limits import KIB, MIB
from millpond.model.names import Coverage, Eviction
from millpond.model.namespace import PartSpec
from millpond.model.retention import Retention
from millpond.pool.pool import Pool, default_extent_bytes
from tests.pool_crowd import PAGES, SMALL, Crowd
from tests.pool_values import EVERY, KEY_BYTES, LAST, chain, namespace


class Figures:
    """A pool with sessions of two replicas in one namespace."""

    def __init__(self) -> None:
        self.pool = Pool(epoch=4, arena_bytes=8 * MIB, extent_bytes=MIB)
        self.number = self.pool.add_namespace(namespace(EVERY, LAST))
        self.north = self.open("north")
        self.south = self.open("south")

    def open(self, replica: str) -> int:
        return self.pool.open_session(replica=replica, namespace_id=self.number, num_ranks=1)

    def reserve(self, session: int, num_blocks: int) -> int | None:
        return self.pool.reserve(
            session,
            chain(num_blocks),
            KEY_BYTES,
            first_block=0,
            parts=((), range(num_blocks)),
            now_ns=0,
        ).lease_id

    def write(self, session: int, num_blocks: int) -> None:
        lease_id = self.reserve(session, num_blocks)
        assert lease_id is not None
        self.pool.finish(session, lease_id, rank=None, ok=True, now_ns=0)

    def pin(self, session: int, num_blocks: int) -> int | None:
        lease = self.pool.pin(session, chain(num_blocks), KEY_BYTES, first_block=0, now_ns=0)
        return lease.lease_id

    def now(self) -> Any:  # noqa: ANN401 (nested figures)
        return self.pool.statistics()


def test_slots_and_bytes_by_state() -> None:
    figures = Figures()
    figures.write(figures.north, 3)
    figures.reserve(figures.north, 5)
    doomed = figures.reserve(figures.south, 6)
    figures.pin(figures.south, 3)
    figures.pool.close_session(figures.south)
    assert doomed is not None
    now = figures.now()
    # Pages and states of 3, 2 and 1 blocks.
    assert {state: now["num_slots"][state] for state in ("committed", "reserved")} == {
        "committed": 6,
        "reserved": 4,
    }
    assert now["num_slots"]["quarantined"] == 2
    assert now["bytes"]["committed"] == 3 * (8 + 12) * KIB
    assert now["bytes"]["unassigned"] == 6 * MIB
    pages, states = now["slot_sizes"]
    assert (pages["slot_bytes"], states["slot_bytes"]) == (8 * KIB, 12 * KIB)
    assert pages["num_slots"] == {"free": 122, "reserved": 2, "committed": 3, "quarantined": 1}
    assert now["num_blocks"] == 5


def test_what_requests_got() -> None:
    figures = Figures()
    for num_blocks in (2, 4):
        figures.reserve(figures.north, num_blocks)
    figures.reserve(figures.south, 3)
    figures.pool.reserve(
        figures.south, chain(2, tag="x"), KEY_BYTES, first_block=1, parts=((), ()), now_ns=0
    )
    figures.pin(figures.south, 3)
    figures.pool.lookup(figures.number, chain(4), KEY_BYTES)
    figures.pool.lookup(figures.number, chain(4, tag="x"), KEY_BYTES)
    now = figures.now()
    assert now["reserves"] == {
        "granted": 2, "present": 1, "hole": 1, "full": 0, "not-admitted": 0, "off": 0, "limit": 0
    }  # fmt: skip
    assert now["pins"] == {"granted": 0, "miss": 1, "off": 0, "limit": 0}
    assert now["lookups"] == {"hit": 0, "pending": 1, "miss": 1}
    assert now["num_leases"] == now["num_write_leases"] == 2


def test_replica_keeps_its_figures_over_reconnects() -> None:
    figures = Figures()
    figures.write(figures.north, 3)
    figures.pool.close_session(figures.north)
    figures.write(figures.open("north"), 5)
    now = figures.now()["replicas"]
    assert list(now) == ["north", "south"]
    assert (now["north"]["num_sessions"], now["north"]["num_blocks_written"]) == (2, 5)
    assert now["south"]["num_blocks_written"] == 0


def test_blocks_by_who_wrote_and_who_read_them() -> None:
    figures = Figures()
    figures.write(figures.north, 2)
    figures.write(figures.south, 5)
    for session, num_blocks in ((figures.south, 5), (figures.south, 1), (figures.north, 4)):
        figures.pin(session, num_blocks)
    assert figures.now()["blocks_by_writer_reader"] == {
        "north": {"north": 2, "south": 3},
        "south": {"north": 2, "south": 3},
    }
    assert figures.now()["replicas"]["south"]["num_blocks_read"] == 6


def test_aborts_and_expiries_are_counted() -> None:
    figures = Figures()
    figures.reserve(figures.north, 1)
    figures.reserve(figures.north, 2)
    figures.pool.expire(10**12)
    now = figures.now()
    assert now["num_write_leases_expired"] == 1 + 1
    assert now["replicas"]["north"]["num_write_leases_aborted"] == 2
    assert (now["num_write_leases"], now["num_leases"]) == (0, 2)


def test_why_slots_were_evicted() -> None:
    crowd = Crowd(2, (PAGES,), (SMALL,))
    for at, tag in enumerate("abc"):
        crowd.write(chain(4, tag=tag), at=at)
    crowd.write(chain(1, tag="small"), at=1000, model=1)
    now = crowd.now()
    assert now["evictions"] == {"victim": 4, "spare": 0, "budget": 0, "extent": 4}
    assert now["num_evictions"] == 8
    assert [size["num_evictions"] for size in now["slot_sizes"]] == [8, 0]


def test_what_comes_back_after_its_eviction_is_counted() -> None:
    crowd = Crowd(1, (PAGES,), retention=Retention(Eviction.ARC))
    crowd.write(chain(4, tag="a"), at=1)
    crowd.read(chain(4, tag="a"), at=2)
    for at, tag in enumerate("ba", start=3):
        crowd.write(chain(4, tag=tag), at=at)
    now = crowd.now()
    assert now["retention"]["eviction"] == "arc"
    assert now["slot_sizes"][0]["policy"]["num_ghost_hits"] == 4


def test_refusals_by_replica_and_reason() -> None:
    figures = Figures()
    figures.reserve(figures.north, 4)
    for num_blocks in (3, 4):
        figures.reserve(figures.south, num_blocks)
    figures.pool.set_enabled(enabled=False)
    figures.reserve(figures.south, 9)
    replicas = figures.now()["replicas"]
    assert replicas["north"]["num_reserves_refused"] == {}
    assert replicas["south"]["num_reserves_refused"] == {"present": 2, "off": 1}


def test_blocks_without_room_are_counted() -> None:
    crowd = Crowd(1, (PAGES,))
    crowd.reserve(chain(9), at=1)
    crowd.reserve(chain(3, tag="x"), at=2)
    assert crowd.now()["refused"] == {
        "num_blocks_not_admitted": 0,
        "num_blocks_without_room": 5 + 3,
        "num_blocks_beyond_limit": 0,
        "num_tails_without_room": 0,
    }


def test_figures_are_plain_values() -> None:
    figures = Figures()
    figures.write(figures.north, 2)
    figures.pin(figures.south, 2)
    now = figures.now()
    assert json.loads(json.dumps(now)) == now


@pytest.mark.parametrize("eviction", Eviction)
@pytest.mark.parametrize("num_blocks", [1, 1024], ids=["short", "long"])
def test_a_block_costs_at_most_400_bytes(num_blocks: int, eviction: Eviction) -> None:
    num_keys = 6 * 1024
    arena_bytes = num_keys * 4 * KIB
    slots = PartSpec("pages", Coverage.EVERY, 4 * KIB)
    # Twice as many as there is room for: what has been evicted may be remembered.
    chains = [chain(num_blocks, tag=str(number)) for number in range(2 * num_keys // num_blocks)]
    tracemalloc.start()
    try:
        pool = Pool(
            epoch=1,
            arena_bytes=arena_bytes,
            extent_bytes=default_extent_bytes(arena_bytes),
            retention=Retention(eviction),
        )
        session = pool.open_session(
            replica="north", namespace_id=pool.add_namespace(namespace(slots)), num_ranks=1
        )
        for keys in chains:
            lease = pool.reserve(session, keys, KEY_BYTES, first_block=0, parts=((),), now_ns=0)
            assert lease.lease_id is not None
            pool.finish(session, lease.lease_id, rank=0, ok=True, now_ns=0)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pool.statistics()["num_blocks"] == num_keys
    assert num_bytes / num_keys <= 400
