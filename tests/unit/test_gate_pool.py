"""The full-pool check's parts: its pattern, its pages, and what it demands of slots."""

import os
import random
from array import array
from collections.abc import Iterator

import pytest
import torch

from millpond.arena.arena import Arena
from millpond.gate import pool_device as module
from millpond.gate.errors import NoGpu
from millpond.gate.pool_device import (
    NUM_LAYERS,
    SLOT_STEP_BYTES,
    Buffer,
    CheckedDevice,
    Mover,
    Pages,
    open_device,
    pick_device,
)
from millpond.gate.pool_errors import NotRegistered, PoolFault
from millpond.gate.pool_other import Answer, _attempt
from millpond.gate.pool_pattern import POISON, Stamp, describe_word, expected_words
from millpond.gate.pool_slots import check_full, check_slots, is_free, require_sizes
from millpond.model.errors import DaemonGone, SetupError
from millpond.model.limits import KIB, MIB
from millpond.transfer.copies import Direction
from millpond.transfer.cpu import CpuDevice
from millpond.transfer.device import CopyFailed

SLOT = 64 * KIB
ARENA_BYTES = 8 * MIB

# ---------------------------------------------------------------- the pattern


def test_no_two_words_of_any_blocks_are_equal() -> None:
    numbers = torch.arange(64).view(4, 1, 16)
    words = torch.cat(
        [
            expected_words(Stamp(filling, process, first), 5, numbers).flatten()
            for filling in (0, 1, 31)
            for process in (0, 3)
            for first in (0, 5, 2**32 - 5)
        ]
    )
    assert len(words.unique()) == len(words)
    assert int(words.min()) >= 0 > POISON


def test_a_word_says_what_it_belongs_to() -> None:
    numbers = torch.arange(64).view(4, 1, 16)
    words = expected_words(Stamp(2, 1, 70), 3, numbers)
    text = describe_word(int(words[1, 2, 4]))
    assert "filling 2, process 1, block 72, byte 160 of the slot" in text
    assert "nothing was copied" in describe_word(POISON)


@pytest.mark.parametrize(("filling", "process"), [(32, 0), (-1, 0), (0, 4)])
def test_a_stamp_out_of_range_is_refused(filling: int, process: int) -> None:
    with pytest.raises(ValueError, match=f"filling {filling} of process {process}"):
        Stamp(filling, process, 0)


# ---------------------------------------------------------------- pages


@pytest.fixture
def arena() -> Iterator[Arena]:
    made, fd = Arena.create(size_bytes=ARENA_BYTES, extent_bytes=4 * MIB, epoch=7)
    yield made
    made.close()
    os.close(fd)


@pytest.fixture
def mover() -> Iterator[Mover]:
    made = Mover(open_device("cpu"))
    yield made
    assert made.close()


@pytest.fixture
def pages(mover: Mover) -> Pages:
    return Pages(Buffer(mover.device, [SLOT]), SLOT)


