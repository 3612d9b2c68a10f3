"""From vLLM's own cache specs to parts: block spans where groups differ, windows, refusals."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from millpond.connector.geometry import EngineLayout, describe_layout, engine_layout
from millpond.model.errors import UnsupportedEngine
from millpond.model.layout import LayerPages, PartLayout
from millpond.model.names import Coverage
from millpond.model.namespace import check_parts

HEADS = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
TOKEN_BYTES = 2 * 2 * 64 * 2
STATE_BYTES = 1000 * 4


def full(block: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **HEADS)


def window(block: int, tokens: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **HEADS)


def state(block: int, **changes: Any) -> MambaSpec:  # noqa: ANN401
    fields = {
        "mamba_cache_mode": "align",
        "page_size_padded": 8192,
        "shapes": ((1000,),),
        "dtypes": (torch.float32,),
    } | changes
    return MambaSpec(block_size=block, **fields)


def layout(
    *specs: KVCacheSpec,
    parallel: dict[str, int] | None = None,
    mm_cache_gb: float | None = None,
    prefix_caching: bool = True,
    hash_tokens: int | None = None,
) -> EngineLayout:
    groups = [KVCacheGroupSpec([f"l{i}.0", f"l{i}.1"], spec) for i, spec in enumerate(specs)]
    config = KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        hash_block_size=hash_tokens or math.gcd(*(spec.block_size for spec in specs)),
    )
    engine: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(**(parallel or {})),
        model_config=SimpleNamespace(
            multimodal_config=None
            if mm_cache_gb is None
            else SimpleNamespace(mm_processor_cache_gb=mm_cache_gb)
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    return engine_layout(config, engine)


def test_a_block_is_the_smallest_multiple_of_all_groups_with_256_tokens() -> None:
    assert layout(full(16)).block_tokens == 256
    assert layout(full(96)).block_tokens == 288
    assert layout(full(512)).block_tokens == 512
    assert layout(full(64), window(96, 1000)).block_tokens == 384
    assert layout(full(528), state(528)).block_tokens == 528


def test_groups_of_different_blocks_span_the_same_tokens() -> None:
    made = layout(full(64), window(96, 1000))
    assert made.hash_tokens == 32
    assert made.block_span(0, 0, 2) == (2 * 6, 3 * 6)
    assert made.block_span(1, 1, 2) == (2 * 4, 3 * 4)
    assert made.table(1, 1, 0, [7, 8, 9]) == [7, 8, 9, 0]


def test_pages_of_all_groups_of_a_part_lie_in_one_slot() -> None:
    made = layout(full(64), window(64, 512), window(64, 512))
    assert [part.name for part in made.parts] == ["attention", "window-512"]
    assert made.coverages == (Coverage.EVERY, Coverage.WINDOW)
    assert made.parts[0].rank_bytes == 2 * 256 * TOKEN_BYTES
    assert made.parts[1].rank_bytes == 4 * 256 * TOKEN_BYTES
    check_parts(made.part_specs(2), 2)


def test_windows_of_different_lengths_are_different_parts() -> None:
    made = layout(window(64, 512), full(64), window(64, 1024))
    assert [part.name for part in made.parts] == ["attention", "window-512", "window-1024"]
    assert made.windows == (None, 2, 4)


@pytest.mark.parametrize(
    ("tokens", "num_blocks", "num_pages"),
    [(1, 1, 1), (2, 1, 1), (65, 1, 1), (66, 1, 2), (256, 1, 4), (257, 1, 4), (258, 2, 4)],
)
def test_a_window_keeps_what_can_be_looked_back_at(
    tokens: int, num_blocks: int, num_pages: int
) -> None:
    """A request that resumes at n sees the tokens from n - (w - 1) on, and none before."""
    made = layout(full(64), window(64, tokens))
    assert made.windows[1] == num_blocks
    assert made.parts[1].blocks == {1: num_pages}
    first, last = made.block_span(1, 1, 3)
    assert last == 16
    needed = range((4 * 256 - (tokens - 1)) // 64, 16)
    assert set(range(first, last)) >= {i for i in needed if i >= 12}


def test_a_state_is_one_page_whatever_the_length_of_its_block() -> None:
    made = layout(state(256), full(256), state(256))
    assert [part.name for part in made.parts] == ["attention", "state"]
    assert made.coverages[1] is Coverage.LAST
    assert made.parts[1].blocks == {0: 1, 2: 1}
    assert made.parts[1].rank_bytes == 4 * STATE_BYTES, "the engine's padding is left out"
    assert made.block_span(1, 2, 3) == (3, 4)


def test_a_cache_that_hits_inside_blocks_of_states_is_refused() -> None:
    assert layout(full(256), state(256), hash_tokens=256).hash_tokens == 256
    assert layout(full(256), window(256, 512), hash_tokens=64).hash_tokens == 64
    with pytest.raises(UnsupportedEngine, match=r"every 64 tokens .* --prefix-match-unit"):
        layout(full(256), state(256), hash_tokens=64)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (state(256, mamba_cache_mode="none"), "--enable-prefix-caching"),
        (state(256, num_speculative_blocks=2), "speculative"),
        (ChunkedLocalAttentionSpec(block_size=64, attention_chunk_size=512, **HEADS), "Chunked"),
        (SinkFullAttentionSpec(block_size=64, sink_len=4, **HEADS), "SinkFullAttentionSpec"),
    ],
)
def test_what_is_not_understood_is_refused(spec: KVCacheSpec, reason: str) -> None:
    with pytest.raises(UnsupportedEngine, match=reason):
        layout(full(64), spec)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_other_parallelism_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedEngine, match=name):
        layout(full(64), parallel={name: 2})


def test_images_that_are_numbered_and_not_named_by_content_are_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="content"):
        layout(full(64), mm_cache_gb=0, prefix_caching=False)
    layout(full(64), mm_cache_gb=0)
    layout(full(64), mm_cache_gb=4, prefix_caching=False)
    layout(full(64), prefix_caching=False)


def described(tensors: dict[str, torch.Tensor], state_type: torch.dtype = torch.float32) -> str:
    """Return the description of one attention layer and one state, in these tensors."""
    specs = [full(64), state(64, dtypes=(state_type,))]
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer{i}"])
        for i, spec in enumerate(specs)
    ]
    config: Any = SimpleNamespace(num_blocks=7, kv_cache_groups=groups)
    parts = (
        PartLayout("attention", (LayerPages("layer0", 0, 96),), {0: 1}),
        PartLayout("state", (LayerPages("layer1", 1, 64),), {1: 1}),
    )
    made = EngineLayout(64, 64, (64, 64), parts, (Coverage.EVERY, Coverage.LAST), (None, None))
    return describe_layout(made, tensors, config)


def test_descriptions_differ_where_slots_read_differently() -> None:
    """Same bytes a page in each: order of heads and tokens, types of pages and of states."""
    states = torch.zeros(7, 1, 1, 64, dtype=torch.int8)
    pages = torch.zeros(7, 2, 4, 6, dtype=torch.bfloat16)
    swapped = torch.zeros(7, 4, 2, 6, dtype=torch.bfloat16).transpose(1, 2)
    assert pages.shape == swapped.shape
    texts = [
        described({"layer0": pages, "layer1": states}),
        described({"layer0": swapped, "layer1": states}),
        described({"layer0": pages.to(torch.float16), "layer1": states}),
        described({"layer0": pages, "layer1": states}, torch.float16),
    ]
    assert len(set(texts)) == len(texts)
    other = torch.zeros(14, 2, 4, 6, dtype=torch.bfloat16)[:7]
    assert described({"layer0": other, "layer1": states}) == texts[0]
