"""What a reservation gets: which blocks and parts are missing, and slots for them.

A block that anybody has written or is writing is not written again. Pages (EVERY parts) are
granted without a gap from the first missing block until the admission policy, the limit of one
request or the room ends; states and windows wherever their block is there or is being granted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from millpond.model.leases import NO_SLOT
from millpond.model.limits import BLOCKS_PER_RESERVE_MAX
from millpond.pool.evicting import Evictor
from millpond.pool.index import Index, Part
from millpond.pool.policies.base import AdmissionPolicy

_U64_MASK: Final = 2**64 - 1
_NAMESPACE_STRIDE: Final = 0x9E37_79B9_7F4A_7C15


@dataclass(frozen=True, slots=True)
class Wish:
    """What the writer can supply: see ``Pool.reserve``. ``ValueError`` for nonsense.

    ``request`` is a number that tells the writer's requests apart.
    """

    index: Index
    keys: bytes
    key_bytes: int
    num_keys: int
    first_block: int
    parts: tuple[Sequence[int], ...]
    request: int

    def __post_init__(self) -> None:
        if not 0 <= self.first_block <= self.num_keys:
            raise ValueError(f"first_block {self.first_block} of {self.num_keys} blocks")
        if len(self.parts) != len(self.index.parts):
            raise ValueError(f"{len(self.parts)} lists of blocks for {len(self.index.parts)} parts")
        for part, blocks in zip(self.index.parts, self.parts, strict=True):
            if part.is_every and blocks:
                raise ValueError(f"part {part.number} covers every block, yet lists some")
            if blocks and (min(blocks) < 0 or max(blocks) >= self.num_keys):
                raise ValueError(f"part {part.number} lists a block beyond {self.num_keys}")

    def key(self, block: int) -> bytes:
        """Return the key of one block."""
        return self.keys[block * self.key_bytes : (block + 1) * self.key_bytes]

    def short_keys(self, first_block: int, num_blocks: int) -> array[int]:
        """Return 64 bits of the keys of some blocks, different for each namespace."""
        start = first_block * self.key_bytes
        words = array("Q", self.keys[start : start + num_blocks * self.key_bytes])
        firsts = words[:: self.key_bytes // words.itemsize]
        owner = self.index.parts[0].owner
        if not owner:
            return firsts
        salt = owner * _NAMESPACE_STRIDE & _U64_MASK
        return array("Q", (key ^ salt for key in firsts))


@dataclass(slots=True)
class Refused:
    """What of a wish was not granted: blocks by why, and states and windows for want of room."""

    not_admitted: int = 0
    beyond_limit: int = 0
    no_room: int = 0
    tails: int = 0

    def reason(self) -> str:
        """Return why there is nothing to write, where nothing was granted."""
        if self.no_room or self.tails:
            return "full"
        return "not-admitted" if self.not_admitted else "present"


@dataclass(frozen=True, slots=True)
class Grant:
    """Reserved slots by part, and their offsets by part and block from ``first_block`` on.

    ``reason`` is empty, or says why nothing was granted.
    """

    reason: str
    refused: Refused
    first_block: int = 0
    slots: tuple[array[int], ...] = ()
    offsets: tuple[array[int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where the wish meets the tree.

    ``present`` has the nodes of the blocks ``first_present`` to ``num_present - 1``, as far
    back as a state or window is to be added; ``last_node`` is that of the last present block.
    ``new_keys`` are those of the missing blocks that may be stored now.
    """

    num_present: int
    last_node: int
    first_present: int
    present: list[int]
    new_keys: list[bytes]


def grant_slots(evictor: Evictor, admission: AdmissionPolicy, wish: Wish, now_ns: int) -> Grant:
    """Reserve slots for what ``wish`` can supply and ``admission`` lets in."""
    index, refused = wish.index, Refused()
    num_present, last_node = index.longest_present(wish.keys, wish.key_bytes)
    if index.every and num_present < wish.first_block:
        return Grant("hole", refused)
    chain = _checked_chain(
        wish, num_present, last_node, _num_storable(admission, wish, num_present, refused)
    )
    reservation = _Reservation(evictor, wish, chain, now_ns)
    # Nothing is put into the index before all slots are taken: until then only the prefix
    # that is there already has to be kept from eviction.
    evictor.begin(index, last_node)
    try:
        stop = num_present + reservation.take_every()
        refused.no_room = num_present + len(chain.new_keys) - stop
        refused.tails = sum(reservation.take_tail(part, stop) for part in index.tails)
        reservation.attach()
    finally:
        evictor.end()
    return reservation.grant(refused)


def _num_storable(
    admission: AdmissionPolicy, wish: Wish, num_present: int, refused: Refused
) -> int:
    """Return how many of the missing blocks may be stored now."""
    num_missing = wish.num_keys - num_present
    # Blocks without pages are cheap, and a state far down could not be stored in pieces.
    num_offered = min(num_missing, BLOCKS_PER_RESERVE_MAX) if wish.index.every else num_missing
    refused.beyond_limit = num_missing - num_offered
    if not num_offered:
        return 0
    num_admitted = admission.admit(wish.short_keys(num_present, num_offered), wish.request)
    refused.not_admitted = num_offered - num_admitted
    return num_admitted


