"""Leases: the right to touch slots, as values.

A ``WriteLease`` is reserved, then committed or aborted; a ``ReadLease`` is pinned, then
released. Each rank that copies says so by itself: a lease ends when all of them have.
Offsets are in bytes from the start of the arena's slots (the header excluded). They come as
u64 arrays, which is how they travel: nothing loops over a thousand blocks to repack them.
"""

from array import array
from dataclasses import dataclass
from typing import Final

from millpond.model.names import Outcome

NO_SLOT: Final = 2**64 - 1
"""In an array of offsets: this part of this block has no slot here."""


@dataclass(frozen=True, slots=True)
class WriteLease:
    """Slots to fill: blocks ``first_block`` and on, one array of offsets a part.

    ``offsets[p][i]`` is the slot of part p for block ``first_block + i``, or NO_SLOT where
    that part was not asked for, is present already, or got no room. ``lease_id`` is None when
    nothing is to be written: ``reason`` is ``off``, ``present``, ``hole``, ``full``, ``limit``.
    """

    lease_id: int | None
    first_block: int
    offsets: "tuple[array[int], ...]" = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Slots to read so that a request resumes after ``num_blocks`` blocks of its prefix.

    ``offsets[p]`` is (block, offset, block, offset, ...) for part p, in block order: for
    EVERY the blocks from the ``first_block`` that was asked for, for WINDOW the last
    ``window_blocks``, for LAST the last one. ``writers`` counts blocks by the replica that
    wrote their first part. ``lease_id`` is None when nothing is to be read: ``reason`` is
    ``off``, ``miss`` or ``limit``.
    """

    lease_id: int | None
    num_blocks: int
    outcome: Outcome
    offsets: "tuple[array[int], ...]" = ()
    writers: tuple[tuple[str, int], ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The longest usable prefix in blocks, and what stands after it."""

    num_blocks: int
    outcome: Outcome
