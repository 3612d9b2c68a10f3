"""What the connector mends in the engine, on vLLM's own prefix cache."""

import logging

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.request import Request

from millpond.connector import versions

BLOCK = 16


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> KVCacheManager:
    """Attention pages and recurrent states; what is mended on the engine's class is undone."""
    name = "find_longest_cache_hit_per_group"
    monkeypatch.setattr(HybridKVCacheCoordinator, name, getattr(HybridKVCacheCoordinator, name))
    init_none_hash(sha256)
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32
    )
    state = MambaSpec(
        block_size=BLOCK,
        shapes=((16,),),
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    config = KVCacheConfig(
        num_blocks=40,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["s"], state)],
    )
    return KVCacheManager(
        config, max_model_len=1000, scheduler_block_size=BLOCK, hash_block_size=BLOCK
    )


def request(token_ids: list[int]) -> Request:
    return Request(
        request_id=str(token_ids[-1]),
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def compute_to_the_third_block(manager: KVCacheManager) -> list[int]:
    """Compute a prompt in one step: pages of three blocks, and a state after the third alone."""
    ids = list(range(3 * BLOCK))
    assert manager.allocate_slots(request(ids), len(ids)) is not None
    return ids


def hits(manager: KVCacheManager, ids: list[int]) -> tuple[int, ...]:
    coordinator = manager.coordinator
    assert isinstance(coordinator, HybridKVCacheCoordinator)
    hashes = request(ids).block_hashes
    blocks, num_tokens = coordinator.find_longest_cache_hit_per_group(hashes, len(ids) - 1)
    assert [len(found) * BLOCK for found in blocks] == list(num_tokens)
    return num_tokens


def test_local_hits_are_those_that_every_group_has(manager: KVCacheManager) -> None:
    ids = compute_to_the_third_block(manager)
    forked = [*ids[: 2 * BLOCK], *range(1000, 1000 + BLOCK)]
    whole = [*ids, 2000]
    assert hits(manager, forked) == (2 * BLOCK, 0), "or there is nothing to mend"
    assert hits(manager, whole) == (3 * BLOCK, 3 * BLOCK)
    versions._reconcile_local_hits()
    assert hits(manager, forked) == (0, 0)
    assert hits(manager, whole) == (3 * BLOCK, 3 * BLOCK)


def test_only_an_engine_that_takes_diverging_hits_is_mended(
    manager: KVCacheManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ids = compute_to_the_third_block(manager)
    forked = [*ids[: 2 * BLOCK], *range(1000, 1000 + BLOCK)]
    versions.mend_engine(lambda _: False)
    assert hits(manager, forked) == (2 * BLOCK, 0)
    # As in 0.26, where the scheduler asks the coordinator and takes the longest hit.
    monkeypatch.delattr(KVCacheManager, "get_computed_blocks_for_connector")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING, "vllm.millpond"):
        versions.mend_engine(lambda _: False)
    assert hits(manager, forked) == (0, 0)
    assert "event=engine_mended" in caplog.text
