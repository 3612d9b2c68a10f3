"""Extents and slots: which byte ranges of the arena exist, and who owns each.

The slot area is cut into equal extents. An extent is unassigned, or serves slots of one size
and kind (a ``SlotTable``); it returns to unassigned as soon as its last slot is free, so that
memory moves between models with different slots, and between pages and states.

There is no object for a slot. Everything about slot 5 of a table is in row 5 of its columns:
a million slots are ten arrays, which cost 50 bytes a slot and which the garbage collector
never walks (a million objects would stop the daemon for half a second at a time).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Final

from millpond.model.errors import InvariantBroken, StaleSlot
from millpond.model.limits import (
    EXTENT_BYTES_MAX,
    EXTENT_BYTES_MIN,
    EXTENTS_PER_ARENA,
    MIB,
    SLOT_ALIGNMENT_BYTES,
)
from millpond.model.names import SlotRef, SlotState
from millpond.pool.policies.base import EvictionPolicy, PolicyFactory
from millpond.pool.policies.order import Order

FREE: Final = 0
RESERVED: Final = 1
COMMITTED: Final = 2
QUARANTINED: Final = 3
STATES: Final = (
    SlotState.FREE,
    SlotState.RESERVED,
    SlotState.COMMITTED,
    SlotState.QUARANTINED,
)
"""``SlotState`` by the byte that stands for it in ``SlotTable.state``."""

NONE: Final = 0
"""Row 0 of every table (slots here, nodes in the index) is nobody's: a link to it is no link."""

_EXTENT_STEP_BYTES: Final = 2 * MIB
"""Extents are whole huge pages."""


def default_extent_bytes(arena_bytes: int) -> int:
    """Return the extent size for a slot area of ``arena_bytes``."""
    wanted = arena_bytes // EXTENTS_PER_ARENA // _EXTENT_STEP_BYTES * _EXTENT_STEP_BYTES
    return min(max(wanted, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX, arena_bytes)


class Extent:
    """One assigned extent: ``number`` in the arena, and its rows in the table it serves."""

    __slots__ = ("first_slot", "free", "number", "table")

    def __init__(self, number: int, table: SlotTable, first_slot: int) -> None:
        self.number = number
        self.table = table
        self.first_slot = first_slot
        # A stack of free rows, lowest on top.
        self.free = array("I", range(first_slot + table.slots_per_extent - 1, first_slot - 1, -1))

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.table.slots_per_extent)

    @property
    def num_used(self) -> int:
        return self.table.slots_per_extent - len(self.free)

    def is_held(self) -> bool:
        """Return whether any lease holds a slot of this extent."""
        holds = self.table.num_holds[self.first_slot : self.slots.stop].tobytes()
        return holds.count(0) != len(holds)


