"""What a reader gets: the longest usable prefix, and which slots of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from millpond.model.names import Outcome
from millpond.pool.index import Index, Part


def longest_usable(
    index: Index, keys: bytes, key_bytes: int, num_keys: int
) -> tuple[int, int, Outcome]:
    """Return the usable blocks, the node of the last one, and what stands after them."""
    num_ready, node = index.longest_ready(keys, key_bytes)
    is_pending = num_ready < num_keys and index.find(keys, key_bytes, num_ready) is not None
    if index.tails:
        node, is_tail_pending = index.resumable(node)
        is_pending = is_pending or is_tail_pending
    num_blocks = index.depth[node]
    if num_blocks == num_keys:
        return num_blocks, node, Outcome.HIT
    return num_blocks, node, Outcome.PENDING if is_pending else Outcome.MISS


def blocks_to_read(index: Index, first_block: int, num_blocks: int) -> list[tuple[Part, range]]:
    """Return for each part the blocks of it that a reader needs."""
    wanted: list[tuple[Part, range]] = []
    for part in index.parts:
        first = first_block if part.is_every else max(0, num_blocks - (part.window_blocks or 1))
        wanted.append((part, range(first, num_blocks)))
    return wanted


def pairs_of(blocks: range, offsets: Iterable[int]) -> array[int]:
    """Return (block, offset, block, offset, ...) without a loop in Python."""
    pairs = array("Q", bytes(16 * len(blocks)))
    pairs[0::2] = array("Q", blocks)
    pairs[1::2] = array("Q", offsets)
    return pairs
