"""The slots that a filling was given: each once, aligned, inside the arena, and none left."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millpond.gate.pool_errors import PoolFault
from millpond.model.errors import SetupError
from millpond.model.limits import SLOT_ALIGNMENT_BYTES
from millpond.model.namespace import aligned_slot_bytes


def check_slots(offsets: "Mapping[int, Sequence[array[int]]]", arena_bytes: int) -> int:
    """Return how many slots there are, by size; raises ``PoolFault`` where one is wrong."""
    starts = [
        np.concatenate([np.asarray(some, np.uint64) for some in chunks] or [np.empty(0, np.uint64)])
        for chunks in offsets.values()
    ]
    sizes = [
        np.full(len(found), size, np.uint64) for size, found in zip(offsets, starts, strict=True)
    ]
    start, size = np.concatenate(starts), np.concatenate(sizes)
    askew = start % np.uint64(SLOT_ALIGNMENT_BYTES) != 0
    if askew.any():
        raise PoolFault(
            f"the slot at offset {start[askew][0]} is not aligned to {SLOT_ALIGNMENT_BYTES} bytes"
        )
    # Not "start + size", which a wild offset would carry past 64 bits.
    outside = start > np.uint64(arena_bytes) - size
    if outside.any():
        raise PoolFault(
            f"the slot at offset {start[outside][0]} of {size[outside][0]} bytes lies outside "
            f"the arena of {arena_bytes} bytes"
        )
    order = np.argsort(start, kind="stable")
    start, end = start[order], (start + size)[order]
    overlaps = np.flatnonzero(start[1:] < end[:-1])
    if len(overlaps):
        first, second = int(start[overlaps[0]]), int(start[overlaps[0] + 1])
        if first == second:
            raise PoolFault(f"the slot at offset {first} was handed out twice")
        raise PoolFault(f"the slots at offsets {first} and {second} overlap")
    return len(start)


def check_full(pool: Mapping[str, Any], num_slots: Mapping[int, int]) -> None:
    """Check the pool's own books against ``num_slots`` held of each size: nothing is left."""
    if pool["num_extents_unassigned"]:
        raise PoolFault(
            f"the pool says it is full with {pool['num_extents_unassigned']} of "
            f"{pool['num_extents']} extents unused"
        )
    by_size = {size["slot_bytes"]: size["num_slots"] for size in pool["slot_sizes"]}
    for size, held in num_slots.items():
        counted = by_size.get(aligned_slot_bytes(size), {})
        committed, total = counted.get("committed", 0), sum(counted.values())
        if not committed == total == held:
            raise PoolFault(
                f"of {total} slots of {size} bytes the pool counts {committed} as committed "
                f"({counted}), and {held} were handed out"
            )


def require_sizes(num_slots: Mapping[int, int], asked: Sequence[int]) -> None:
    """Raise ``SetupError`` where a filling has no slot of a size that was to be checked."""
    missing = [size for size in asked if not num_slots.get(size)]
    if missing:
        raise SetupError(
            f"no slot of {' and '.join(map(str, missing))} bytes was left by the other sizes, so "
            "that these were not checked: use a larger pool (--size)"
        )


def is_free(pool: Mapping[str, Any]) -> bool:
    """Return whether every extent of the pool is free of slots."""
    return pool["num_extents_unassigned"] == pool["num_extents"] and not pool["num_blocks"]
