"""The vLLM connector: a thin class that hands vLLM's calls to the two sides.

    --kv-transfer-config '{"kv_connector": "MillpondConnector",
                           "kv_connector_module_path": "millpond.connector",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                           "kv_connector_extra_config": {"replica": "a"}}'

Whatever goes wrong on Millpond's side, the engine serves: a model that is not supported, no
daemon, a daemon that dies or comes back cost hits, never requests.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from millpond.config import ConnectorConfig, connector_config
from millpond.connector import versions
from millpond.connector.geometry import engine_layout
from millpond.connector.identity import build_namespace, fingerprint
from millpond.connector.link import Link
from millpond.connector.metadata import RankLayout, StepMetadata, StepResults
from millpond.connector.scheduler import SchedulerSide
from millpond.connector.worker import WorkerSide
from millpond.model.errors import ExpectedError, UnsupportedEngine
from millpond.service.client import AdminClient, ReplicaIdentity, SchedulerClient
from millpond.transfer import CopyEngine, CpuCopyEngine
from millpond.transfer.checksums import page_hash
from millpond.transfer.link import LinkReport

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata

logger = logging.getLogger("vllm.millpond")

_STOP_S = 5.0


class MillpondConnector(KVConnectorBase_V1, SupportsHMA):
    """Shares this engine's key/value state with every replica at the same pool."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        versions.agree_on_hash_seed()
        extra: Mapping[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self._config = connector_config(extra, os.environ)
        self._replica = self._replica_name()
        self._num_ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._link: Link[SchedulerClient] | None = None
        self._rank_layout: RankLayout | None = None
        self._ranks: dict[int, RankLayout] = {}
        self._recompute_failed_loads()
        try:
            self._layout = engine_layout(kv_cache_config, vllm_config)
            if self._config.check_ratio:
                page_hash()
            # Once, at the start: files that are replaced later are not what is served.
            is_scheduler = role is KVConnectorRole.SCHEDULER
            self._weights = fingerprint(vllm_config) if is_scheduler else ""
        except UnsupportedEngine as error:
            logger.error("event=pool_unused role=%s reason=%r", role.name, str(error))
            return
        if is_scheduler:
            self._link = Link("scheduler", self._connect)
            self._scheduler = SchedulerSide(self._layout, self._link, self._config, self._num_ranks)
            versions.mend_engine(self._scheduler.take_load_failure)
        else:
            self._worker = self._make_worker(self._config)

    def _replica_name(self) -> str:
        """Return the configured name, or one that scheduler and workers derive alike.

        Data-parallel engines share a configuration: each but the first adds its rank.
        """
        engine_id = self._kv_transfer_config.engine_id or ""
        rank = self._vllm_config.parallel_config.data_parallel_rank
        name = self._config.replica or f"vllm-{engine_id[:8]}"
        return f"{name}-dp{rank}" if rank else name

    def _recompute_failed_loads(self) -> None:
        """A load that fails must cost time and not the request, whatever the user forgot.

        The engine's scheduler reads this setting right after it has made the connector.
        """
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning("event=setting_changed name=kv_load_failure_policy to=recompute")
            self._kv_transfer_config.kv_load_failure_policy = "recompute"

    def _make_worker(self, config: ConnectorConfig) -> WorkerSide:
        rank = get_tensor_model_parallel_rank()

        def tell_link(report: LinkReport) -> None:
            worker.tell_link(report)

        worker = WorkerSide(
            self._layout,
            self._identity(),
            config,
            _copy_engine(config, on_link=tell_link),
            rank,
        )
        return worker

    def _identity(self) -> ReplicaIdentity:
        # vLLM draws an engine id at each start and hands it to the scheduler and all workers.
        engine_id = self._kv_transfer_config.engine_id
        if engine_id is None:
            raise ValueError("kv_transfer_config.engine_id is not set")
        return ReplicaIdentity(
            replica=self._replica, session_key=engine_id, num_ranks=self._num_ranks
        )

    def _connect(self) -> SchedulerClient | None:
        """Join the pool, once the engine has drawn its hash seed (link thread)."""
        seed = versions.empty_prefix_hash()
        if seed is None:
            return None
        namespace = build_namespace(
            self._vllm_config,
            self._layout,
            self._ranks,
            empty_prefix=seed,
            weights=self._weights,
        )
        identity = self._identity()
        client = SchedulerClient.connect(
            str(self._config.socket),
            ReplicaIdentity(
                replica=identity.replica,
                session_key=identity.session_key,
                num_ranks=identity.num_ranks,
                namespace=namespace,
            ),
        )
        for replica, differences in client.welcome.differences.items():
            for difference in differences:
                logger.warning(
                    "event=not_shared replica=%s field=%s here=%r there=%r",
                    replica,
                    difference.field,
                    difference.mine,
                    difference.theirs,
                )
        return client

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache hands nothing over: a store that is dropped is a later miss."""
        return False

    # -------------------------------------------------------------- both sides

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Tell the scheduler's side what only this worker can see."""
        return self._rank_layout

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take what the workers said and begin to connect."""
        self._ranks = {
            rank: layout for rank, layout in metadata.items() if isinstance(layout, RankLayout)
        }
        if self._link is not None and self._ranks:
            self._link.start()

    def shutdown(self) -> None:
        """End connections and copies; bounded."""
        if self._link is not None:
            self._link.stop(_STOP_S)
        if self._worker is not None:
            self._worker.close()

    # -------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learn where this rank's pages are."""
        if self._worker is not None:
            self._rank_layout = self._worker.register(
                kv_caches, self._kv_cache_config, self._vllm_config
            )

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step: vLLM's first model runner calls this before it enqueues anything of it."""
        is_ours = isinstance(kv_connector_metadata, StepMetadata)
        if self._worker is not None:
            # Of a step that is not known: it may use any page, and so it waits.
            self._worker.begin_step(kv_connector_metadata if is_ours else StepMetadata())

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Begin this step's loads; returns at once."""
        if self._worker is not None:
            self._worker.start_loads(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: a request runs behind its load, as a whole."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: "AttentionMetadata",
        **kwargs: Any,
    ) -> None:
        """Nothing by layer: whole blocks are stored after the forward pass."""

    def wait_for_save(self) -> None:
        """Begin this step's stores; returns at once."""
        if self._worker is not None:
            self._worker.start_stores(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose kept stores, and those whose loads, have ended."""
        return self._worker.finished()[:2] if self._worker is not None else (None, None)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As ``get_finished``, with the loads that failed: the engine computes those again."""
        none: tuple[set[str], set[str], set[str]] = (set(), set(), set())
        return versions.transfer_results(
            *(none if self._worker is None else self._worker.finished())
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Hand what has ended to the scheduler's side."""
        return self._worker.take_results() if self._worker is not None else None

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepMetadata):
            raise ValueError(f"metadata of type {type(metadata).__name__}")
        return metadata

    # -------------------------------------------------------------- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take the block pool, to hold blocks while they are copied."""
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Remember a request that has arrived."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens the pool will supply, loaded beside the running batch."""
        if self._scheduler is None:
            return 0, False
        num_tokens = self._scheduler.num_matched_tokens(request, num_computed_tokens)
        if num_tokens is None:
            return None, False
        if not versions.splits_exact_multiples():
            self._scheduler.keep_last_state(request, num_computed_tokens + num_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Plan the load into the allocated blocks, if there is one."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return the jobs of this step."""
        if self._scheduler is None:
            return StepMetadata()
        return self._scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers have ended."""
        results = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(results, StepResults):
            self._scheduler.take_results(results)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As ``request_finished_all_groups``, for a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Report the request; keep it while its stores are in flight."""
        if self._scheduler is None:
            return False, None
        return self._scheduler.request_finished(request), None

    def has_pending_block_frees(self) -> bool:
        """Say whether blocks held for stores will be free soon, so that none is preempted."""
        return self._scheduler is not None and self._scheduler.frees_blocks_soon

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping until blocks that are being stored have been given back."""
        return self._scheduler is not None and self._scheduler.holds_blocks

    def reset_cache(self) -> bool | None:
        """Flush the pool: the engine's weights or adapters may have changed."""
        if self._scheduler is None:
            return None
        try:
            with AdminClient.connect(str(self._config.socket)) as admin:
                admin.flush()
        except ExpectedError as error:
            logger.warning("event=flush_failed reason=%r", str(error))
            return False
        return True


def _copy_engine(config: ConnectorConfig, *, on_link: Callable[[LinkReport], None]) -> CopyEngine:
    """Return the copy engine of the device on which this worker's pages are."""
    if current_platform.is_cuda():
        from millpond.transfer.cuda import CudaCopyEngine  # needs Triton: not on a CPU

        return CudaCopyEngine(torch.device("cuda", torch.cuda.current_device()), on_link=on_link)
    return CpuCopyEngine(delay_s=config.copy_delay_s)