class SlotTable:
    """All slots of one size and kind, as columns; row 0 is unused.

    ``holds_states`` says that they are for the recurrent states of hybrid models, which have
    a budget and therefore share no extent with pages, not even with such of the same size.

    ``num_holds`` counts the leases that may touch the slot, the writer's included. A slot
    becomes FREE only when that is zero: this one rule keeps raw copies of slow, expired or
    dead readers and writers away from memory that somebody else was given.
    ``node`` and ``owner`` (which part of which namespace) say where the index refers to the
    slot; ``node`` is NONE for a slot that has left it.

    ``damaged`` slots have shown other bytes than were written (``damage.py``): they are held
    for good.

    ``is_spare`` marks slots that serve nobody any more (``states.py`` says which). While they
    are evictable they are in ``spares``, which goes before whatever ``policy`` would evict.
    """

    def __init__(
        self, slot_bytes: int, extent_bytes: int, policy: EvictionPolicy, *, holds_states: bool
    ) -> None:
        self.slot_bytes = slot_bytes
        self.slots_per_extent = extent_bytes // slot_bytes
        self.holds_states = holds_states
        self.policy = policy
        self.spares = Order()
        self.is_spare = bytearray(1)
        self.damaged: set[int] = set()
        self.num_used = 0
        self.offset: array[int] = array("Q", [0])
        self.generation: array[int] = array("Q", [0])
        self.state = bytearray(1)
        self.num_holds: array[int] = array("I", [0])
        self.writer: array[int] = array("H", [0])
        self.node: array[int] = array("I", [0])
        self.owner: array[int] = array("H", [0])
        self.last_use_ns: array[int] = array("Q", [0])
        self.extents: list[Extent | None] = []
        """By position of their rows; None where the rows wait for another extent."""
        self.with_room: dict[int, Extent] = {}
        """Extents with a free slot, by number, the longest assigned first: new slots go
        there, so that the others can fall empty."""
        self.num_evictions: Counter[str] = Counter()
        """Slots that were evicted, by why they were chosen."""

    def extent_of(self, slot: int) -> Extent:
        """Return the extent in which ``slot`` lies."""
        extent = self.extents[(slot - 1) // self.slots_per_extent]
        if extent is None:
            raise InvariantBroken(f"slot {slot} of {self.slot_bytes} bytes lies in no extent")
        return extent

    def set_evictable(self, slot: int) -> None:
        """Let ``slot`` be evicted when its turn comes."""
        (self.spares if self.is_spare[slot] else self.policy).add(slot, self.last_use_ns[slot])

    def set_in_use(self, slot: int) -> None:
        """Keep ``slot`` from being evicted."""
        (self.spares if self.is_spare[slot] else self.policy).discard(slot)

    def is_evictable(self, slot: int) -> bool:
        """Return whether ``slot`` may be evicted."""
        return slot in (self.spares if self.is_spare[slot] else self.policy)

    def mark(self, slot: int, *, is_spare: bool) -> None:
        """Say whether ``slot`` is to go before others."""
        if self.is_spare[slot] == is_spare:
            return
        is_evictable = self.is_evictable(slot)
        if is_evictable:
            self.set_in_use(slot)
        self.is_spare[slot] = is_spare
        if is_evictable:
            self.set_evictable(slot)

    def forget(self, slot: int, evicted_key: bytes | None) -> None:
        """Note that no index refers to ``slot`` any more; see ``EvictionPolicy.leave``."""
        if self.is_spare[slot]:
            self.spares.discard(slot)
            self.is_spare[slot] = 0
            evicted_key = None  # nobody is to regret it
        self.policy.leave(slot, evicted_key)
        self.node[slot] = NONE

    def assigned(self) -> Iterator[Extent]:
        """Iterate over the extents that serve this size."""
        return (extent for extent in self.extents if extent is not None)

    def open_extent(self, number: int, extent_bytes: int) -> None:
        """Make the slots of extent ``number`` available here."""
        size = self.slots_per_extent
        if None in self.extents:
            position = self.extents.index(None)
        else:
            position = len(self.extents)
            self.extents.append(None)
            for column in (self.offset, self.generation, self.last_use_ns, self.num_holds):
                column.frombytes(bytes(size * column.itemsize))
            for column in (self.writer, self.node, self.owner):
                column.frombytes(bytes(size * column.itemsize))
            self.state.extend(bytes(size))
            self.is_spare.extend(bytes(size))
        extent = Extent(number, self, 1 + position * size)
        start = number * extent_bytes
        offsets = range(start, start + size * self.slot_bytes, self.slot_bytes)
        self.offset[extent.first_slot : extent.slots.stop] = array("Q", offsets)
        self.extents[position] = extent
        self.with_room[number] = extent

    def close_extent(self, extent: Extent) -> None:
        """Take back an extent whose slots are all free."""
        first, stop, size = extent.slots.start, extent.slots.stop, self.slots_per_extent
        # Generations start over from 0, which no reservation ever has: old references are stale.
        self.generation[first:stop] = array("Q", bytes(size * self.generation.itemsize))
        self.node[first:stop] = array("I", bytes(size * self.node.itemsize))
        self.extents[(first - 1) // size] = None
        self.with_room.pop(extent.number, None)


class Allocator:
    """Hands out free slots and takes them back; it never evicts.

    ``extents[n]`` is None while extent n is unassigned. There are only those whose memory is
    there: ``grow`` adds the next.
    """

    def __init__(
        self, *, epoch: int, arena_bytes: int, extent_bytes: int, make_policy: PolicyFactory
    ) -> None:
        if extent_bytes <= 0 or extent_bytes % SLOT_ALIGNMENT_BYTES or extent_bytes > arena_bytes:
            raise ValueError(
                f"extent_bytes {extent_bytes} must be a multiple of {SLOT_ALIGNMENT_BYTES} "
                f"and at most arena_bytes {arena_bytes}"
            )
        self.epoch = epoch
        self.extent_bytes = extent_bytes
        self.extents: list[Extent | None] = []
        self.unassigned: list[int] = []
        """A stack, the next to be assigned on top."""
        self.tables: list[SlotTable] = []
        self._make_policy = make_policy
        self._last_generation = 0

    def grow(self, usable_bytes: int) -> None:
        """Add the extents that lie before ``usable_bytes`` of the arena and are not there yet."""
        first, stop = len(self.extents), usable_bytes // self.extent_bytes
        self.extents += [None] * (stop - first)
        # Their turn comes last: workers register from the start of the arena on.
        self.unassigned[:0] = range(stop - 1, first - 1, -1)

    def table(self, slot_bytes: int, *, holds_states: bool = False) -> SlotTable:
        """Return the table of slots of this (aligned) size; it may own no extent yet."""
        for table in self.tables:
            if (table.slot_bytes, table.holds_states) == (slot_bytes, holds_states):
                return table
        policy = self._make_policy()
        table = SlotTable(slot_bytes, self.extent_bytes, policy, holds_states=holds_states)
        self.tables.append(table)
        return table

    def take(self, table: SlotTable, num_max: int) -> array[int]:
        """Reserve at most ``num_max`` free slots, each held once (by its writer to be)."""
        taken: array[int] = array("I")
        state, holds, generations = table.state, table.num_holds, table.generation
        while len(taken) < num_max and (table.with_room or self._assign(table)):
            extent = next(iter(table.with_room.values()))
            slots = extent.free[: -1 - (num_max - len(taken)) : -1]
            del extent.free[-len(slots) :]
            if not extent.free:
                del table.with_room[extent.number]
            for slot in slots:
                if state[slot] != FREE or holds[slot]:
                    raise InvariantBroken(
                        f"slot {slot} of {table.slot_bytes} bytes is free and in use"
                    )
                self._last_generation += 1
                generations[slot] = self._last_generation
                state[slot] = RESERVED
                holds[slot] = 1
            taken += slots
        table.num_used += len(taken)
        return taken

    def _assign(self, table: SlotTable) -> bool:
        if not self.unassigned:
            return False
        number = self.unassigned.pop()
        table.open_extent(number, self.extent_bytes)
        self.extents[number] = table.with_room[number]
        return True

    def give(self, table: SlotTable, slot: int) -> None:
        """Make a slot free that no lease holds and no index refers to."""
        if table.num_holds[slot] or table.node[slot] or table.state[slot] == FREE:
            raise InvariantBroken(f"slot {slot} of {table.slot_bytes} bytes freed while in use")
        table.state[slot] = FREE
        table.num_used -= 1
        extent = table.extent_of(slot)
        extent.free.append(slot)
        if len(extent.free) == 1:
            table.with_room[extent.number] = extent
        if len(extent.free) == table.slots_per_extent:
            self._unassign(extent)

    def give_all(self, extent: Extent) -> None:
        """Make all slots of an extent free at once; no lease may hold one, no index keep one."""
        if extent.is_held():
            raise InvariantBroken(f"extent {extent.number} freed while a lease holds a slot")
        extent.table.num_used -= extent.num_used
        extent.table.state[extent.first_slot : extent.slots.stop] = bytes(len(extent.slots))
        self._unassign(extent)

    def _unassign(self, extent: Extent) -> None:
        extent.table.close_extent(extent)
        self.extents[extent.number] = None
        self.unassigned.append(extent.number)

    def slot_at(self, offset_bytes: int) -> SlotRef:
        """Name the slot that starts at ``offset_bytes``; ``StaleSlot`` if none does."""
        number, within = divmod(offset_bytes, self.extent_bytes)
        extent = self.extents[number] if 0 <= number < len(self.extents) else None
        if extent is not None:
            index, rest = divmod(within, extent.table.slot_bytes)
            if not rest and index < extent.table.slots_per_extent:
                generation = extent.table.generation[extent.first_slot + index]
                return SlotRef(self.epoch, number, index, generation)
        raise StaleSlot(f"no slot starts at offset {offset_bytes}")

    def locate(self, ref: SlotRef) -> tuple[SlotTable, int]:
        """Return the table and row of ``ref``; ``StaleSlot`` when it has moved."""
        extent = self.extents[ref.extent] if 0 <= ref.extent < len(self.extents) else None
        if ref.epoch == self.epoch and extent is not None:
            slot = extent.first_slot + ref.index
            if slot in extent.slots and extent.table.generation[slot] == ref.generation:
                return extent.table, slot
        raise StaleSlot(f"{ref} has moved (epoch {self.epoch})")
