"""An engine's cache that tells what it does as vLLM does: the messages were compared with it."""

from collections.abc import Sequence
from typing import Any

import msgspec

ATTENTION = {"kv_cache_spec_kind": "full_attention"}
STATE = {"kv_cache_spec_kind": "mamba"}


def window(tokens: int) -> dict[str, Any]:
    return {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": tokens}


def hashes(ids: Sequence[int], block: int, salt: str = "") -> list[int]:
    """Return a hash of 64 bits for each whole block's end, as events have them."""
    ends = range(block, len(ids) + 1, block)
    return [hash((salt, *ids[:end])) & (2**64 - 1) for end in ends]


def stored(
    ids: Sequence[int],
    block: int,
    first: int = 0,
    *,
    salt: str = "",
    held: Sequence[int] | None = None,
    **fields: object,
) -> dict[str, Any]:
    """Return the event of the blocks of a prompt from ``first`` on, or of ``held`` among them."""
    mine = hashes(ids, block, salt)
    last = len(mine)
    held = range(first, last) if held is None else held
    extra_keys = [[salt] if salt and i == 0 else None for i in held]
    return {
        "type": "BlockStored",
        "block_hashes": [mine[i] for i in held],
        "parent_block_hash": mine[first - 1] if first else None,
        "token_ids": list(ids[first * block : last * block]),
        "block_size": block,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": extra_keys or None,
        "group_idx": 0,
        **ATTENTION,
        **fields,
    }


def removed(gone: Sequence[int], **fields: object) -> dict[str, Any]:
    """Return the event of blocks that are no longer cached."""
    event = {"type": "BlockRemoved", "block_hashes": list(gone), "medium": "GPU", "group_idx": 0}
    return {**event, **fields}


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def payload(*events: dict[str, Any], rank: int | None = 0) -> bytes:
    """Return a batch as it is sent."""
    return msgspec.msgpack.encode([1.5, events, rank])
