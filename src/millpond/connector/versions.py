"""Everything that differs between the vLLM versions Millpond supports, and nothing else."""

import math
import os
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec

from millpond.model.errors import UnsupportedEngine

SHARED_HASH_SEED = "0"


def agree_on_hash_seed() -> None:
    """Make replicas start their hash chains alike without asking the user for a variable.

    Before 0.32 the seed is random unless PYTHONHASHSEED is set; the scheduler's connector is
    made before the engine reads it, in the same process. From 0.32 on a seed exists by
    default for sha256, and this setting only matters for xxhash. A user's own seed stays.
    """
    os.environ.setdefault("PYTHONHASHSEED", SHARED_HASH_SEED)


def empty_prefix_hash() -> bytes | None:
    """Return the digest that stands for the empty prefix, or None before it is set."""
    return getattr(kv_cache_utils, "NONE_HASH", None)


def hash_tokens(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> int:
    """Return how many tokens one entry of ``Request.block_hashes`` covers."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    if resolved is not None:
        return int(resolved)
    return int(kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    """Return one layer's spec out of a group's, which may hold one for each layer."""
    by_layer = getattr(spec, "kv_cache_specs", None)
    return spec if by_layer is None else by_layer[layer]


def page_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of data in one page of a layer, the engine's padding excluded."""
    unpadded = getattr(spec, "real_page_size_bytes", None)
    if unpadded is not None:
        return int(unpadded)
    # 0.27 and before know a recurrent layer's page only with its padding.
    if not isinstance(spec, MambaSpec):
        raise UnsupportedEngine(f"pages of kind {type(spec).__name__} have no known size")
    pairs = zip(spec.shapes, spec.dtypes, strict=True)
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in pairs)


def has_inner_checkpoints(spec: KVCacheSpec) -> bool:
    """Say whether a recurrent group keeps states inside a step, off its block boundaries."""
    return bool(getattr(spec, "num_prefill_checkpoint_blocks", 0))


def attention_backend(vllm_config: VllmConfig, layers: list[str]) -> str:
    """Return the names of the kernels that read these layers' pages, sorted and joined."""
    context: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    names: set[str] = set()
    for layer in layers:
        get_backend = getattr(context.get(layer), "get_attn_backend", None)
        if get_backend is not None:
            names.add(get_backend().get_name())
    return "+".join(sorted(names))
