"""What the gate writes and what it makes of what it finds: every word says where it belongs.

    word = mix(epoch | offset << 8 | block << 32)

``mix`` is a multiplication by an odd number, which can be undone and spreads the epoch over
all bytes above the lowest: bytes of two epochs differ nearly everywhere, so that a torn word
is seen as one. ``offset`` counts words in a page.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

WORD_BYTES: Final = 8
BLOCKS_MAX: Final = 2**20
"""Numbers of blocks are smaller, so that most words of nobody are known as such."""
OFFSETS_MAX: Final = 2**24
"""Words of the largest page: 128 MiB."""

_MIX: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_UNMIX: Final = np.uint64(pow(int(_MIX), -1, 2**64))
_OFFSET_SHIFT: Final = np.uint64(8)
_BLOCK_SHIFT: Final = np.uint64(32)
_EPOCH_MASK: Final = np.uint64(0xFF)
_OFFSET_MASK: Final = np.uint64(OFFSETS_MAX - 1)


class Epoch(enum.IntEnum):
    """When, or by whom, a word was written; its values fit a byte, and none is nothing."""

    EMPTY = 0x11
    """What the target held before the test."""
    OLD = 0x22
    """What the source held before the late producer wrote, or the target's reader wants."""
    NEW = 0x33
    """What is to be copied."""
    CANARY = 0x44
    """What nobody may touch."""
    RECYCLED = 0x55
    """What memory holds once it has been given up and used again."""
    SECOND = 0x66
    """What another session writes into the slots that it was given."""


class Wrong(enum.IntEnum):
    """What is wrong with a word, by what was found in its place."""

    STALE = 1
    """The right place, another epoch: a copy too early, too late, or not at all."""
    SHIFTED = 2
    """Another offset of the same block."""
    SWAPPED = 3
    """Another block."""
    TORN = 4
    """Some bytes of one epoch and some of another."""
    OVERWRITTEN = 5
    """A canary is gone."""
    UNKNOWN = 6
    """Nothing that the gate has written."""


def pattern(blocks: Iterable[int], page_bytes: int, epoch: Epoch) -> NDArray[np.uint8]:
    """Return a page for each block, one a row, as bytes.

    ``ValueError`` unless a page is whole words, and for blocks from ``BLOCKS_MAX`` on.
    """
    if page_bytes % WORD_BYTES or not 0 < page_bytes // WORD_BYTES <= OFFSETS_MAX:
        raise ValueError(f"pages of {page_bytes} bytes: not whole words, or too many")
    numbers = np.fromiter(blocks, np.uint64)
    if len(numbers) and numbers.max() >= BLOCKS_MAX:
        raise ValueError(f"block {numbers.max()} is not below {BLOCKS_MAX}")
    return _words(numbers, page_bytes // WORD_BYTES, epoch).view(np.uint8)


def _words(blocks: NDArray[np.uint64], num_words: int, epoch: Epoch) -> NDArray[np.uint64]:
    offsets = np.arange(num_words, dtype=np.uint64) << _OFFSET_SHIFT
    raw = (blocks[:, None] << _BLOCK_SHIFT) | offsets[None, :] | np.uint64(epoch)
    return raw * _MIX


@dataclass(frozen=True, slots=True)
class Rows:
    """What some pages must hold: row i is of block ``blocks[i]``, all of one epoch."""

    blocks: tuple[int, ...]
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every word of some pages: ``kinds[i, w]`` is 0 where right, else a ``Wrong``.

    ``blocks`` labels the rows.
    """

    blocks: tuple[int, ...]
    kinds: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Bytes that were compared."""
        return self.kinds.size * WORD_BYTES

    @property
    def is_right(self) -> bool:
        """Whether every word is the expected one, and there was at least one."""
        return self.kinds.size > 0 and not self.kinds.any()

    def counts(self) -> dict[Wrong, int]:
        """Return how many words are wrong, by kind."""
        values, counts = np.unique(self.kinds[self.kinds != 0], return_counts=True)
        return {Wrong(int(v)): int(n) for v, n in zip(values, counts, strict=True)}

    def describe(self) -> str:
        """Say in a few words what is wrong."""
        total = self.kinds.size
        found = [f"{count} {kind.name.lower()}" for kind, count in self.counts().items()]
        return f"of {total} words {', '.join(found)}" if found else f"all {total} words right"

    @staticmethod
    def concatenate(parts: Sequence["Comparison"]) -> "Comparison":
        """Return comparisons of pages of one length as one."""
        blocks = tuple(block for part in parts for block in part.blocks)
        return Comparison(blocks, np.concatenate([part.kinds for part in parts]))


def compare(found: NDArray[np.uint8], expected: Rows) -> Comparison:
    """Compare every word of ``found`` (pages, one a row) and classify the wrong ones."""
    words = np.ascontiguousarray(found).view(np.uint64)
    blocks = np.asarray(expected.blocks, np.uint64)
    if len(words) != len(blocks):
        raise ValueError(f"{len(words)} pages for {len(blocks)} blocks")
    right = _words(blocks, words.shape[1], expected.epoch)
    kinds = np.zeros(words.shape, np.uint8)
    rows, offsets = np.nonzero(words != right)
    if len(rows):
        place = _Place(blocks[rows], offsets.astype(np.uint64))
        kinds[rows, offsets] = _classify(words[rows, offsets], place, expected.epoch)
    return Comparison(expected.blocks, kinds)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where each of some words was found."""

    blocks: NDArray[np.uint64]
    offsets: NDArray[np.uint64]


def _classify(found: NDArray[np.uint64], place: _Place, epoch: Epoch) -> NDArray[np.uint8]:
    if epoch is Epoch.CANARY:
        return np.full(len(found), Wrong.OVERWRITTEN, np.uint8)
    raw = found * _UNMIX
    is_known = np.isin(raw & _EPOCH_MASK, np.asarray(list(Epoch), np.uint64))
    offsets, blocks = raw >> _OFFSET_SHIFT & _OFFSET_MASK, raw >> _BLOCK_SHIFT
    is_same_block, is_same_offset = blocks == place.blocks, offsets == place.offsets
    # A word of nobody decodes to something as well: to a block that cannot be, most likely.
    is_known &= blocks < np.uint64(BLOCKS_MAX)
    kinds = np.full(len(found), Wrong.UNKNOWN, np.uint8)
    kinds[_is_torn(found, place)] = Wrong.TORN
    kinds[is_known & ~is_same_block] = Wrong.SWAPPED
    kinds[is_known & is_same_block & ~is_same_offset] = Wrong.SHIFTED
    kinds[is_known & is_same_block & is_same_offset] = Wrong.STALE
    return kinds


def _is_torn(found: NDArray[np.uint64], place: _Place) -> NDArray[np.bool_]:
    """Say which words have each byte from some epoch's word for their place."""
    here = place.blocks << _BLOCK_SHIFT | place.offsets << _OFFSET_SHIFT
    found_bytes = found.view(np.uint8).reshape(-1, WORD_BYTES)
    is_of_some = np.zeros(found_bytes.shape, np.bool_)
    for epoch in Epoch:
        whole = ((here | np.uint64(epoch)) * _MIX).view(np.uint8).reshape(-1, WORD_BYTES)
        is_of_some |= found_bytes == whole
    return np.logical_and.reduce(is_of_some, axis=1)
