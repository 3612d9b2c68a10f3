"""Everything that must hold between two requests, checked from scratch."""

from __future__ import annotations

from collections import Counter

from millpond.model.errors import InvariantBroken
from millpond.pool.allocator import (
    COMMITTED,
    FREE,
    NONE,
    QUARANTINED,
    RESERVED,
    Extent,
    SlotTable,
)
from millpond.pool.evicting import Evictor
from millpond.pool.index import ROOT, Index
from millpond.pool.sessions import Lease, Sessions, Writing
from millpond.pool.store import Store


def check_invariants(evictor: Evictor, sessions: Sessions) -> None:
    """Raise ``InvariantBroken`` with the first contradiction that is found."""
    store = evictor.store
    _check_extents(store)
    for namespace_id, index in enumerate(store.indexes):
        _check_tree(index, f"namespace {namespace_id}")
        _check_blocks(store, index, f"namespace {namespace_id}")
        _check_spares(index, f"namespace {namespace_id}")
    _check_slots(store)
    _check_budget(evictor)
    _check_leases(store, sessions)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise InvariantBroken(message)


def _check_extents(store: Store) -> None:
    """Each extent is unassigned or in one table; free stacks are what the states say."""
    allocator = store.allocator
    unassigned = Counter(allocator.unassigned)
    for number, extent in enumerate(allocator.extents):
        _require(
            unassigned[number] == (extent is None), f"extent {number} is listed wrong as unassigned"
        )
    _require(unassigned.total() <= len(allocator.extents), "an extent is unassigned twice")
    assigned = [e for table in allocator.tables for e in table.assigned()]
    numbers = sorted(extent.number for extent in assigned)
    expected = [number for number, extent in enumerate(allocator.extents) if extent is not None]
    _require(numbers == expected, f"extents {numbers} are in tables, {expected} are assigned")
    for table in allocator.tables:
        for position, extent in enumerate(table.extents):
            if extent is not None:
                first = 1 + position * table.slots_per_extent
                _require(extent.first_slot == first, f"extent {extent.number} has moved its rows")
                _check_extent(table, extent, allocator.extent_bytes)
        rooms = {e.number for e in table.assigned() if e.free}
        _require(rooms == set(table.with_room), f"{table.slot_bytes}: extents with room are wrong")
        num_used = sum(extent.num_used for extent in table.assigned())
        _require(table.num_used == num_used, f"{table.slot_bytes}: {num_used} slots are in use")


def _check_extent(table: SlotTable, extent: Extent, extent_bytes: int) -> None:
    name = f"extent {extent.number}"
    _require(extent.num_used > 0, f"{name} is assigned and empty")
    by_state = sorted(slot for slot in extent.slots if table.state[slot] == FREE)
    _require(sorted(extent.free) == by_state, f"{name}: free slots do not add up")
    start = extent.number * extent_bytes
    for index, slot in enumerate(extent.slots):
        offset = start + index * table.slot_bytes
        _require(table.offset[slot] == offset, f"{name}: slot {index} lies elsewhere")
        _require(
            offset + table.slot_bytes <= start + extent_bytes, f"{name}: slot {index} overlaps"
        )


def _check_tree(index: Index, name: str) -> None:
    """Links agree, keys are where they belong, and the ready flags follow from the parts."""
    reached = set(index.subtree(ROOT))
    _require(
        reached == {ROOT, *index.rows.values()}, f"{name}: some block has lost its way to the root"
    )
    _require(len(reached) == len(index.rows) + 1, f"{name}: a node stands for two keys")
    for key, node in index.rows.items():
        block = f"{name}, block {key.hex()}"
        parent = index.parent[node]
        _require(index.keys[node] == key, f"{block}: its node has another key")
        _require(index.depth[node] == index.depth[parent] + 1, f"{block}: wrong depth")
        younger, older = index.younger[node], index.older[node]
        _require(
            index.older[younger] == node if younger else index.child[parent] == node,
            f"{block}: siblings disagree",
        )
        _require(not older or index.younger[older] == node, f"{block}: siblings disagree")
        missing = sum(
            part.table.state[index.slots[part.number][node]] != COMMITTED for part in index.every
        )
        _require(index.num_missing[node] == missing, f"{block}: {missing} parts are missing")
        is_ready = not missing and index.ready[parent]
        _require(index.ready[node] == bool(is_ready), f"{block}: ready flag is wrong")


def _check_blocks(store: Store, index: Index, name: str) -> None:
    """Blocks refer to slots that refer back; policies know just the evictable ones."""
    for key, node in index.rows.items():
        block = f"{name}, block {key.hex()}"
        for part in index.parts:
            slot = index.slots[part.number][node]
            _require(slot or not part.is_every, f"{block}: an EVERY part has no slot")
            if slot:
                is_mine = part.table.node[slot] == node and part.table.owner[slot] == part.owner
                _require(is_mine, f"{block}: its slot belongs to another block")
                state = part.table.state[slot]
                _require(state in {RESERVED, COMMITTED}, f"{block}: its slot is in state {state}")
        leads_on = index.child[node] or any(column[node] for column in index.slots)
        _require(leads_on, f"{block}: has neither slots nor children")
        for part, slot, is_evictable in store.evictable(index, node):
            known = part.table.is_evictable(slot)
            _require(
                known == is_evictable,
                f"{block}: evictable is {is_evictable}, for the policy {known}",
            )


