"""Checksums: every byte of a slot counts, ranks keep apart, and no sum is no alarm."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from os import close
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.arena.arena import Arena
from millpond.connector import worker as worker_module
from millpond.connector.geometry import EngineLayout
from millpond.connector.metadata import Job, PartJob
from millpond.model.errors import UnsupportedEngine
from millpond.model.layout import LayerPages, PartLayout, Segment, summed_segments
from millpond.model.limits import KIB, MIB
from millpond.model.names import Coverage
from millpond.model.namespace import aligned_slot_bytes
from millpond.service.client import ReplicaIdentity
from millpond.transfer.checksums import Checked, Checksums, Summed

PAGES = PartLayout(
    "attention", (LayerPages("l0", 0, 6 * KIB), LayerPages("l1", 0, 6 * KIB)), {0: 2}
)
SMALL = PartLayout("state", (LayerPages("l2", 1, KIB), LayerPages("l3", 1, 5 * KIB)), {1: 1})
PARTS = (PAGES, SMALL)
NUM_SUMS = 2
"""Of a slice of PAGES."""
SLOT, STATE = Summed(0, 64 * KIB, 7), Summed(1, 128 * KIB, 7)


@contextmanager
def an_arena() -> Iterator[Arena]:
    arena, fd = Arena.create(size_bytes=MIB, extent_bytes=MIB, epoch=1)
    with closing(arena):
        close(fd)
        yield arena


@pytest.fixture
def arena() -> Iterator[Arena]:
    with an_arena() as made:
        yield made


def fill(arena: Arena, slot: Summed, *, num_ranks: int = 1) -> None:
    num_bytes = PARTS[slot.part].rank_bytes * num_ranks
    arena.view(slot.offset_bytes, num_bytes)[:] = bytes(i * 31 % 251 for i in range(num_bytes))


def flip(arena: Arena, offset_bytes: int) -> None:
    with arena.view(offset_bytes, 1) as byte:
        byte[0] ^= 1


# ---------------------------------------------------------------- what has a sum

layers = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 9 * KIB)).map(
        lambda drawn: LayerPages(f"{drawn}", *drawn)
    ),
    min_size=1,
    max_size=6,
)


@given(layers, st.integers(1, 4), st.integers(1, 4), st.integers(1, 64))
def test_sums_cover_a_slice_and_have_room_for_all_ranks(
    drawn: list[LayerPages], first: int, second: int, num_ranks: int
) -> None:
    part = PartLayout("p", tuple(drawn), {0: first, 1: second})
    segments = summed_segments(part)
    if part.rank_bytes < 4 * KIB:
        assert segments == ()
        return
    assert segments[0].offset_bytes == 0
    assert all(
        one.offset_bytes + one.num_bytes == then.offset_bytes for one, then in pairwise(segments)
    )
    assert sum(segment.num_bytes for segment in segments) == part.rank_bytes
    room = aligned_slot_bytes(part.rank_bytes * num_ranks) // (4 * KIB)
    assert len(segments) * num_ranks <= room


def test_each_large_layer_has_a_sum_of_its_own_and_small_ones_share() -> None:
    assert summed_segments(PAGES) == (Segment(0, 12 * KIB), Segment(12 * KIB, 12 * KIB))
    assert summed_segments(SMALL) == (Segment(0, 6 * KIB),)


# ---------------------------------------------------------------- what is noticed


@given(st.integers(0, PAGES.rank_bytes - 1), st.integers(0, 7))
def test_any_flipped_bit_is_noticed(byte: int, bit: int) -> None:
    with an_arena() as arena:
        sums = Checksums(PARTS, 0, 1.0)
        fill(arena, SLOT)
        sums.write(arena, [SLOT])
        assert sums.check(arena, [SLOT]) == Checked(1)
        with arena.view(SLOT.offset_bytes + byte, 1) as there:
            there[0] ^= 1 << bit
        assert sums.check(arena, [SLOT]) == Checked(1, (SLOT.offset_bytes,))


def test_bytes_that_land_after_they_were_summed_are_noticed(arena: Arena) -> None:
    """E2 lost: the slot is committed while its copy runs."""
    sums = Checksums(PARTS, 0, 1.0)
    sums.write(arena, [SLOT])
    fill(arena, SLOT)
    assert sums.check(arena, [SLOT]).damaged == (SLOT.offset_bytes,)


def test_the_whole_bytes_of_another_block_are_noticed(arena: Arena) -> None:
    """E5 lost: the slot was given to another block, which was written and summed in full."""
    sums = Checksums(PARTS, 0, 1.0)
    fill(arena, SLOT)
    sums.write(arena, [SLOT._replace(seed=8)])
    assert sums.check(arena, [SLOT]).damaged == (SLOT.offset_bytes,)


def test_a_sum_that_changes_is_noticed(arena: Arena) -> None:
    sums = Checksums(PARTS, 0, 1.0)
    fill(arena, SLOT)
    sums.write(arena, [SLOT])
    for i in range(NUM_SUMS):
        before = arena.sums(SLOT.offset_bytes, i, 1)[0]
        for wrong in (before ^ 1, 0):
            arena.sums(SLOT.offset_bytes, i, 1)[0] = wrong
            assert sums.check(arena, [SLOT]).damaged, (i, wrong)
        arena.sums(SLOT.offset_bytes, i, 1)[0] = before
    assert not sums.check(arena, [SLOT]).damaged


def test_parts_and_neighbours_keep_apart(arena: Arena) -> None:
    sums = Checksums(PARTS, 0, 1.0)
    size = aligned_slot_bytes(PAGES.rank_bytes)
    slots = [Summed(0, i * size, i) for i in range(3)] + [STATE]
    for slot in slots:
        fill(arena, slot)
    sums.write(arena, slots)
    assert sums.check(arena, slots) == Checked(4)
    flip(arena, size + 100)
    flip(arena, STATE.offset_bytes + 5)
    assert sums.check(arena, slots) == Checked(4, (size, STATE.offset_bytes))


def test_each_rank_sums_its_own_slice(arena: Arena) -> None:
    ranks = [Checksums(PARTS, rank, 1.0) for rank in range(3)]
    fill(arena, SLOT, num_ranks=3)
    for sums in ranks:
        sums.write(arena, [SLOT])
    assert all(sums.check(arena, [SLOT]) == Checked(1) for sums in ranks)
    flip(arena, SLOT.offset_bytes + PAGES.rank_bytes + 9)
    assert [bool(sums.check(arena, [SLOT]).damaged) for sums in ranks] == [False, True, False]


# ---------------------------------------------------------------- what is no alarm


def test_sums_of_a_block_that_was_there_before_are_not_believed(arena: Arena) -> None:
    guarded, unguarded = Checksums(PARTS, 0, 1.0), Checksums(PARTS, 0, 0.0)
    fill(arena, SLOT)
    guarded.write(arena, [SLOT])
    flip(arena, SLOT.offset_bytes)  # another block's bytes, by a writer without checksums
    unguarded.write(arena, [SLOT._replace(seed=None)])
    assert guarded.check(arena, [SLOT]) == Checked()
    assert not any(arena.sums(SLOT.offset_bytes, 0, NUM_SUMS))


def test_a_digest_of_zero_is_a_sum(arena: Arena) -> None:
    sums: Any = Checksums(PARTS, 0, 1.0)
    sums._hash = lambda *_: 0
    sums.write(arena, [SLOT])
    assert list(arena.sums(SLOT.offset_bytes, 0, NUM_SUMS)) == [1, 1]
    assert sums.check(arena, [SLOT]) == Checked(1)


def test_a_reader_without_checksums_looks_at_nothing(arena: Arena) -> None:
    Checksums(PARTS, 0, 1.0).write(arena, [SLOT])
    flip(arena, SLOT.offset_bytes)
    assert Checksums(PARTS, 0, 0.0).check(arena, [SLOT]) == Checked()


def test_a_share_is_compared_and_all_once_one_is_damaged(arena: Arena) -> None:
    drawn = iter([0.1, 0.9, 0.3, 0.9] * 2)
    sums = Checksums(PARTS, 0, 0.25, chance=lambda: next(drawn))
    slots = [Summed(0, i * 32 * KIB, i) for i in range(4)]
    sums.write(arena, slots)
    flip(arena, slots[1].offset_bytes)
    assert sums.check(arena, slots) == Checked(1)  # 1 of 4, a sound one
    flip(arena, slots[0].offset_bytes)
    assert sums.check(arena, slots) == Checked(4, tuple(s.offset_bytes for s in slots[:2]))


def test_without_its_package_only_checksums_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    Checksums(PARTS, 0, 0.0)
    with pytest.raises(UnsupportedEngine, match=r"pip install 'xxhash>=.*check_ratio"):
        Checksums(PARTS, 0, 0.1)


# ---------------------------------------------------------------- the worker's side


class FakeClient:
    """Notes what the daemon would hear."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.said: list[object] = []

    def finish(self, lease_ids: list[int], *, ok: bool) -> None:
        self.said.append(("finish", lease_ids, ok))

    def finish_checked(self, lease_id: int, *, num_checked: int, damaged: tuple[int, ...]) -> None:
        self.said.append(("checked", lease_id, num_checked, damaged))


