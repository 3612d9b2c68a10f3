"""Slots in which a reader found other bytes than were written.

Such a block is not served again: it leaves the index, and what follows it is unusable, as
with any block that leaves. Its slot is held by the pool itself and stays in quarantine until
the daemon ends, a flush included: memory that failed once, or that somebody still writes to
without a right to, is not given to the next one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millpond.pool import states
from millpond.pool.index import Index, Part
from millpond.pool.sessions import Lease, Replica
from millpond.pool.store import Store


@dataclass(frozen=True, slots=True)
class Damage:
    """A slot that has just been found damaged; ``key`` is None if its block had left before."""

    offset_bytes: int
    part: int
    key: bytes | None
    writer: Replica
    reader: Replica


def condemn(
    store: Store, replicas: list[Replica], lease: Lease, offsets: Iterable[int]
) -> list[Damage]:
    """Take slots of a read lease out of use for good; return those that were in use till now.

    ``ValueError`` for an offset that is none of the lease's; nothing changes then.
    """
    index = lease.session.index
    held = {
        part.table.offset[slot]: (part, slot)
        for part, slots in zip(index.parts, lease.slots, strict=True)
        for slot in slots
    }
    wanted = tuple(offsets)
    strange = [offset for offset in wanted if offset not in held]
    if strange:
        raise ValueError(f"no slot of lease {lease.lease_id} lies at offset {strange[0]}")
    found: list[Damage] = []
    for offset in wanted:
        part, slot = held[offset]
        table = part.table
        if slot in table.damaged:
            continue  # another reader or rank was first
        node = table.node[slot]
        writer = replicas[table.writer[slot]]
        key = index.keys[node] if node else None
        found.append(Damage(offset, part.number, key, writer, lease.session.replica))
        table.damaged.add(slot)
        table.num_holds[slot] += 1
    for damage in found:  # now that all are named: one may leave with another
        part, slot = held[damage.offset_bytes]
        if node := part.table.node[slot]:
            _remove(store, part, index, node)
    return found


def _remove(store: Store, part: Part, index: Index, node: int) -> None:
    if part.is_every:
        parent = index.parent[node]
        store.drop_subtree(index, node)
        states.strand(index, parent)
        return
    store.drop_tail(part, index, node)
    if part.is_last:
        states.strand(index, node)