def _check_spares(index: Index, name: str) -> None:
    """Spare states have a deeper one after them; spare pages that could go have no state."""
    for key, node in index.rows.items():
        block = f"{name}, block {key.hex()}"
        for part in index.parts:
            slot = index.slots[part.number][node]
            if not slot or not part.table.is_spare[slot]:
                continue
            if part.is_every:
                has_use = not index.child[node] and any(
                    last.table.state[index.slots[last.number][node]] == COMMITTED
                    for last in index.lasts
                )
            else:
                column = index.slots[part.number]
                has_use = not any(column[after] for after in index.subtree(node)[1:])
            _require(not has_use, f"{block}: part {part.number} is spare and of use")


def _check_budget(evictor: Evictor) -> None:
    tables = [table for table in evictor.store.allocator.tables if table.holds_states]
    num_bytes = sum(table.num_used * table.slot_bytes for table in tables)
    _require(num_bytes <= evictor.state_bytes_max, f"states take {num_bytes} bytes")


def _check_slots(store: Store) -> None:
    """Slots refer to blocks that refer back; holds fit states; policies hold no strangers."""
    for table in store.allocator.tables:
        for extent in table.assigned():
            for slot in extent.slots:
                name = f"slot {slot} of {table.slot_bytes} bytes"
                state, node, holds = table.state[slot], table.node[slot], table.num_holds[slot]
                _require((node != NONE) == (state in {RESERVED, COMMITTED}), f"{name}: index link")
                if node:
                    index, part = store.owner_of(table, slot)
                    _require(part.table is table, f"{name}: owned by a part of another size")
                    _require(
                        index.slots[part.number][node] == slot, f"{name}: its block has another"
                    )
                if state == FREE:
                    _require(not holds, f"{name}: free and held {holds} times")
                elif state != COMMITTED:
                    _require(holds, f"{name}: state {state} and held by nobody")
        for slots in (table.policy, table.spares):
            for slot in slots:
                is_here = slots is (table.spares if table.is_spare[slot] else table.policy)
                is_known = is_here and table.state[slot] == COMMITTED
                _require(is_known, f"policy of {table.slot_bytes} keeps {slot}")
            _require(len(slots) == sum(1 for _ in slots), "a policy has miscounted its slots")


def _check_leases(store: Store, sessions: Sessions) -> None:
    """Holds are just what the live leases hold; reserved slots have one live writer each."""
    holds: dict[SlotTable, Counter[int]] = {t: Counter() for t in store.allocator.tables}
    writers: dict[SlotTable, Counter[int]] = {t: Counter() for t in holds}
    unaborted: set[int] = set()
    for session in sessions.by_id.values():
        _require(session.is_open or session.leases, f"session {session.session_id} is over")
        for lease in session.leases.values():
            _check_lease(lease)
            is_writing = isinstance(lease, Writing) and not lease.is_aborted
            if is_writing:
                unaborted.add(lease.lease_id)
            for part, slots in zip(session.index.parts, lease.slots, strict=True):
                holds[part.table].update(slots)
                if is_writing:
                    writers[part.table].update(slots)
    _require(unaborted == set(sessions.writing), "the list of pending writes is wrong")
    for table, counts in holds.items():
        _check_holds(table, counts, writers[table])


def _check_holds(table: SlotTable, holds: Counter[int], writers: Counter[int]) -> None:
    for extent in table.assigned():
        for slot in extent.slots:
            name = f"slot {slot} of {table.slot_bytes} bytes"
            is_damaged = slot in table.damaged
            expected = holds.pop(slot, 0) + is_damaged
            _require(
                table.num_holds[slot] == expected,
                f"{name}: held {table.num_holds[slot]} times, by {expected} leases",
            )
            _require(
                not is_damaged or table.state[slot] == QUARANTINED, f"{name}: damaged and in use"
            )
            if table.state[slot] == RESERVED:
                _require(writers[slot] == 1, f"{name}: reserved without one live writer")
    _require(not holds, f"leases hold slots {sorted(holds)} that do not exist")


def _check_lease(lease: Lease) -> None:
    name = f"lease {lease.lease_id}"
    _require(lease.ranks, f"{name}: all ranks have finished, yet it is live")
    _require(not lease.ranks & ~lease.session.all_ranks, f"{name}: waits for ranks that are not")
    if isinstance(lease, Writing) and not lease.is_aborted:
        _require(lease.session.is_open, f"{name}: its session is closed, so it cannot commit")
