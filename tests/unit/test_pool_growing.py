"""A pool uses the memory that is there, and what comes later when it has come."""

from typing import Any

import pytest

from millpond.model.limits import KIB, MIB
from millpond.model.names import Coverage
from millpond.model.namespace import PartSpec
from millpond.model.retention import Retention
from millpond.pool.pool import Pool
from tests.pool_values import KEY_BYTES, chain, namespace

PAGES = PartSpec("pages", Coverage.EVERY, 256 * KIB)
STATE = PartSpec("state", Coverage.LAST, 256 * KIB)
EXTENT = MIB
PER_EXTENT = 4
SIZE = 4 * EXTENT + 4 * KIB


class Growing:
    """A pool of four extents and a rest, of which ``usable_bytes`` are there."""

    def __init__(self, usable_bytes: int, *, parts: tuple[PartSpec, ...] = (PAGES,)) -> None:
        self.pool = Pool(
            epoch=1,
            arena_bytes=SIZE,
            extent_bytes=EXTENT,
            retention=Retention(state_ratio=0.5),
            usable_bytes=usable_bytes,
        )
        self._parts = parts
        self._now_ns = 0
        self.session = self.pool.open_session(
            replica="north", namespace_id=self.pool.add_namespace(namespace(*parts)), num_ranks=1
        )

    def write(self, tag: str, num_blocks: int, states: tuple[int, ...] = ()) -> list[int]:
        """Write a prefix; return the offsets of its pages, of as many as were granted."""
        self._now_ns += 1
        lease = self.pool.reserve(
            self.session,
            chain(num_blocks, tag=tag),
            KEY_BYTES,
            first_block=0,
            parts=((), states)[: len(self._parts)],
            now_ns=self._now_ns,
        )
        if lease.lease_id is None:
            return []
        self.pool.finish(self.session, lease.lease_id, rank=0, ok=True, now_ns=self._now_ns)
        self.pool.check_invariants()
        return list(lease.offsets[0])

    @property
    def figures(self) -> Any:  # noqa: ANN401 (nested figures)
        return self.pool.statistics()


def test_slots_lie_in_what_is_there_and_a_pool_full_of_it_evicts() -> None:
    growing = Growing(EXTENT)
    offsets = growing.write("a", PER_EXTENT)
    assert sorted(offsets) == [n * 256 * KIB for n in range(PER_EXTENT)]
    assert growing.write("b", 1) == [offsets[-1]]
    assert growing.figures["num_evictions"] == 1


def test_what_has_come_is_used_before_anything_is_evicted() -> None:
    growing = Growing(EXTENT)
    growing.write("a", PER_EXTENT)
    growing.pool.grow(3 * EXTENT)
    offsets = growing.write("b", 2 * PER_EXTENT)
    assert (min(offsets), max(offsets)) == (EXTENT, 3 * EXTENT - 256 * KIB)
    assert growing.figures["num_evictions"] == 0
    growing.pool.grow(SIZE)
    assert min(growing.write("c", PER_EXTENT)) == 3 * EXTENT
    growing.write("d", 1)
    assert growing.figures["num_evictions"] == 1


def test_what_was_there_before_is_used_before_what_came_later() -> None:
    growing = Growing(2 * EXTENT)
    growing.pool.grow(SIZE)
    assert [min(growing.write(tag, PER_EXTENT)) for tag in "abcd"] == [n * EXTENT for n in range(4)]


def test_an_extent_counts_when_all_of_it_is_there() -> None:
    growing = Growing(0)
    assert growing.write("a", 1) == []
    growing.pool.grow(EXTENT - 4 * KIB)
    assert growing.write("a", 1) == []
    assert growing.figures["reserves"]["full"] == 2
    growing.pool.grow(EXTENT)
    assert growing.write("a", 1) == [0]


def test_figures_know_what_is_there_only() -> None:
    growing = Growing(2 * EXTENT)
    growing.write("a", 1)
    assert growing.figures["num_extents"] == 2
    assert growing.figures["bytes"]["unassigned"] == EXTENT
    growing.pool.grow(SIZE)
    assert growing.figures["num_extents"] == 4
    assert growing.figures["bytes"]["unassigned"] == 3 * EXTENT


def test_the_budget_of_states_is_of_what_is_there() -> None:
    growing = Growing(EXTENT, parts=(PAGES, STATE))
    assert growing.figures["retention"]["state_bytes_max"] == EXTENT // 2
    growing.pool.grow(SIZE)
    assert growing.figures["retention"]["state_bytes_max"] == SIZE // 2
    growing.write("a", 8, states=tuple(range(8)))
    states = growing.figures["slot_sizes"][1]
    assert states["num_slots"]["committed"] > EXTENT // 2 // (256 * KIB)


def test_a_flushed_pool_has_all_that_has_come() -> None:
    growing = Growing(EXTENT)
    growing.write("a", PER_EXTENT)
    growing.pool.grow(SIZE)
    growing.pool.flush()
    growing.pool.check_invariants()
    assert growing.figures["num_extents_unassigned"] == 4


@pytest.mark.parametrize("usable_bytes", [EXTENT - 1, -1, SIZE + 1])
def test_a_pool_never_shrinks_nor_outgrows_its_arena(usable_bytes: int) -> None:
    growing = Growing(EXTENT)
    with pytest.raises(ValueError, match=f"usable_bytes {usable_bytes}"):
        growing.pool.grow(usable_bytes)
    assert growing.figures["num_extents"] == 1
