"""Words say where they belong: each kind of damage is told from the others, wherever it is."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from millpond.gate.patterns import WORD_BYTES, Comparison, Epoch, Rows, Wrong, compare, pattern

NUM_WORDS = 32
PAGE = NUM_WORDS * WORD_BYTES
BLOCKS = (3, 1, 70_000, 4)

rows = st.integers(0, len(BLOCKS) - 1)
words = st.integers(0, NUM_WORDS - 1)
epochs = st.sampled_from(list(Epoch))
copied = st.sampled_from([epoch for epoch in Epoch if epoch is not Epoch.CANARY])


def as_words(pages: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return pages.view(np.uint64)


def found_at(
    pages: NDArray[np.uint8], epoch: Epoch, blocks: Sequence[int] = BLOCKS
) -> dict[tuple[int, int], Wrong]:
    """Return what is wrong by row and word."""
    kinds = compare(pages, Rows(tuple(blocks), epoch)).kinds
    return {
        (int(r), int(w)): Wrong(int(kinds[r, w])) for r, w in zip(*np.nonzero(kinds), strict=True)
    }


@given(epochs)
def test_what_was_written_is_right_and_all_of_it_was_compared(epoch: Epoch) -> None:
    comparison = compare(pattern(BLOCKS, PAGE, epoch), Rows(BLOCKS, epoch))
    assert comparison.is_right
    assert comparison.num_bytes == len(BLOCKS) * PAGE
    assert comparison.counts() == {}


@given(copied, copied, rows, words)
def test_a_word_of_another_epoch_is_stale(right: Epoch, other: Epoch, row: int, word: int) -> None:
    pages = pattern(BLOCKS, PAGE, right)
    as_words(pages)[row, word] = as_words(pattern(BLOCKS, PAGE, other))[row, word]
    expected = {} if right is other else {(row, word): Wrong.STALE}
    assert found_at(pages, right) == expected


@given(copied, copied, rows, words, words)
def test_a_word_of_another_offset_is_shifted(
    right: Epoch, other: Epoch, row: int, word: int, origin: int
) -> None:
    pages = pattern(BLOCKS, PAGE, right)
    as_words(pages)[row, word] = as_words(pattern(BLOCKS, PAGE, other))[row, origin]
    if word != origin:
        assert found_at(pages, right) == {(row, word): Wrong.SHIFTED}


@given(copied, copied, rows, rows, words, words)
def test_a_word_of_another_block_is_swapped(  # one argument a coordinate
    right: Epoch, other: Epoch, row: int, origin: int, word: int, origin_word: int
) -> None:
    pages = pattern(BLOCKS, PAGE, right)
    as_words(pages)[row, word] = as_words(pattern(BLOCKS, PAGE, other))[origin, origin_word]
    if row != origin:
        assert found_at(pages, right) == {(row, word): Wrong.SWAPPED}


@given(rows, words, st.integers(1, WORD_BYTES - 1))
def test_a_word_of_two_epochs_is_torn(row: int, word: int, cut: int) -> None:
    pages, old = pattern(BLOCKS, PAGE, Epoch.NEW), pattern(BLOCKS, PAGE, Epoch.OLD)
    start = word * WORD_BYTES
    pages[row, start : start + cut] = old[row, start : start + cut]
    assert found_at(pages, Epoch.NEW) == {(row, word): Wrong.TORN}


@given(rows, words, st.integers(0, 2**64 - 1))
def test_anything_over_a_canary_is_an_overwrite(row: int, word: int, value: int) -> None:
    pages = pattern(BLOCKS, PAGE, Epoch.CANARY)
    before = int(as_words(pages)[row, word])
    as_words(pages)[row, word] = value
    expected = {} if value == before else {(row, word): Wrong.OVERWRITTEN}
    assert found_at(pages, Epoch.CANARY) == expected


@given(rows, words, st.sampled_from([0, 2**64 - 1, 0x5555_5555_5555_5555, 0x1234]))
def test_what_nobody_wrote_is_unknown(row: int, word: int, value: int) -> None:
    pages = pattern(BLOCKS, PAGE, Epoch.NEW)
    as_words(pages)[row, word] = value
    assert found_at(pages, Epoch.NEW) == {(row, word): Wrong.UNKNOWN}


def test_bytes_of_two_epochs_differ_nearly_everywhere() -> None:
    pages = [pattern(BLOCKS, PAGE, epoch) for epoch in Epoch]
    for i, one in enumerate(pages):
        for other in pages[i + 1 :]:
            assert (one != other).mean() > 0.95


def test_words_of_all_blocks_epochs_and_offsets_differ() -> None:
    pages = np.concatenate([pattern(BLOCKS, PAGE, epoch) for epoch in Epoch])
    assert len(np.unique(as_words(pages))) == len(Epoch) * len(BLOCKS) * NUM_WORDS


@pytest.mark.parametrize("page_bytes", [0, 12, -8, 8 * (2**24 + 1)])
def test_pages_that_are_no_words_are_misuse(page_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"pages of {page_bytes} bytes"):
        pattern(BLOCKS, page_bytes, Epoch.NEW)


def test_a_block_that_no_word_can_name_is_misuse() -> None:
    with pytest.raises(ValueError, match="block 1048576"):
        pattern([2**20], PAGE, Epoch.NEW)


def test_a_page_too_few_is_misuse() -> None:
    with pytest.raises(ValueError, match="3 pages for 4 blocks"):
        compare(pattern(BLOCKS[:3], PAGE, Epoch.NEW), Rows(BLOCKS, Epoch.NEW))


def test_comparisons_are_joined_and_described() -> None:
    right = compare(pattern([1], PAGE, Epoch.NEW), Rows((1,), Epoch.NEW))
    wrong = compare(pattern([2], PAGE, Epoch.OLD), Rows((2,), Epoch.NEW))
    both = Comparison.concatenate([right, wrong])
    assert both.blocks == (1, 2)
    assert not both.is_right
    assert both.describe() == "of 64 words 32 stale"
    assert right.describe() == "all 32 words right"
