"""What is written into the pool: every word says where and when it was written, and by whom.

    bits 58 to 62   number of the filling
    bits 56, 57     number of the process
    bits 24 to 55   number of the block, counted by its process in this filling
    bits  0 to 23   number of the word in its slot

So a word that is stale, shifted, or another block's says so by itself.
"""

from dataclasses import dataclass
from typing import Final

import torch

from millpond.model.limits import MIB

SLOT_BYTES_MAX: Final = 128 * MIB
POISON: Final = -1
"""What pages hold before they are loaded: no word of any pattern is negative."""

_WORD_BITS: Final = 24
_BLOCK_BITS: Final = 32
_PROCESS_BITS: Final = 2
_FILLING_BITS: Final = 5
_BLOCK_SHIFT: Final = _WORD_BITS
_PROCESS_SHIFT: Final = _BLOCK_SHIFT + _BLOCK_BITS
_FILLING_SHIFT: Final = _PROCESS_SHIFT + _PROCESS_BITS


@dataclass(frozen=True, slots=True)
class Stamp:
    """Who writes: blocks ``first_block`` and on of one process in one filling."""

    filling: int
    process: int
    first_block: int

    def __post_init__(self) -> None:
        if not 0 <= self.filling < 1 << _FILLING_BITS or not 0 <= self.process < 1 << _PROCESS_BITS:
            raise ValueError(f"filling {self.filling} of process {self.process} is out of range")

    def first_word(self) -> int:
        """Return word 0 of block ``first_block``."""
        return (
            self.filling << _FILLING_SHIFT
            | self.process << _PROCESS_SHIFT
            | self.first_block << _BLOCK_SHIFT
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """The first wrong word: of which block, where in the arena and in its slot, and what it is."""

    stamp: Stamp
    block: int
    slot_offset_bytes: int
    offset_bytes: int
    expected: int
    found: int

    def __str__(self) -> str:
        return (
            f"the slot at offset {self.slot_offset_bytes} differs from byte {self.offset_bytes} "
            f"on: expected {describe_word(self.expected)}, found {describe_word(self.found)}"
        )


def expected_words(stamp: Stamp, num_blocks: int, word_numbers: torch.Tensor) -> torch.Tensor:
    """Return the words of ``num_blocks`` blocks: (layers, blocks, words of a page).

    ``word_numbers`` are the words' numbers in a slot: (layers, 1, words of a page).
    """
    blocks = torch.arange(num_blocks, device=word_numbers.device) << _BLOCK_SHIFT
    return word_numbers + (blocks + stamp.first_word())[None, :, None]


def describe_word(word: int) -> str:
    """Say what a word of the pattern stands for."""
    bits = word & (1 << 64) - 1
    if word == POISON:
        return f"{bits:#018x} (nothing was copied there)"
    filling = bits >> _FILLING_SHIFT
    process = bits >> _PROCESS_SHIFT & (1 << _PROCESS_BITS) - 1
    block = bits >> _BLOCK_SHIFT & (1 << _BLOCK_BITS) - 1
    number = bits & (1 << _WORD_BITS) - 1
    return (
        f"{bits:#018x} (filling {filling}, process {process}, block {block}, "
        f"byte {8 * number} of the slot)"
    )