def make_worker(check_ratio: float) -> Any:  # noqa: ANN401
    layout = EngineLayout(256, 256, (256,), (PAGES,), (Coverage.EVERY,), (None,))
    settings: Any = SimpleNamespace(socket="/nowhere", check_ratio=check_ratio, early_loads=False)
    identity = ReplicaIdentity(replica="a", session_key="k", num_ranks=1)
    idle: Any = SimpleNamespace(step=lambda **_: None, hold_back=lambda: None)
    return worker_module.WorkerSide(layout, identity, settings, idle, 0)


def job(*seeds: int) -> Job:
    part = PartJob(0, [SLOT.offset_bytes], {0: [[1, 2]]}, list(seeds))
    return Job(1, "request", 5, 9, (part,))


def test_a_damaged_load_fails_and_the_daemon_hears_of_it(arena: Arena) -> None:
    worker, client = make_worker(1.0), FakeClient(arena)
    worker._num_stores["request"] = 1
    worker._end_store(job(7), client, None)
    worker._end_load(job(7), client, None)
    assert worker.take_results().loads_failed == {}
    flip(arena, SLOT.offset_bytes)
    worker._end_load(job(7), client, None)
    assert client.said == [
        ("finish", [9], True),
        ("checked", 9, 1, ()),
        ("checked", 9, 1, (SLOT.offset_bytes,)),
    ]
    assert "other bytes" in worker.take_results().loads_failed["request"]
    assert worker.finished() == (set(), {"request"}, {"request"})


