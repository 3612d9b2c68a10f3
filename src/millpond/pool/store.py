"""Blocks and their slots together: what may be evicted, what is, and what leaves when.

A slot is evictable when it is committed, no lease holds it, and nothing depends on it: a LAST
or WINDOW slot may go alone, an EVERY slot only as the end of its prefix (its node has no
children) and only together with everything else of its block. So a prefix never gets a hole,
and a state never outlives the pages it sums up. Evictable is derived and never stored; the
policies only mirror it, and ``refresh`` is what keeps them in step.

WINDOW slots in the middle of a prefix may go alone because only a request that resumes right
there needs them; using a prefix touches just its last window, so the others age out first.

A prefix is as recent as its end: using one touches only its last block, and when that is
evicted its time is handed up to its parent.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from millpond.model.errors import InvariantBroken
from millpond.model.limits import PARTS_MAX
from millpond.pool.allocator import (
    COMMITTED,
    FREE,
    NONE,
    QUARANTINED,
    RESERVED,
    Allocator,
    Extent,
    SlotTable,
)
from millpond.pool.index import ROOT, Index, Part

_RECLAIM_STEPS_MAX = 16_384
"""Blocks that one request may look at, and evict, to free extents of another slot size: to
evict as many takes about 0.15 s, and an engine waits 0.25 s for its reply."""
_AGE_RATIO = 2
"""Another size gives up an extent only for an entry more than this many times as old."""


class Store:
    """All indexes over one allocator; ``indexes`` by namespace id."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.indexes: list[Index] = []
        self._kept: tuple[Index, int] | None = None
        self._reclaim_steps_left = 0
        self._extents_tried: set[int] = set()
        self._sweep_start = 0
        self.num_extents_reclaimed = 0

    # ------------------------------------------------------------ evictable

    def is_idle(self, index: Index, node: int) -> bool:
        """Return whether nobody reads or writes any slot of ``node``, nor builds on it now."""
        if self._kept == (index, node):
            return False
        # A slot that is being written is held by its writer; none is in slot NONE's row.
        return not any(p.table.num_holds[index.slots[p.number][node]] for p in index.parts)

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
        for part, slot, is_evictable in self.evictable(index, node):
            policy = part.table.policy
            if is_evictable:
                policy.add(slot, part.table.last_use_ns[slot])
            else:
                policy.discard(slot)

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
        table.state[slot] = COMMITTED
        table.last_use_ns[slot] = now_ns
        if part.is_every:
            index.note_committed(table.node[slot])

    def hold(self, part: Part, index: Index, nodes: list[int], now_ns: int) -> array[int]:
        """Hold the slots of ``part`` at consecutive ``nodes`` once more, and return them.

        The caller refreshes the last node when it has held all parts.
        """
        table = part.table
        slots = array("I", map(index.slots[part.number].__getitem__, nodes))
        holds = table.num_holds
        for slot in slots:
            holds[slot] += 1
        for slot in slots[-1:] if part.is_every else slots:
            table.last_use_ns[slot] = now_ns
            table.policy.touch(slot, now_ns)
        if not part.is_every:
            for node in nodes:
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

    def drop_tail(self, part: Part, index: Index, node: int) -> None:
        """Let the LAST or WINDOW slot of ``node`` leave; the block itself may stay."""
        self._detach(part, index, node)
        if index.every:
            self.refresh(index, node)
        else:
            self.prune(index, node)

    def drop_subtree(self, index: Index, node: int) -> int:
        """Let ``node`` and all that follow it leave the index; return how many blocks left.

        Slots that a lease holds are quarantined, the others are free at once.
        """
        parent = index.parent[node]
        nodes = index.subtree(node)
        for leaving in reversed(nodes):
            for part in index.parts:
                if index.slots[part.number][leaving]:
                    self._detach(part, index, leaving)
            index.remove(leaving)
        self.refresh(index, parent)
        return len(nodes)

    def prune(self, index: Index, node: int) -> None:
        """Remove blocks that lead to nothing, from ``node`` upwards.

        Only where no part has coverage EVERY: there, blocks without a slot exist to carry
        the prefix of those that have one.
        """
        while node != ROOT and not index.child[node] and self._kept != (index, node):
            if any(column[node] for column in index.slots):
                return
            parent = index.parent[node]
            index.remove(node)
            node = parent

    def _detach(self, part: Part, index: Index, node: int) -> None:
        table = part.table
        slot = index.slots[part.number][node]
        index.slots[part.number][node] = NONE
        table.node[slot] = NONE
        table.policy.discard(slot)
        if table.num_holds[slot]:
            table.state[slot] = QUARANTINED
        else:
            self.allocator.give(table, slot)

    def clear(self) -> int:
        """Let every block leave every index; return how many there were."""
        for table in self.allocator.tables.values():
            table.policy.clear()
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

    # ------------------------------------------------------------ making room

    def begin_reserving(self, index: Index, node: int) -> None:
        """Keep the prefix that ends at ``node`` until ``end_reserving``, whatever is evicted."""
        self._kept = (index, node)
        self._reclaim_steps_left = _RECLAIM_STEPS_MAX
        self._extents_tried.clear()
        self.refresh(index, node)

    def end_reserving(self) -> None:
        """Keep nothing any more."""
        if self._kept is None:
            raise InvariantBroken("reserving ended without having begun")
        index, node = self._kept
        self._kept = None
        if index.every:
            self.refresh(index, node)
        else:
            self.prune(index, node)

    def obtain(self, table: SlotTable, now_ns: int) -> int | None:
        """Reserve a slot, evicting what has to go for it; None when nothing may go."""
        slot = self.allocator.take(table)
        if slot is None and self._make_room(table, now_ns):
            slot = self.allocator.take(table)
            if slot is None:
                raise InvariantBroken(f"no slot of {table.slot_bytes} bytes after making room")
        return slot

    def _make_room(self, table: SlotTable, now_ns: int) -> bool:
        victim = table.policy.victim()
        other = self._oldest_elsewhere(table)
        if other is not None:
            theirs, their_victim = other
            their_age_ns = now_ns - theirs.last_use_ns[their_victim]
            is_older = victim is None or their_age_ns > _AGE_RATIO * (
                now_ns - table.last_use_ns[victim]
            )
            if is_older and self._reclaim(theirs.extent_of(their_victim)):
                return True
        if victim is not None:
            self._evict(table, victim)
            return True
        return self._reclaim_any(table)

    def _oldest_elsewhere(self, table: SlotTable) -> tuple[SlotTable, int] | None:
        oldest: tuple[SlotTable, int] | None = None
        for other in self.allocator.tables.values():
            victim = None if other is table else other.policy.victim()
            if victim is not None and (
                oldest is None or other.last_use_ns[victim] < oldest[0].last_use_ns[oldest[1]]
            ):
                oldest = other, victim
        return oldest

    def _evict(self, table: SlotTable, slot: int) -> None:
        table.num_evictions += 1
        index, part = self.owner_of(table, slot)
        node = table.node[slot]
        if not part.is_every:
            self.drop_tail(part, index, node)
            return
        if not self.is_loose(index, node):
            raise InvariantBroken(f"the policy gave up block {index.keys[node].hex()}, in use")
        parent = index.parent[node]
        if parent != ROOT:
            for every in index.every:
                times, column = every.table.last_use_ns, index.slots[every.number]
                times[column[parent]] = max(times[column[parent]], times[column[node]])
        self.drop_subtree(index, node)

    def _reclaim_any(self, table: SlotTable) -> bool:
        """Free some extent of another size: one stuck extent must not starve a size for good."""
        extents = self.allocator.extents
        for step in range(len(extents)):
            extent = extents[(self._sweep_start + step) % len(extents)]
            if extent is None or extent.table is table:
                continue
            if self._reclaim_steps_left <= 0:
                # The next request goes on where this one stopped.
                self._sweep_start = extent.number
                break
            if self._reclaim(extent):
                return True
        return False

    def _reclaim(self, extent: Extent) -> bool:
        """Evict all of an extent, if nothing in it or after it is in use; bounded work."""
        if extent.number in self._extents_tried:
            return False
        self._extents_tried.add(extent.number)
        if extent.is_held() or not self._can_all_leave(extent):
            return False
        table = extent.table
        table.num_evictions += extent.num_used
        self.num_extents_reclaimed += 1
        for slot in extent.slots:
            node = table.node[slot]
            if not node:
                continue  # free, or gone with a block before it
            index, part = self.owner_of(table, slot)
            if part.is_every:
                self.drop_subtree(index, node)
            else:
                self.drop_tail(part, index, node)
        if self.allocator.extents[extent.number] is not None:
            raise InvariantBroken(f"extent {extent.number} is in use after it was reclaimed")
        return True

    def _can_all_leave(self, extent: Extent) -> bool:
        table = extent.table
        seen: dict[Index, set[int]] = {}
        for slot in extent.slots:
            if not table.node[slot]:
                continue
            index, part = self.owner_of(table, slot)
            if not part.is_every:
                continue
            nodes = seen.setdefault(index, set())
            waiting = [table.node[slot]]
            while waiting:
                node = waiting.pop()
                if node in nodes:
                    continue  # its descendants are seen too
                nodes.add(node)
                self._reclaim_steps_left -= 1
                if self._reclaim_steps_left < 0 or not self.is_idle(index, node):
                    return False
                child = index.child[node]
                while child:
                    waiting.append(child)
                    child = index.older[child]
        return True
