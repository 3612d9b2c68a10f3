"""From the engine's cache configuration to parts: which groups, which pages, how many bytes.

    vLLM group                        part of a block        coverage
    full attention                    "attention"            every block of the prefix
    sliding window of w tokens        "window-w"             the last ceil((w - 1) / block),
                                                             of each the last w - 1 tokens
    recurrent (gated delta net, …)    "state"                the last block

Groups that map to one part lie together in its slots.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from millpond.connector import versions
from millpond.model.errors import UnsupportedEngine
from millpond.model.layout import LayerPages, PageGeometry, PartLayout, Segment, page_geometry
from millpond.model.limits import BLOCK_TOKENS_MIN
from millpond.model.names import Coverage
from millpond.model.namespace import PartSpec
from millpond.transfer.copies import LayerMemory


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How an engine's block tables and pages map to blocks and parts.

    ``block_tokens`` is Millpond's block, ``hash_tokens`` the engine's unit of hashing,
    ``group_tokens[g]`` the length of an engine block of group g. ``coverages`` and
    ``windows`` belong to ``parts`` by position.
    """

    block_tokens: int
    hash_tokens: int
    group_tokens: tuple[int, ...]
    parts: tuple[PartLayout, ...]
    coverages: tuple[Coverage, ...]
    windows: tuple[int | None, ...]

    def part_specs(self, num_ranks: int) -> tuple[PartSpec, ...]:
        """Return the parts as the pool knows them, for all ranks together."""
        return tuple(
            PartSpec(part.name, coverage, part.rank_bytes * num_ranks, window)
            for part, coverage, window in zip(self.parts, self.coverages, self.windows, strict=True)
        )

    @property
    def state_blocks(self) -> float:
        """Of how many blocks the pages are as large as one state; 0 without states or pages."""
        sizes = dict.fromkeys(Coverage, 0)
        for part, coverage in zip(self.parts, self.coverages, strict=True):
            sizes[coverage] += part.rank_bytes
        pages = sizes[Coverage.EVERY]
        return sizes[Coverage.LAST] / pages if pages else 0.0

    def table(self, part: int, group: int, block: int, ids: Sequence[int]) -> list[int]:
        """Return the engine blocks of ``group`` that make Millpond's ``block``; 0 for none."""
        first, last = self.block_span(part, group, block)
        return [ids[i] if i < len(ids) else 0 for i in range(first, last)]

    def block_span(self, part: int, group: int, block: int) -> tuple[int, int]:
        """Return the range of positions in the group's block table that make ``block``."""
        tokens = self.group_tokens[group]
        last = (block + 1) * self.block_tokens // tokens
        return last - self.parts[part].blocks[group], last


