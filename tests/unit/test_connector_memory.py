"""Where pages and states lie in a hybrid engine's memory: padded, packed, in one storage."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from millpond.connector.geometry import EngineLayout, engine_layout, layer_memory
from millpond.model.errors import UnsupportedEngine
from millpond.transfer.copies import LayerMemory

NUM_BLOCKS = 5
BLOCK, HEADS, HEAD_DIM = 784, 4, 256
"""Of the 27B hybrid on a GPU."""
CONV, SUMS = (3, 10_240), (48, 128, 128)
PAGE_BYTES = BLOCK * 2 * HEADS * HEAD_DIM * 2
STATE_BYTES = 3 * 10_240 * 2 + 48 * 128 * 128 * 4


def hybrid_layout(num_layers: int = 64, sums_type: torch.dtype = torch.float32) -> EngineLayout:
    """Return the layout of a hybrid as vLLM groups it: every fourth layer has attention."""
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16
    )
    state = MambaSpec(
        block_size=BLOCK,
        shapes=(CONV, SUMS),
        dtypes=(torch.bfloat16, sums_type),
        page_size_padded=PAGE_BYTES,
        mamba_cache_mode="align",
    )
    names = [[f"layer{i}" for i in range(g, num_layers, 4)] for g in range(4)]
    groups = [
        KVCacheGroupSpec(layers, attention if g == 3 else state) for g, layers in enumerate(names)
    ]
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups, hash_block_size=BLOCK
    )
    engine: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(multimodal_config=None),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    return engine_layout(config, engine)


def test_the_27b_keeps_64_kib_a_token_and_154_mb_a_state() -> None:
    layout = hybrid_layout()
    assert layout.block_tokens == BLOCK
    attention, state = layout.parts
    assert (attention.name, state.name) == ("attention", "state")
    assert attention.rank_bytes == BLOCK * 64 * 1024
    assert state.rank_bytes == 48 * STATE_BYTES == 153_944_064
    narrow = hybrid_layout(sums_type=torch.bfloat16)
    assert narrow.parts[1].rank_bytes == 78_446_592


def one_storage() -> torch.Tensor:
    """Return the memory that four groups share, with another byte in each place, about."""
    numbers = torch.arange(NUM_BLOCKS * PAGE_BYTES, dtype=torch.int64)
    return (numbers % 251).to(torch.uint8)


def as_pages(storage: torch.Tensor) -> torch.Tensor:
    """Attention: (blocks, heads, tokens, keys and values), dense."""
    return storage.view(torch.bfloat16).view(NUM_BLOCKS, HEADS, BLOCK, 2 * HEAD_DIM)


def as_bytes(storage: torch.Tensor) -> torch.Tensor:
    """A state as its bytes alone, padded to the page."""
    return torch.as_strided(
        storage.view(torch.int8), (NUM_BLOCKS, 1, 1, STATE_BYTES), (PAGE_BYTES, 1, 1, 1)
    )


def as_padded_bytes(storage: torch.Tensor) -> torch.Tensor:
    """A state as a whole page of bytes, of which the first are its own."""
    return storage.view(torch.int8).view(NUM_BLOCKS, 1, 1, PAGE_BYTES)


def as_tensors(storage: torch.Tensor) -> list[torch.Tensor]:
    """A state as two tensors of their own types, packed one behind the other in a page."""
    conv_bytes = CONV[0] * CONV[1] * 2
    conv = torch.as_strided(
        storage.view(torch.bfloat16), (NUM_BLOCKS, *CONV), (PAGE_BYTES // 2, CONV[1], 1)
    )
    sums = torch.as_strided(
        storage.view(torch.float32),
        (NUM_BLOCKS, *SUMS),
        (PAGE_BYTES // 4, 128 * 128, 128, 1),
        conv_bytes // 4,
    )
    return [conv, sums]


def gathered(memory: LayerMemory, storage: torch.Tensor, block: int) -> torch.Tensor:
    """Return the bytes that would be copied for one engine block."""
    start = memory.address - storage.data_ptr() + block * memory.geometry.stride_bytes
    return torch.cat(
        [
            storage[start + s.offset_bytes : start + s.offset_bytes + s.num_bytes]
            for s in memory.geometry.segments
        ]
    )


@pytest.mark.parametrize("as_state", [as_bytes, as_padded_bytes, as_tensors])
def test_data_is_copied_and_padding_is_not(as_state: Any) -> None:  # noqa: ANN401
    storage = one_storage()
    layout = hybrid_layout(num_layers=4)
    caches = {f"layer{i}": as_state(storage) for i in range(3)}
    caches["layer3"] = as_pages(storage)
    (pages,), states = layer_memory(layout, caches, NUM_BLOCKS)
    assert len(states) == 3
    for block in range(NUM_BLOCKS):
        page = storage[block * PAGE_BYTES : (block + 1) * PAGE_BYTES]
        assert torch.equal(gathered(pages, storage, block), page)
        for state in states:
            assert torch.equal(gathered(state, storage, block), page[:STATE_BYTES])


@pytest.mark.parametrize("num_bytes", [STATE_BYTES - 1, STATE_BYTES // 2])
def test_a_state_that_is_shorter_than_announced_is_refused(num_bytes: int) -> None:
    storage = one_storage()
    caches = {
        f"layer{i}": torch.as_strided(
            storage.view(torch.int8), (NUM_BLOCKS, 1, 1, num_bytes), (PAGE_BYTES, 1, 1, 1)
        )
        for i in range(3)
    }
    caches["layer3"] = as_pages(storage)
    with pytest.raises(UnsupportedEngine, match=f"holds {num_bytes} bytes"):
        layer_memory(hybrid_layout(num_layers=4), caches, NUM_BLOCKS)
