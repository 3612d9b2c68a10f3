"""What lies where, block by block: for operators and tests, not for hot paths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from millpond.pool.allocator import STATES
from millpond.pool.index import ROOT, Index
from millpond.pool.sessions import Sessions
from millpond.pool.store import Store


def describe_blocks(store: Store, sessions: Sessions, num_max: int) -> list[dict[str, object]]:
    """Return at most ``num_max`` blocks, each after the one before it in its prefix.

    ``block`` counts from 0 in its prefix; ``is_ready`` says whether all attention pages up to
    it are committed. Slots are listed by the position of their part in the namespace.
    """
    blocks = (
        _describe(sessions, namespace_id, index, node)
        for namespace_id, index in enumerate(store.indexes)
        for node in _in_order(index)
    )
    return list(islice(blocks, num_max))


def _in_order(index: Index) -> Iterator[int]:
    """Yield the nodes of a tree, parents before children."""
    waiting = [ROOT]
    while waiting:
        node = waiting.pop()
        if node != ROOT:
            yield node
        child = index.child[node]
        while child:
            waiting.append(child)
            child = index.older[child]


def _describe(sessions: Sessions, namespace_id: int, index: Index, node: int) -> dict[str, object]:
    slots: list[dict[str, object]] = []
    for part in index.parts:
        slot, table = index.slots[part.number][node], part.table
        if slot:
            slots.append(
                {
                    "part": part.number,
                    "offset": table.offset[slot],
                    "slot_bytes": table.slot_bytes,
                    "state": STATES[table.state[slot]].value,
                    "num_holds": table.num_holds[slot],
                    "writer": sessions.replicas[table.writer[slot]].name,
                }
            )
    return {
        "namespace": namespace_id,
        "key": index.keys[node].hex(),
        "parent": index.keys[index.parent[node]].hex(),
        "block": index.depth[node] - 1,
        "is_ready": bool(index.ready[node]),
        "slots": slots,
    }