def test_slots_are_written_and_read_back(arena: Arena, mover: Mover, pages: Pages) -> None:
    slots = array("Q", [5 * SLOT, 0, 127 * SLOT])
    chance = random.Random(1)
    pages.store(mover, arena, Stamp(1, 0, 40), slots, chance)
    words = torch.frombuffer(arena.view(0, SLOT), dtype=torch.int64)
    assert words.tolist() == [Stamp(1, 0, 41).first_word() + i for i in range(SLOT // 8)]
    del words
    assert pages.compare(mover, arena, Stamp(1, 0, 40), slots, chance) is None
    assert mover.moved[Direction.STORE].num_bytes == 3 * SLOT
    assert mover.moved[Direction.LOAD].num_bytes == 3 * SLOT


@pytest.mark.parametrize("offset", [0, 8191, SLOT // 2 + 3, SLOT - 1])
def test_one_flipped_bit_is_found_where_it_is(
    arena: Arena, mover: Mover, pages: Pages, offset: int
) -> None:
    slots = array("Q", [0, 3 * SLOT, SLOT])
    stamp, chance = Stamp(0, 1, 9), random.Random(2)
    pages.store(mover, arena, stamp, slots, chance)
    with arena.view(3 * SLOT, SLOT) as view:
        view[offset] ^= 16
    difference = pages.compare(mover, arena, stamp, slots, chance)
    assert difference is not None
    assert (difference.block, difference.slot_offset_bytes) == (1, 3 * SLOT)
    assert difference.offset_bytes == offset // 8 * 8
    assert difference.expected ^ difference.found == 16 << 8 * (offset % 8)
    assert f"offset {3 * SLOT} differs from byte {offset // 8 * 8}" in str(difference)


def test_a_stale_slot_says_what_it_still_holds(arena: Arena, mover: Mover, pages: Pages) -> None:
    slots, chance = array("Q", [SLOT]), random.Random(3)
    pages.store(mover, arena, Stamp(0, 0, 4), slots, chance)
    difference = pages.compare(mover, arena, Stamp(1, 0, 6), slots, chance)
    assert "expected" in str(difference)
    assert "filling 0, process 0, block 4, byte 0" in str(difference)


def test_a_load_that_moves_nothing_is_found(arena: Arena, pages: Pages, mover: Mover) -> None:
    """The pages still hold what was stored: only poison tells that nothing came back."""
    slots, chance = array("Q", [SLOT]), random.Random(4)
    pages.store(mover, arena, Stamp(0, 0, 0), slots, chance)

    class Idle:
        def move(self, *_: object) -> None:
            pass

    difference = pages.compare(Idle(), arena, Stamp(0, 0, 0), slots, chance)  # type: ignore[arg-type]
    assert difference is not None
    assert difference.found == POISON


@pytest.mark.parametrize(
    ("error", "is_fault"), [(CopyFailed("gone"), True), (DaemonGone("gone"), False)]
)
def test_a_failed_copy_of_the_second_client_is_a_fault(error: Exception, is_fault: bool) -> None:
    def work() -> Answer:
        raise error

    answer = _attempt(work)
    assert (answer.fault, answer.error) == (("gone", None) if is_fault else (None, "gone"))


def test_a_copy_that_never_ends_has_failed(
    arena: Arena, mover: Mover, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_COPY_S_MAX", 0.05)
    monkeypatch.setattr(mover._engine, "submit", lambda *_, **__: None)
    with pytest.raises(CopyFailed, match="store of 65536 bytes has not ended"):
        pages.store(mover, arena, Stamp(0, 0, 0), array("Q", [0]), random.Random(1))


def test_slots_are_whole_pages_of_all_layers() -> None:
    assert SLOT_STEP_BYTES % (16 * NUM_LAYERS) == 0
    buffer = Buffer(open_device("cpu"), [SLOT])
    with pytest.raises(ValueError, match="slots of 1000 bytes"):
        Pages(buffer, 1000)


class NeverReady(CpuDevice):
    """A device that registers nothing."""

    def is_ready(self, end_offset: int) -> bool:
        return end_offset < 0


def test_a_failed_registration_is_an_error_with_the_remedy(arena: Arena) -> None:
    mover = Mover(CheckedDevice(torch.device("cpu"), NeverReady(), lambda: "error 2"))
    with pytest.raises(NotRegistered, match="error 2; raise the limit on locked memory"):
        mover.adopt(arena)
    assert mover.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named() -> None:
    assert pick_device("auto") == "cpu"
    with pytest.raises(NoGpu, match="no CUDA device"):
        pick_device("cuda")


# ---------------------------------------------------------------- slots


def offsets_of(*chunks: list[int]) -> list[array]:
    return [array("Q", chunk) for chunk in chunks]


def test_slots_of_several_sizes_may_lie_beside_each_other() -> None:
    small = offsets_of([2 * SLOT, 2 * SLOT + 4096], [3 * SLOT - 4096])
    assert check_slots({SLOT: offsets_of([SLOT, 0]), 4096: small}, 3 * SLOT) == 5
    assert check_slots({SLOT: []}, SLOT) == 0


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ({SLOT: [[0, SLOT], [SLOT]]}, f"offset {SLOT} was handed out twice"),
        ({SLOT: [[0]], 4096: [[SLOT - 4096]]}, f"offsets 0 and {SLOT - 4096} overlap"),
        ({SLOT: [[512]]}, "offset 512 is not aligned"),
        ({SLOT: [[0, 3 * SLOT]]}, f"offset {3 * SLOT} of {SLOT} bytes lies outside"),
        ({SLOT: [[2**64 - 4096]]}, "lies outside"),
    ],
)
def test_a_wrong_slot_is_found(offsets: dict[int, list[list[int]]], words: str) -> None:
    with pytest.raises(PoolFault, match=words):
        check_slots({size: offsets_of(*chunks) for size, chunks in offsets.items()}, 3 * SLOT)


def pool_of(*, unassigned: int = 0, **states: int) -> dict[str, object]:
    counts = dict.fromkeys(("free", "reserved", "committed", "quarantined"), 0) | states
    return {
        "num_extents": 4,
        "num_extents_unassigned": unassigned,
        "num_blocks": counts["committed"],
        "slot_sizes": [{"slot_bytes": SLOT, "num_slots": counts}],
    }


@pytest.mark.parametrize(
    "pool",
    [
        pool_of(committed=7),
        pool_of(committed=9),
        pool_of(committed=8, free=1),
        pool_of(committed=7, quarantined=1),
        pool_of(committed=8, unassigned=1),
    ],
)
def test_a_pool_that_is_not_full_to_the_last_slot_is_found(pool: dict[str, object]) -> None:
    check_full(pool_of(committed=8), {SLOT: 8})
    with pytest.raises(PoolFault):
        check_full(pool, {SLOT: 8})


def test_a_size_without_a_slot_is_named_with_the_remedy() -> None:
    require_sizes({SLOT: 1, 4096: 7}, (SLOT, 4096))
    for num_slots in ({SLOT: 5}, {SLOT: 5, 4096: 0}):
        with pytest.raises(SetupError, match=r"no slot of 4096 bytes .* larger pool"):
            require_sizes(num_slots, (SLOT, 4096))


def test_a_pool_is_free_when_no_extent_serves_anybody() -> None:
    assert is_free(pool_of(unassigned=4))
    assert not is_free(pool_of(unassigned=3))
    assert not is_free(pool_of(unassigned=4, committed=1))
