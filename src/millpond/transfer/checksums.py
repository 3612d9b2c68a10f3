"""The guard of production: a checksum for each page in the arena, compared when it is read.

A page here is what a block has in one layer: the engine's smaller pages are summed together.

    store   copies have ended ─▶ sums of the host's bytes ─▶ finish: committed
    load    copies have ended ─▶ sums of the host's bytes, of some slots ─▶ finish: loaded

Both on the thread that ends copies, where nobody waits for it but who waits for the copy. A
sum is seeded by what its block is called, so that the whole bytes of another block are seen
as well. It tells that a slot's bytes have changed, or arrived, after they were summed (E2, E5,
failing memory, a stray write). It does not tell that a copy took wrong bytes or put them
somewhere wrong on the device (E1, E3, E4): ``millpond gate order`` does.

0 stands for "no sum". A writer that does not sum its slots says so, or the sums of the blocks
that were there before would be taken for theirs.
"""

import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from millpond.arena.arena import Arena
from millpond.model.errors import UnsupportedEngine
from millpond.model.layout import PartLayout, summed_segments

Hash = Callable[[memoryview, int], int]
"""From bytes and a seed to 64 bits; must not hold the interpreter lock over large pages."""

_REQUIREMENT = "xxhash>=4,<5"


class Summed(NamedTuple):
    """A slot of a part in the arena, and what its sums are seeded with; None: it has none."""

    part: int
    offset_bytes: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class Checked:
    """How many slots were compared, and the offsets of those that had other bytes."""

    num_slots: int = 0
    damaged: tuple[int, ...] = ()


def page_hash() -> Hash:
    """Return the checksum of pages; ``UnsupportedEngine`` where its package is not installed."""
    try:
        from xxhash import xxh3_64_intdigest
    except ImportError:
        raise UnsupportedEngine(
            f"checksums need a package that is not here: pip install '{_REQUIREMENT}', "
            "or leave connector.check_ratio at 0"
        ) from None
    return cast("Hash", xxh3_64_intdigest)


class Checksums:
    """The sums of one rank's slices.

    ``check_ratio`` of the loaded slots are compared, chosen by ``chance`` (0 to 1); at 0
    nothing is summed either.
    """

    def __init__(
        self,
        parts: Sequence[PartLayout],
        rank: int,
        check_ratio: float,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._slices = [part.rank_bytes for part in parts]
        self._segments = [summed_segments(part) for part in parts]
        self._rank = rank
        self._check_ratio = check_ratio
        self._chance = chance
        self._hash = page_hash() if check_ratio else None

    @property
    def is_on(self) -> bool:
        """Whether sums are written and compared at all."""
        return self._hash is not None

    def write(self, arena: Arena, slots: Iterable[Summed]) -> None:
        """Sum up slots whose bytes have landed, before anybody is told of them."""
        for slot in slots:
            sums = self._sums(arena, slot)
            if self._hash is None or slot.seed is None:
                sums[:] = memoryview(array("Q", bytes(sums.nbytes)))
            else:
                sums[:] = memoryview(array("Q", self._digests(self._hash, arena, slot, slot.seed)))

    def check(self, arena: Arena, slots: Sequence[Summed]) -> Checked:
        """Compare some of the slots, or all where one of those is damaged.

        The caller holds a lease over them.
        """
        if self._hash is None:
            return Checked()
        some = [slot for slot in slots if self._chance() < self._check_ratio]
        checked = self._compare(self._hash, arena, some)
        if checked.damaged and len(some) < len(slots):
            return self._compare(self._hash, arena, slots)
        return checked

    def _compare(self, hash_page: Hash, arena: Arena, slots: Sequence[Summed]) -> Checked:
        num_slots = 0
        damaged: list[int] = []
        for slot in slots:
            sums = self._sums(arena, slot).tolist()
            if slot.seed is None or not any(sums):
                continue  # its writer sums nothing
            num_slots += 1
            if sums != self._digests(hash_page, arena, slot, slot.seed):
                damaged.append(slot.offset_bytes)
        return Checked(num_slots, tuple(damaged))

    def _sums(self, arena: Arena, slot: Summed) -> "memoryview[int]":
        num_sums = len(self._segments[slot.part])
        return arena.sums(slot.offset_bytes, self._rank * num_sums, num_sums)

    def _digests(self, hash_page: Hash, arena: Arena, slot: Summed, seed: int) -> list[int]:
        num_bytes = self._slices[slot.part]
        whole = arena.view(slot.offset_bytes + self._rank * num_bytes, num_bytes)
        return [
            hash_page(whole[start : start + length], seed) or 1
            for start, length in self._segments[slot.part]
        ]