def test_what_has_failed_is_neither_summed_nor_compared(arena: Arena) -> None:
    worker, client = make_worker(1.0), FakeClient(arena)
    worker._num_stores["request"] = 2
    worker._end_store(job(7), client, "the copy failed")
    assert not any(arena.sums(SLOT.offset_bytes, 0, NUM_SUMS))
    worker._end_store(job(7), client, None)
    flip(arena, SLOT.offset_bytes)
    worker._end_load(job(7), client, "the copy failed")
    assert client.said == [("finish", [9], False), ("finish", [9], True), ("finish", [9], False)]


def test_sums_are_there_before_the_commit(arena: Arena) -> None:
    worker, client = make_worker(1.0), FakeClient(arena)
    worker._num_stores["request"] = 1
    client.finish = lambda *_, **__: client.said.append(
        all(arena.sums(SLOT.offset_bytes, 0, NUM_SUMS))
    )
    worker._end_store(job(7), client, None)
    assert client.said == [True]


def test_without_checksums_a_store_takes_the_old_ones_away(arena: Arena) -> None:
    worker, client = make_worker(0.0), FakeClient(arena)
    arena.sums(SLOT.offset_bytes, 0, NUM_SUMS)[:] = memoryview(b"\1" * 16).cast("Q")
    worker._num_stores["request"] = 1
    worker._end_store(job(), client, None)
    assert not any(arena.sums(SLOT.offset_bytes, 0, NUM_SUMS))
    worker._end_load(job(), client, None)
    assert client.said == [("finish", [9], True), ("finish", [9], True)]
