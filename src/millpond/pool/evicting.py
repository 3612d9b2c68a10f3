"""Making room: what goes for a new block, and when memory moves to another slot size.

Room comes from, in this order: free slots; slots that serve nobody any more; an extent of
another size whose oldest entries are much older than those of this size; the policy's victim;
any extent of another size that can be freed. States of hybrid models have a budget besides.

The work that one request may cause is bounded, since an engine waits for its reply.
"""

from __future__ import annotations

from array import array
from typing import Final

from millpond.model.errors import InvariantBroken
from millpond.pool import states
from millpond.pool.allocator import Extent, SlotTable
from millpond.pool.index import ROOT, Index, Part
from millpond.pool.store import Store

_RECLAIM_STEPS_MAX: Final = 16_384
"""Blocks that one request may look at, and evict, to free extents of another slot size: to
evict as many takes about 0.15 s, and an engine waits 0.25 s for its reply."""
_AGE_RATIO: Final = 2
"""Another size gives up an extent only for an entry more than this many times as old."""
_VICTIMS_MAX: Final = 64
"""Victims in a row between two looks at the other sizes."""


class Evictor:
    """Hands out slots over a store; ``state_bytes_max`` is the budget of all states."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.state_bytes_max = 0
        self.num_extents_reclaimed = 0
        self._reclaim_steps_left = 0
        self._extents_tried: set[int] = set()
        self._sweep_start = 0

    def begin(self, index: Index, node: int) -> None:
        """Keep the prefix that ends at ``node`` until ``end``, whatever is evicted."""
        self.store.kept = (index, node)
        self._reclaim_steps_left = _RECLAIM_STEPS_MAX
        self._extents_tried.clear()
        self.store.refresh(index, node)

    def end(self) -> None:
        """Keep nothing any more."""
        if self.store.kept is None:
            raise InvariantBroken("reserving ended without having begun")
        index, node = self.store.kept
        self.store.kept = None
        if index.every:
            self.store.refresh(index, node)
        else:
            self.store.prune(index, node)

    def obtain(self, table: SlotTable, num_wanted: int, now_ns: int) -> array[int]:
        """Reserve up to ``num_wanted`` slots, evicting what has to go for them."""
        allocator = self.store.allocator
        slots = allocator.take(table, num_wanted)
        while len(slots) < num_wanted and self._make_room(table, num_wanted - len(slots), now_ns):
            more = allocator.take(table, num_wanted - len(slots))
            if not more:
                raise InvariantBroken(f"no slot of {table.slot_bytes} bytes after making room")
            slots += more
        return slots

    # ------------------------------------------------------------ states

    def obtain_state(self, table: SlotTable, now_ns: int, *, is_deepest: bool) -> int | None:
        """Reserve a slot for a state within the budget of all states.

        Only for the deepest state of its chain anything goes that somebody could still use.
        """
        while self._state_bytes() + table.slot_bytes > self.state_bytes_max:
            if not self._evict_state(table, spare_only=not is_deepest):
                return None
        slots = self.store.allocator.take(table, 1)
        if not slots:
            if is_deepest:
                slots = self.obtain(table, 1, now_ns)
            elif self._evict_state(table, spare_only=True):
                slots = self.store.allocator.take(table, 1)
        return slots[0] if slots else None

    def _state_bytes(self) -> int:
        tables = self.store.allocator.tables
        return sum(t.num_used * t.slot_bytes for t in tables if t.holds_states)

    def _evict_state(self, wanted: SlotTable, *, spare_only: bool) -> bool:
        """Evict one state, of ``wanted``'s size if there is a choice; return whether one went."""
        tables = [t for t in self.store.allocator.tables if t.holds_states]
        tables.sort(key=lambda table: table is not wanted)
        for table in tables:
            slot = table.spares.first()
            if slot is not None:
                self._evict(table, slot, "spare")
                return True
        victims = [(t, slot) for t in tables if (slot := t.policy.victim()) is not None]
        if spare_only or not victims:
            return False
        table, slot = min(victims, key=lambda victim: victim[0].last_use_ns[victim[1]])
        self._evict(table, slot, "budget")
        return True

    # ------------------------------------------------------------ anything

    def _make_room(self, table: SlotTable, num_wanted: int, now_ns: int) -> bool:
        """Free at least one slot of ``table``, and not more than wanted except by extents."""
        if table.spares.first() is None:
            slot = table.policy.victim()
            if self._take_extent_of_older(table, slot, now_ns):
                return True
            if slot is None:
                return self._reclaim_any(table)
        for _ in range(min(num_wanted, _VICTIMS_MAX)):
            # Each victim may leave spares behind.
            if (slot := table.spares.first()) is not None:
                self._evict(table, slot, "spare")
            elif (slot := table.policy.victim()) is not None:
                self._evict(table, slot, "victim")
            else:
                break
        return True

    def _take_extent_of_older(self, table: SlotTable, slot: int | None, now_ns: int) -> bool:
        """Free an extent of another size if its entries are much older than ``slot``."""
        oldest = self._oldest_elsewhere(table)
        if oldest is None:
            return False
        theirs, their_slot = oldest
        their_age_ns = now_ns - theirs.last_use_ns[their_slot]
        if slot is not None and their_age_ns <= _AGE_RATIO * (now_ns - table.last_use_ns[slot]):
            return False
        return self._reclaim(theirs.extent_of(their_slot))

    def _oldest_elsewhere(self, table: SlotTable) -> tuple[SlotTable, int] | None:
        oldest: tuple[SlotTable, int] | None = None
        for other in self.store.allocator.tables:
            if other is table:
                continue
            slot = other.policy.victim()
            if slot is None:
                slot = other.spares.first()
            if slot is not None and (
                oldest is None or other.last_use_ns[slot] < oldest[0].last_use_ns[oldest[1]]
            ):
                oldest = other, slot
        return oldest

    def _evict(self, table: SlotTable, slot: int, reason: str) -> None:
        table.num_evictions[reason] += 1
        store = self.store
        index, part = store.owner_of(table, slot)
        node = table.node[slot]
        if not part.is_every:
            self._evict_tail(part, index, node)
            return
        if not store.is_loose(index, node):
            raise InvariantBroken(f"the policy gave up block {index.keys[node].hex()}, in use")
        parent = index.parent[node]
        had_use = index.is_hybrid and (table.is_spare[slot] or index.has_state(node))
        if parent != ROOT:
            for every in index.every:
                times, column = every.table.last_use_ns, index.slots[every.number]
                leaving, staying = column[node], column[parent]
                every.table.policy.hand_up(leaving, staying)
                times[staying] = max(times[staying], times[leaving])
        store.drop_block(index, node, evicted=True)
        if had_use:
            states.strand(index, parent)

    def _evict_tail(self, part: Part, index: Index, node: int) -> None:
        self.store.drop_tail(part, index, node, evicted=True)
        if part.is_last:
            states.strand(index, node)

    # ------------------------------------------------------------ extents

    def _reclaim_any(self, table: SlotTable) -> bool:
        """Free some extent of another size: one stuck extent must not starve a size for good."""
        extents = self.store.allocator.extents
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
        store, table = self.store, extent.table
        table.num_evictions["extent"] += extent.num_used
        self.num_extents_reclaimed += 1
        for slot in extent.slots:
            node = table.node[slot]
            if not node:
                continue  # free, or gone with a block before it
            index, part = store.owner_of(table, slot)
            if part.is_every:
                parent = index.parent[node]
                store.drop_subtree(index, node, evicted=True)
                states.strand(index, parent)
            else:
                self._evict_tail(part, index, node)
        if store.allocator.extents[extent.number] is not None:
            raise InvariantBroken(f"extent {extent.number} is in use after it was reclaimed")
        return True

    def _can_all_leave(self, extent: Extent) -> bool:
        table, store = extent.table, self.store
        seen: dict[Index, set[int]] = {}
        for slot in extent.slots:
            if not table.node[slot]:
                continue
            index, part = store.owner_of(table, slot)
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
                if self._reclaim_steps_left < 0 or not store.is_idle(index, node):
                    return False
                child = index.child[node]
                while child:
                    waiting.append(child)
                    child = index.older[child]
        return True
