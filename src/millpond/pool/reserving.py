"""What a reservation gets: which blocks and parts are missing, and slots for them.

A block that anybody has written or is writing is not written again. Pages (EVERY parts) are
granted without a gap from the first missing block until no slot can be had; states and
windows wherever their block is there or is being granted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from millpond.model.leases import NO_SLOT
from millpond.pool.index import Index, Part
from millpond.pool.store import Store


@dataclass(frozen=True, slots=True)
class Wish:
    """What the writer can supply: see ``Pool.reserve``. ``ValueError`` for nonsense."""

    index: Index
    keys: bytes
    key_bytes: int
    num_keys: int
    first_block: int
    parts: tuple[Sequence[int], ...]

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


@dataclass(frozen=True, slots=True)
class Grant:
    """Reserved slots by part, and their offsets by part and block from ``first_block`` on."""

    first_block: int
    slots: tuple[array[int], ...]
    offsets: tuple[array[int], ...]


class _Taken:
    """Slots taken for one reservation, by part and block; not in the index yet."""

    def __init__(self, store: Store, index: Index, now_ns: int) -> None:
        self.by_part: tuple[dict[int, int], ...] = tuple({} for _ in index.parts)
        self._store = store
        self._now_ns = now_ns

    def take(self, part: Part, block: int) -> bool:
        slot = self._store.obtain(part.table, self._now_ns)
        if slot is None:
            return False
        self.by_part[part.number][block] = slot
        return True

    def give_back(self, part: Part, block: int) -> None:
        slot = self.by_part[part.number].pop(block, None)
        if slot is not None:
            part.table.num_holds[slot] = 0
            self._store.allocator.give(part.table, slot)

    def blocks(self) -> set[int]:
        return {block for slots in self.by_part for block in slots}


@dataclass(frozen=True, slots=True)
class _Chain:
    """Where the wish meets the tree.

    ``present`` has the nodes of the blocks ``first_present`` to ``num_present - 1``, as far
    back as a state or window is to be added; ``last_node`` is that of the last present block.
    ``new_keys`` are those of the missing blocks.
    """

    num_present: int
    last_node: int
    first_present: int
    present: list[int]
    new_keys: list[bytes]


def grant_slots(store: Store, wish: Wish, now_ns: int) -> Grant | str:
    """Reserve slots for what ``wish`` can supply; a word says why where there are none."""
    index = wish.index
    num_present, last_node = index.longest_present(wish.keys, wish.key_bytes)
    if index.every and num_present < wish.first_block:
        return "hole"
    chain = _checked_chain(wish, num_present, last_node)
    taken = _Taken(store, index, now_ns)
    # Nothing is put into the index before all slots are taken: until then only the prefix
    # that is there already has to be kept from eviction.
    store.begin_reserving(index, last_node)
    try:
        is_wanting = _take_every(taken, wish, num_present)
        is_wanting = _take_tails(taken, wish, chain) or is_wanting
        blocks = taken.blocks()
        _attach(store, wish, taken, chain)
    finally:
        store.end_reserving()
    if not blocks:
        return "full" if is_wanting else "present"
    first, stop = min(blocks), max(blocks) + 1
    offsets = tuple(
        _offsets(part, row, range(first, stop))
        for part, row in zip(index.parts, taken.by_part, strict=True)
    )
    return Grant(first, tuple(array("I", row.values()) for row in taken.by_part), offsets)


def _checked_chain(wish: Wish, num_present: int, last_node: int) -> _Chain:
    """Return the chain; ``ValueError`` unless the tree and the keys agree on it.

    The keys come from a client. If they are not one chain, slots would be put where nothing
    keeps them, or a block would be found under two prefixes.
    """
    index = wish.index
    new_keys = [wish.key(block) for block in range(num_present, wish.num_keys)]
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


def _take_every(taken: _Taken, wish: Wish, num_present: int) -> bool:
    """Take the EVERY slots of the missing blocks; return whether some could not be had."""
    every = wish.index.every
    if not every:
        return False
    for block in range(num_present, wish.num_keys):
        if not all(taken.take(part, block) for part in every):
            for part in every:
                taken.give_back(part, block)
            return True
    return False


def _take_tails(taken: _Taken, wish: Wish, chain: _Chain) -> bool:
    """Take LAST and WINDOW slots where they are missing; return whether some were wanted."""
    index = wish.index
    stop = wish.num_keys
    if index.every:
        stop = chain.num_present + len(taken.by_part[index.every[0].number])
    is_wanting = False
    for part in index.tails:
        # The deepest first: if slots run out, it is the longest prefix that stays resumable.
        for block in sorted(set(wish.parts[part.number]), reverse=True):
            if block >= stop:
                continue
            if block < chain.num_present:
                node = chain.present[block - chain.first_present]
                if index.slots[part.number][node]:
                    continue
            is_wanting = True
            if not taken.take(part, block):
                break
    return is_wanting


def _attach(store: Store, wish: Wish, taken: _Taken, chain: _Chain) -> None:
    """Put the taken slots into the index, with the blocks that are new."""
    index = wish.index
    nodes = dict(enumerate(chain.present, chain.first_present))
    node = chain.last_node
    for block in range(chain.num_present, max(taken.blocks(), default=-1) + 1):
        node = nodes[block] = index.add(chain.new_keys[block - chain.num_present], node)
    for part, row in zip(index.parts, taken.by_part, strict=True):
        for block, slot in row.items():
            store.attach(part, index, nodes[block], slot)
            if block < chain.num_present:
                store.refresh(index, nodes[block])


def _offsets(part: Part, row: dict[int, int], blocks: range) -> array[int]:
    offset = part.table.offset
    return array("Q", [offset[row[block]] if block in row else NO_SLOT for block in blocks])
