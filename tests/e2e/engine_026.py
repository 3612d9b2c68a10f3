"""The local lookup of vLLM 0.26 in the engine of 0.27.1, with Millpond's mend and without.

From vllm/v1/core/sched/scheduler.py of 0.26, `schedule`: with a connector, a hybrid model's
local hit is the longest one of any group, whether or not the other groups have it too.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from millpond.connector import MillpondConnector, versions


def computed_blocks_as_in_026(self: Any, request: Request) -> tuple[Any, int, int, bool]:  # noqa: ANN401
    blocks, num_tokens = self.coordinator.find_longest_cache_hit_per_group(
        request.block_hashes, request.num_tokens - 1
    )
    return self.create_kv_cache_blocks(blocks), max(num_tokens), 0, False


class Unmended(MillpondConnector):
    """Leaves the lookup as it was."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine: Any = KVCacheManager
        engine.get_computed_blocks_for_connector = computed_blocks_as_in_026


class Mended(Unmended):
    """Does what the connector does on 0.26."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        versions._reconcile_local_hits()