def _checked_chain(wish: Wish, num_present: int, last_node: int, num_new: int) -> _Chain:
    """Return the chain; ``ValueError`` unless the tree and the keys agree on it.

    The keys come from a client. If they are not one chain, slots would be put where nothing
    keeps them, or a block would be found under two prefixes.
    """
    index = wish.index
    new_keys = [wish.key(block) for block in range(num_present, num_present + num_new)]
    is_chain = len(set(new_keys)) == len(new_keys) and index.rows.keys().isdisjoint(new_keys)
    tail_blocks = {b for blocks in wish.parts for b in blocks if b < num_present}
    first_present = min(tail_blocks, default=num_present)
    present = index.path(last_node, num_present - first_present)
    is_chain = is_chain and all(
        index.keys[present[block - first_present]] == wish.key(block) for block in tail_blocks
    )
    if not is_chain:
        raise ValueError("the keys are not one chain from block 0")
    return _Chain(num_present, last_node, first_present, present, new_keys)


class _Reservation:
    """Slots taken for one wish, by part and block; not in the index before ``attach``."""

    def __init__(self, evictor: Evictor, wish: Wish, chain: _Chain, now_ns: int) -> None:
        self._evictor = evictor
        self._wish = wish
        self._index = wish.index
        self._chain = chain
        self._now_ns = now_ns
        self._rows: tuple[dict[int, int], ...] = tuple({} for _ in wish.index.parts)

    def take_every(self) -> int:
        """Take slots for the pages of the new blocks; return how many blocks got all of theirs."""
        num_blocks = len(self._chain.new_keys)
        if not self._index.every:
            return num_blocks
        taken: list[tuple[Part, array[int]]] = []
        for part in self._index.every:
            slots = self._evictor.obtain(part.table, num_blocks, self._now_ns)
            num_blocks = len(slots)
            taken.append((part, slots))
        for part, slots in taken:
            for slot in slots[num_blocks:]:
                part.table.num_holds[slot] = 0
                self._evictor.store.allocator.give(part.table, slot)
            self._rows[part.number].update(enumerate(slots[:num_blocks], self._chain.num_present))
        return num_blocks

    def take_tail(self, part: Part, stop: int) -> int:
        """Take slots of a LAST or WINDOW part before block ``stop``; return how many lack one."""
        # The deepest first: if slots run out, it is the longest prefix that stays resumable.
        blocks = sorted(set(self._wish.parts[part.number]), reverse=True)
        missing = [block for block in blocks if block < stop and not self._has(part, block)]
        row = self._rows[part.number]
        for block in missing[:BLOCKS_PER_RESERVE_MAX]:
            slot = self._obtain(part, is_deepest=not row)
            if slot is None:
                break
            row[block] = slot
        return len(missing) - len(row)

    def _has(self, part: Part, block: int) -> bool:
        chain = self._chain
        if block >= chain.num_present:
            return False
        return bool(self._index.slots[part.number][chain.present[block - chain.first_present]])

    def _obtain(self, part: Part, *, is_deepest: bool) -> int | None:
        if part.table.holds_states:
            return self._evictor.obtain_state(part.table, self._now_ns, is_deepest=is_deepest)
        slots = self._evictor.obtain(part.table, 1, self._now_ns)
        return slots[0] if slots else None

    def attach(self) -> None:
        """Put the slots into the index, with the blocks that are new."""
        index, chain, store = self._index, self._chain, self._evictor.store
        stop = max((block for row in self._rows for block in row), default=-1) + 1
        num_new = max(0, stop - chain.num_present)
        nodes = chain.present + index.add(chain.new_keys[:num_new], chain.last_node)
        for part, row in zip(index.parts, self._rows, strict=True):
            for block, slot in row.items():
                node = nodes[block - chain.first_present]
                store.attach(part, index, node, slot)
                if block < chain.num_present:
                    store.refresh(index, node)

    def grant(self, refused: Refused) -> Grant:
        """Return what was taken, or why it is nothing."""
        blocks = {block for row in self._rows for block in row}
        if not blocks:
            return Grant(refused.reason(), refused)
        first, stop = min(blocks), max(blocks) + 1
        offsets = tuple(
            _offsets(part, row, range(first, stop))
            for part, row in zip(self._index.parts, self._rows, strict=True)
        )
        slots = tuple(array("I", row.values()) for row in self._rows)
        return Grant("", refused, first, slots, offsets)


def _offsets(part: Part, row: dict[int, int], blocks: range) -> array[int]:
    offset = part.table.offset
    return array("Q", [offset[row[block]] if block in row else NO_SLOT for block in blocks])
