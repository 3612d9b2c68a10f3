"""Blocks and their slots together: what may be evicted, and what leaves with what.

A slot is evictable when it is committed, no lease holds it, and nothing depends on it: a LAST
or WINDOW slot may go alone, an EVERY slot only as the end of its prefix (its node has no
children) and only together with everything else of its block. So a prefix never gets a hole,
and a state never outlives the pages it sums up. Evictable is derived and never stored; the
policies only mirror it, and ``refresh`` is what keeps them in step.

WINDOW slots in the middle of a prefix may go alone because only a request that resumes right
there needs them; using a prefix touches just its last window, so the others age out first.

A prefix is as recent as its end: using one touches only its last block, and when that is
evicted (``evicting.py``) its time is handed up to its parent.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from millpond.model.errors import InvariantBroken
from millpond.model.limits import PARTS_MAX
from millpond.pool import states
from millpond.pool.allocator import (
    COMMITTED,
    FREE,
    NONE,
    QUARANTINED,
    RESERVED,
    Allocator,
    SlotTable,
)
from millpond.pool.index import ROOT, Index, Part


class Store:
    """All indexes over one allocator; ``indexes`` by namespace id.

    ``kept`` is the end of a prefix that somebody is adding to and that therefore stays.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.indexes: list[Index] = []
        self.kept: tuple[Index, int] | None = None

    # ------------------------------------------------------------ evictable

    def is_idle(self, index: Index, node: int) -> bool:
        """Return whether nobody reads or writes any slot of ``node``, nor builds on it now."""
        if self.kept == (index, node):
            return False
        for part in index.parts:  # noqa: SIM110 (this is hot, a generator costs twice as much)
            # A slot that is being written is held by its writer; none is in slot NONE's row.
            if part.table.num_holds[index.slots[part.number][node]]:
                return False
        return True

    def is_loose(self, index: Index, node: int) -> bool:
        """Return whether ``node`` could leave now with all its slots."""
        return node != ROOT and not index.child[node] and self.is_idle(index, node)

    def evictable(self, index: Index, node: int) -> Iterator[tuple[Part, int, bool]]:
        """Yield each part and slot of ``node``, and whether the slot may be evicted now."""
        is_loose = self.is_loose(index, node)
        for part in index.parts:
            slot, table = index.slots[part.number][node], part.table
            if slot:
                yield part, slot, is_loose or not (part.is_every or table.num_holds[slot])

    def refresh(self, index: Index, node: int) -> None:
        """Tell the policies what of ``node`` may be evicted; call after each change to it."""
        # As ``evictable`` says, without a generator: this is hot.
        is_loose = self.is_loose(index, node)
        for part in index.parts:
            slot, table = index.slots[part.number][node], part.table
            if not slot:
                continue
            if is_loose or not (part.is_every or table.num_holds[slot]):
                table.set_evictable(slot)
            else:
                table.set_in_use(slot)

    def owner_of(self, table: SlotTable, slot: int) -> tuple[Index, Part]:
        """Return the index and the part that ``slot`` belongs to."""
        namespace_id, number = divmod(table.owner[slot], PARTS_MAX)
        index = self.indexes[namespace_id]
        return index, index.parts[number]

    # ------------------------------------------------------------ slots in and out of the index

    def attach(self, part: Part, index: Index, node: int, slot: int) -> None:
        """Make a reserved slot the one of ``part`` at ``node``."""
        if index.slots[part.number][node]:
            raise InvariantBroken(f"block {index.keys[node].hex()} would get two slots for a part")
        index.slots[part.number][node] = slot
        part.table.node[slot] = node
        part.table.owner[slot] = part.owner

    def commit(self, part: Part, index: Index, slot: int, now_ns: int) -> None:
        """Make a reserved slot readable; the caller releases the writer's hold after it."""
        table = part.table
        if table.state[slot] != RESERVED or not table.node[slot]:
            raise InvariantBroken(f"slot {slot} of {table.slot_bytes} bytes cannot be committed")
        node = table.node[slot]
        table.state[slot] = COMMITTED
        table.last_use_ns[slot] = now_ns
        table.policy.enter(slot, index.keys[node])
        if part.is_every:
            index.note_committed(node)
        elif part.is_last:
            states.state_committed(index, part, node)

    def hold(self, part: Part, index: Index, nodes: list[int], now_ns: int) -> array[int]:
        """Hold the slots of ``part`` at consecutive ``nodes`` once more, and return them.

        The caller refreshes the last node when it has held all parts.
        """
        table = part.table
        slots = array("I", map(index.slots[part.number].__getitem__, nodes))
        holds = table.num_holds
        for slot in slots:
            holds[slot] += 1
        if part.is_every:
            table.last_use_ns[slots[-1]] = now_ns
            table.policy.touch(index.slots_up(part, nodes[-1]), now_ns)
            return slots
        for slot, node in zip(slots, nodes, strict=True):
            table.last_use_ns[slot] = now_ns
            table.policy.touch((slot,), now_ns)
            if part.is_last:
                states.state_read(part, slot)
            self.refresh(index, node)
        return slots

    def release(self, part: Part, index: Index, slots: array[int]) -> None:
        """End one hold on each slot; free those in quarantine that nobody holds any more."""
        table = part.table
        holds, state, node_of, child = table.num_holds, table.state, table.node, index.child
        for slot in slots:
            num_holds = holds[slot]
            if not num_holds:
                raise InvariantBroken(f"slot {slot} of {table.slot_bytes} bytes is held by nobody")
            holds[slot] = num_holds - 1
            if num_holds == 1:
                if state[slot] == QUARANTINED:
                    self.allocator.give(table, slot)
                elif not part.is_every or not child[node_of[slot]]:
                    self.refresh(index, node_of[slot])

    def drop_tail(self, part: Part, index: Index, node: int, *, evicted: bool = False) -> None:
        """Let the LAST or WINDOW slot of ``node`` leave; the block itself may stay."""
        was_spare = part.table.is_spare[index.slots[part.number][node]]
        self._detach(part, index, node, index.keys[node] if evicted else None)
        if part.is_last and not was_spare:
            states.state_left(index, part, index.parent[node])
        if index.every:
            self.refresh(index, node)
        else:
            self.prune(index, node)

    def drop_block(self, index: Index, node: int, *, evicted: bool = False) -> None:
        """Let a block that nothing follows leave the index with all its slots.

        Slots that a lease holds are quarantined, the others are free at once.
        """
        parent = index.parent[node]
        evicted_key = index.keys[node] if evicted else None
        for part in index.parts:
            if index.slots[part.number][node]:
                self._detach(part, index, node, evicted_key)
                if part.is_last:
                    states.state_left(index, part, parent)
        index.remove(node)
        self.refresh(index, parent)

    def drop_subtree(self, index: Index, node: int, *, evicted: bool = False) -> None:
        """Let ``node`` and all that follow it leave the index, as ``drop_block`` does."""
        parent = index.parent[node]
        states_left: set[Part] = set()
        for leaving in reversed(index.subtree(node)):
            evicted_key = index.keys[leaving] if evicted else None
            for part in index.parts:
                if index.slots[part.number][leaving]:
                    self._detach(part, index, leaving, evicted_key)
                    if part.is_last:
                        states_left.add(part)
            index.remove(leaving)
        for part in states_left:
            states.state_left(index, part, parent)
        self.refresh(index, parent)

    def prune(self, index: Index, node: int) -> None:
        """Remove blocks that lead to nothing, from ``node`` upwards.

        Only where no part has coverage EVERY: there, blocks without a slot exist to carry
        the prefix of those that have one.
        """
        while node != ROOT and not index.child[node] and self.kept != (index, node):
            if any(column[node] for column in index.slots):
                return
            parent = index.parent[node]
            index.remove(node)
            node = parent

    def _detach(self, part: Part, index: Index, node: int, evicted_key: bytes | None) -> None:
        table = part.table
        slot = index.slots[part.number][node]
        index.slots[part.number][node] = NONE
        table.forget(slot, evicted_key)
        if table.num_holds[slot]:
            table.state[slot] = QUARANTINED
        else:
            self.allocator.give(table, slot)

    def clear(self) -> int:
        """Let every block leave every index; return how many there were."""
        for table in self.allocator.tables:
            table.policy.clear()
            table.spares.clear()
            table.is_spare = bytearray(len(table.is_spare))
            for extent in list(table.assigned()):
                if not extent.is_held():
                    self.allocator.give_all(extent)
                    continue
                for slot in extent.slots:
                    if table.state[slot] == FREE:
                        continue
                    table.node[slot] = NONE
                    if table.num_holds[slot]:
                        table.state[slot] = QUARANTINED
                    else:
                        self.allocator.give(table, slot)
        num_blocks = sum(len(index.rows) for index in self.indexes)
        for index in self.indexes:
            index.clear()
        return num_blocks
