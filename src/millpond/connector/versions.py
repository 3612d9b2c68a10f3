"""Everything that differs between the vLLM versions Millpond supports, and nothing else."""

import functools
import logging
import math
import os
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec
from vllm.v1.request import Request

from millpond.model.errors import UnsupportedEngine

logger = logging.getLogger("vllm.millpond")

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


def tells_of_each_step(vllm_config: VllmConfig) -> bool:
    """Return whether ``handle_preemptions`` comes before all that a step enqueues on the device.

    The second model runner zeroes blocks before it.
    """
    return not getattr(vllm_config, "use_v2_model_runner", True)


def uses_pages(output: SchedulerOutput) -> bool:
    """Return whether a step computes, zeroes or copies pages; an empty one may do the latter."""
    return bool(
        output.total_num_scheduled_tokens
        or getattr(output, "new_block_ids_to_zero", None)
        or getattr(output, "kv_cache_block_copies", None)
    )


def may_load_early(vllm_config: VllmConfig) -> bool:
    """Return whether nobody else is kept waiting, or served from the same blocks, meanwhile.

    Data-parallel engines compute together, also when one of them has nothing to do; with
    several connectors another one may fill blocks of a request that was aborted.
    """
    transfer = vllm_config.kv_transfer_config
    return (
        vllm_config.parallel_config.data_parallel_size == 1
        and transfer is not None
        and transfer.kv_connector == "MillpondConnector"
    )


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


def describe_state(spec: KVCacheSpec) -> str:
    """Return shapes, types and order of a recurrent layer's state; empty for other layers."""
    if not isinstance(spec, MambaSpec):
        return ""
    return f"{spec.shapes}{spec.dtypes}{mamba_utils.get_conv_state_layout()}"


def attention_backend(vllm_config: VllmConfig, layers: list[str]) -> str:
    """Return the names of the kernels that read these layers' pages, sorted and joined."""
    context: dict[str, Any] = vllm_config.compilation_config.static_forward_context
    names: set[str] = set()
    for layer in layers:
        get_backend = getattr(context.get(layer), "get_attn_backend", None)
        if get_backend is not None:
            names.add(get_backend().get_name())
    return "+".join(sorted(names))


def reports_failed_loads() -> bool:
    """Say whether the engine takes a failed load by the name of its request (0.32 and later)."""
    return hasattr(base.KVConnectorBase_V1, "get_transfer_results")


def transfer_results(sent: set[str], loaded: set[str], failed: set[str]) -> Any:  # noqa: ANN401
    """Return the engine's own type for ended transfers (called from 0.32 on)."""
    return base.KVConnectorTransferResults(sent, loaded, failed)


def splits_exact_multiples() -> bool:
    """Say whether a prompt of whole blocks keeps a state that it can itself resume from."""
    return hasattr(Scheduler, "_get_local_prefix_cache_hit")


def mend_engine(load_failed: Callable[[str], bool]) -> None:
    """Mend, in this process, what would make a supported version wrong or fragile.

    ``load_failed(request_id)`` says, once for each failure, that a request's load failed.
    """
    if not reports_failed_loads():
        _recompute_failed_loads(load_failed)
    if not hasattr(KVCacheManager, "get_computed_blocks_for_connector") and hasattr(
        HybridKVCacheCoordinator, "find_longest_cache_hit_per_group"
    ):
        _reconcile_local_hits()


def _recompute_failed_loads(load_failed: Callable[[str], bool]) -> None:
    """Before 0.32 a failed load can only be reported by block ids, and not for hybrids.

    The engine core would die of it. This marks the request as 0.32 does: nothing computed.
    """
    engine: Any = Scheduler
    original = engine._update_waiting_for_remote_kv  # noqa: SLF001

    @functools.wraps(original)
    def update_waiting(self: Any, request: Request) -> None:  # noqa: ANN401
        if load_failed(request.request_id):
            request.num_computed_tokens = 0
            self.failed_recving_kv_req_ids.add(request.request_id)
        original(self, request)

    engine._update_waiting_for_remote_kv = update_waiting  # noqa: SLF001


def _reconcile_local_hits() -> None:
    """0.26 takes the longest group's local hit where groups differ, and gives wrong tokens.

    That happens with any connector on a hybrid model: attention pages hit where no state is
    kept. Every group now answers the hit that all of them have.
    """
    coordinator: Any = HybridKVCacheCoordinator

    def reconciled(self: Any, block_hashes: Any, max_length: int) -> tuple[Any, Any]:  # noqa: ANN401
        blocks, num_tokens, *_ = self.find_longest_cache_hit(block_hashes, max_length)
        return blocks, (num_tokens,) * len(blocks)

    coordinator.find_longest_cache_hit_per_group = reconciled
    logger.warning(
        "event=engine_mended what=%r why=%r",
        "local prefix hits of hybrid models",
        "this version of vLLM takes hits on which its cache groups disagree",
    )