def engine_layout(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> EngineLayout:
    """Return the layout, or raise ``UnsupportedEngine`` with what stands in the way."""
    _check_parallelism(vllm_config)
    _check_resumable(vllm_config)
    _check_names_of_inputs(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise UnsupportedEngine("the model keeps no key/value state: there is nothing to share")
    tokens = tuple(int(group.kv_cache_spec.block_size) for group in groups)
    smallest = math.lcm(*tokens)
    block_tokens = smallest * math.ceil(BLOCK_TOKENS_MIN / smallest)
    hash_tokens = versions.hash_tokens(kv_cache_config, vllm_config)
    named: dict[tuple[str, Coverage, int | None], list[int]] = {}
    for index, group in enumerate(groups):
        named.setdefault(_part_of(group, block_tokens, hash_tokens), []).append(index)
    ordered = sorted(named.items(), key=lambda item: _COVERAGE_ORDER.index(item[0][1]))
    parts: list[PartLayout] = []
    for (name, coverage, _), indices in ordered:
        layers = tuple(
            LayerPages(layer, index, _page_bytes(groups[index], layer))
            for index in indices
            for layer in groups[index].layer_names
        )
        reach = _reach_tokens(groups[indices[0]], coverage, block_tokens)
        blocks = {i: min(block_tokens // tokens[i], math.ceil(reach / tokens[i])) for i in indices}
        parts.append(PartLayout(name, layers, blocks))
    return EngineLayout(
        block_tokens=block_tokens,
        hash_tokens=hash_tokens,
        group_tokens=tokens,
        parts=tuple(parts),
        coverages=tuple(key[1] for key, _ in ordered),
        windows=tuple(key[2] for key, _ in ordered),
    )


def _reach_tokens(group: KVCacheGroupSpec, coverage: Coverage, block_tokens: int) -> int:
    """Return how many tokens before a block's end a request that resumes there may look at.

    A window that is shorter than a block never needs the block's first pages, and the engine
    has dropped them by the time that the block is full.
    """
    spec = versions.layer_spec(group.kv_cache_spec, group.layer_names[0])
    if coverage is Coverage.LAST:
        return 1
    if isinstance(spec, SlidingWindowSpec):
        return max(1, min(block_tokens, spec.sliding_window - 1))
    return block_tokens


_COVERAGE_ORDER = (Coverage.EVERY, Coverage.WINDOW, Coverage.LAST)


def layer_memory(
    layout: EngineLayout,
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    num_blocks: int,
) -> tuple[tuple[LayerMemory, ...], ...]:
    """Return where each part's layers lie in this process, checked against the page sizes.

    ``UnsupportedEngine`` where a tensor does not hold exactly one page of the announced size
    a block: bytes that are not understood are not copied.
    """
    found: list[tuple[LayerMemory, ...]] = []
    for part in layout.parts:
        row: list[LayerMemory] = []
        for layer in part.layers:
            if layer.layer not in kv_caches:
                raise UnsupportedEngine(f"the engine registered no cache for {layer.layer}")
            cache = kv_caches[layer.layer]
            tensors = [cache] if isinstance(cache, torch.Tensor) else list(cache)
            row.append(_memory_of(layer, tensors, num_blocks))
        found.append(tuple(row))
    return tuple(found)


def describe_layout(
    layout: EngineLayout,
    kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
    kv_cache_config: KVCacheConfig,
) -> str:
    """Return a text that is equal for two ranks exactly when their slots read alike.

    Bytes of one length can be ordered in several ways (heads before tokens or after), and
    mean several types: shape, order and type of each tensor are part of it, and what the
    engine says of a state, whose tensor may be plain bytes. The number of blocks is not.
    """
    num_blocks = kv_cache_config.num_blocks
    lines: list[str] = []
    for part in layout.parts:
        for layer in part.layers:
            cache = kv_caches[layer.layer]
            tensors = [cache] if isinstance(cache, torch.Tensor) else list(cache)
            seen = [_describe_tensor(tensor, num_blocks) for tensor in tensors]
            spec = kv_cache_config.kv_cache_groups[layer.group].kv_cache_spec
            says = versions.describe_state(versions.layer_spec(spec, layer.layer))
            lines.append(
                f"{part.name}:{layer.layer}:{part.blocks[layer.group]}x{layer.page_bytes}"
                f":{','.join(seen)}:{says}"
            )
    return ";".join(lines)


def _describe_tensor(tensor: torch.Tensor, num_blocks: int) -> str:
    """Return sizes in the order of their strides, blocks left out, and the type."""
    order = sorted(range(tensor.dim()), key=lambda i: (-tensor.stride(i), i))
    sizes = [
        f"{i}:{'blocks' if tensor.shape[i] % num_blocks == 0 else tensor.shape[i]}" for i in order
    ]
    return f"{tensor.dtype}({' '.join(sizes)})"


def _memory_of(layer: LayerPages, tensors: list[torch.Tensor], num_blocks: int) -> LayerMemory:
    base = min(int(t.data_ptr()) for t in tensors)
    segments: list[Segment] = []
    strides: set[int] = set()
    for tensor in tensors:
        try:
            geometry = page_geometry(
                tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), num_blocks
            )
        except ValueError as error:
            raise UnsupportedEngine(f"cannot read the cache of {layer.layer}: {error}") from error
        shift = int(tensor.data_ptr()) - base
        strides.add(geometry.stride_bytes)
        segments += [Segment(s.offset_bytes + shift, s.num_bytes) for s in geometry.segments]
    if len(segments) == 1 and segments[0].num_bytes > layer.page_bytes:
        # The engine pads recurrent pages to the unified page: the data comes first.
        segments = [Segment(segments[0].offset_bytes, layer.page_bytes)]
    geometry = PageGeometry(max(strides), tuple(segments))
    if len(strides) != 1 or geometry.page_bytes != layer.page_bytes:
        raise UnsupportedEngine(
            f"the cache of {layer.layer} holds {geometry.page_bytes} bytes a block, "
            f"not {layer.page_bytes} (strides {sorted(strides)})"
        )
    return LayerMemory(base, geometry)


def _part_of(
    group: KVCacheGroupSpec, block_tokens: int, hash_tokens: int
) -> tuple[str, Coverage, int | None]:
    # Exact types: a subclass keeps its pages by rules of its own, which are not known here.
    spec: KVCacheSpec = versions.layer_spec(group.kv_cache_spec, group.layer_names[0])
    if type(spec) is MambaSpec:
        if spec.mamba_cache_mode != "align":
            raise UnsupportedEngine(
                f"recurrent states are kept in mode {spec.mamba_cache_mode!r}, which has none "
                "that a request can resume from: start the engine with --enable-prefix-caching"
            )
        if spec.num_speculative_blocks:
            raise UnsupportedEngine(
                "speculative decoding keeps scratch states beside the recurrent ones: "
                "not supported together with a hybrid model"
            )
        if hash_tokens < spec.block_size:
            # The engine's own cache then hits inside blocks. It copies such a block before the next
            # step writes to it, and nobody orders that copy against a load into the block.
            raise UnsupportedEngine(
                f"recurrent states are kept every {hash_tokens} tokens inside blocks of "
                f"{spec.block_size}: start the engine without --prefix-match-unit"
            )
        return ("state", Coverage.LAST, None)
    if type(spec) is SlidingWindowSpec:
        window = math.ceil((spec.sliding_window - 1) / block_tokens)
        return (f"window-{spec.sliding_window}", Coverage.WINDOW, max(1, window))
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return ("attention", Coverage.EVERY, None)
    raise UnsupportedEngine(f"key/value state of kind {type(spec).__name__} is not supported")


def _page_bytes(group: KVCacheGroupSpec, layer: str) -> int:
    spec = versions.layer_spec(group.kv_cache_spec, layer)
    return versions.page_bytes(spec)


def _check_resumable(vllm_config: VllmConfig) -> None:
    """Refuse models that must see a whole prompt at once, and scales that engines make up."""
    model = vllm_config.model_config
    if not getattr(model, "is_prefix_caching_supported", True):
        raise UnsupportedEngine("this model cannot resume from a prefix (its pooling needs all)")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise UnsupportedEngine(
            "--calculate-kv-scales makes each engine scale its pages by its own first batch: "
            "use scales from the checkpoint"
        )


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise UnsupportedEngine(f"{name} is {size}: Millpond serves engines with 1")


def _check_names_of_inputs(vllm_config: VllmConfig) -> None:
    """Refuse an engine that numbers its images: two replicas give one number to two images."""
    multimodal = vllm_config.model_config.multimodal_config
    if (
        multimodal is not None
        and multimodal.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise UnsupportedEngine(
            "without a processor cache and without prefix caching the engine does not name "
            "multimodal inputs by their content: unset --mm-processor-cache-gb 0 or start it with "
            "--enable-prefix-caching"
        )
