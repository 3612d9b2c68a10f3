"""What cannot work is refused, with the reason and a remedy; what can is not."""

import json
from dataclasses import replace
from typing import Any

import pytest

from millpond.launch.arguments import Situation, choose_arguments
from millpond.launch.given import GivenArguments
from millpond.launch.refusals import find_refusals
from millpond.launch.shape import UNKNOWN, model_shape
from millpond.model.limits import GIB, MIB
from tests.unit import launch_values as configs
from tests.unit.launch_values import CPU, GPU


def refusals(config: dict[str, Any], situation: Situation = GPU, *argv: str) -> list[str]:
    shape = model_shape(config)
    given = GivenArguments(argv)
    return find_refusals(shape, given, situation, choose_arguments(shape, given, situation))


def the_refusal(config: dict[str, Any], situation: Situation = GPU, *argv: str) -> str:
    (only,) = refusals(config, situation, *argv)
    return only


@pytest.mark.parametrize(
    "config",
    [
        configs.QWEN35,
        configs.QWEN35_TEXT,
        configs.QWEN3_NEXT,
        configs.NEMOTRON,
        configs.FALCON_H1,
        configs.QWEN3,
        configs.LLAMA,
        configs.GEMMA3,
        configs.DEEPSEEK,
        {"model_type": "new"},
    ],
)
@pytest.mark.parametrize("version", ["0.27.1", "0.32.0", "0.33.0", "0.40.0", "nightly"])
def test_models_that_can_be_shared_are_let_through(config: dict[str, Any], version: str) -> None:
    assert refusals(config, replace(GPU, engine_version=version)) == []


# ---------------------------------------------------------------- models and versions


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (configs.MAMBA, "recurrent layers alone"),
        (configs.LLAMA4, "Llama4ForConditionalGeneration keeps its keys and values in a way"),
        (configs.WHISPER, "WhisperForConditionalGeneration keeps"),
        (configs.DEEPSEEK_V4, "DeepseekV4ForCausalLM keeps"),
    ],
)
def test_models_that_cannot_be_shared_are_refused(config: dict[str, Any], reason: str) -> None:
    refusal = the_refusal(config)
    assert reason in refusal
    assert "Start vLLM without" in refusal


def test_an_engine_that_is_too_old_is_refused() -> None:
    refusal = the_refusal(configs.LLAMA, replace(GPU, engine_version="0.25.3"))
    assert "vLLM 0.25.3 is older" in refusal
    assert "install 0.26 to 0.33" in refusal


@pytest.mark.parametrize("version", ["0.1.dev1+g0123abc", "0.0.0", "0.1.0+cu129"])
@pytest.mark.parametrize("config", [configs.LLAMA, configs.QWEN35_TEXT])
def test_a_build_without_a_number_is_not_taken_for_an_old_one(
    config: dict[str, Any], version: str
) -> None:
    assert refusals(config, replace(GPU, engine_version=version)) == []


def test_026_serves_qwen35_whole_or_not_at_all() -> None:
    old = replace(GPU, engine_version="0.26.0")
    assert "text-only" in the_refusal(configs.QWEN35_TEXT, old)
    assert refusals(configs.QWEN35, old) == []


def test_qwen3_next_needs_a_later_engine_on_cpus() -> None:
    assert "0.27 for CPUs" in the_refusal(configs.QWEN3_NEXT, replace(CPU, engine_version="0.27.1"))
    assert refusals(configs.QWEN3_NEXT, CPU) == []


# ---------------------------------------------------------------- the user's arguments


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--kv-transfer-config", "{}"], "would replace Millpond's connector"),
        (["--kv_transfer_config={}"], "would replace Millpond's connector"),
        (["--kv-transfer-config.kv_connector", "X"], "would replace Millpond's connector"),
        (["--kv-offloading-size", "10"], "vLLM's own connector"),
        (["--port", "8001"], "the same for all replicas"),
        (["--host", "10.0.0.1"], "takes replicas off 127.0.0.1"),
        (["--uds", "/s"], "takes a replica off the address"),
        (["--ssl-keyfile", "k"], "speak TLS"),
        (["--model", "other"], "give it before --"),
        (["--headless"], "without a server"),
        (["--calculate-kv-scales"], "none could read another's"),
        (["--use-replayssm"], "beside any connector"),
        (["--pipeline-parallel-size", "2", "-tp", "1"], "cuts pages"),
        (["-dcp", "2"], "cuts pages"),
        (["--kv-events-config", '{"enable_kv_cache_events": true}'], "publish at one address"),
    ],
)
@pytest.mark.parametrize("config", [configs.LLAMA, configs.QWEN35])
def test_arguments_against_a_shared_pool_are_refused(
    config: dict[str, Any], argv: list[str], reason: str
) -> None:
    refusal = the_refusal(config, replace(GPU, num_gpus=8), *argv)
    assert reason in refusal
    assert refusal.startswith(argv[0].replace("_", "-").partition("=")[0].partition(".")[0]) or (
        argv[0].startswith("-d")
    )


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--no-enable-prefix-caching"], "keeps none with --no-enable-prefix-caching"),
        (["--mamba-cache-mode", "none"], "keeps none: use align"),
        (["--mamba-cache-mode=all"], "one at every block"),
        (["--no-enable-chunked-prefill"], "between the steps"),
        (["--disable-chunked-mm-input"], "inside of images"),
        (["--disable-hybrid-kv-cache-manager"], "needs vLLM's manager"),
        (["--prefix-match-unit", "64"], "inside of blocks"),
        (["--speculative-config", "{}"], "scratch states"),
        (["--spec-method", "mtp"], "scratch states"),
    ],
)
def test_arguments_against_a_hybrids_states_are_refused(argv: list[str], reason: str) -> None:
    assert reason in the_refusal(configs.QWEN35, GPU, *argv)
    assert refusals(configs.LLAMA, GPU, *argv) == [], "only a hybrid resumes from states"


@pytest.mark.parametrize(
    "argv",
    [
        ["--mamba-cache-mode", "align"],
        ["--no-enable-prefix-caching", "--enable-prefix-caching"],
        ["--max-num-batched-tokens", "2048"],
        ["--host", "0.0.0.0"],
        ["--host", "::"],
        ["--host", ""],
        ["--kv-offloading-backend", "lmcache"],  # without a size vLLM offloads nothing
        ["--tensor-parallel-size", "0"],  # vLLM says what is wrong with it
        ["-tp", "0", "-dp", "0", "--block-size", "0", "--max-model-len", "0"],
        ["--served-model-name", "m", "--api-key", "k", "--block-size", "1024"],
        ["--pipeline-parallel-size", "1"],
    ],
)
def test_other_arguments_are_the_users_affair(argv: list[str]) -> None:
    assert refusals(configs.QWEN35, GPU, *argv) == []


@pytest.mark.parametrize(
    ("num_replicas", "options", "is_refused"),
    [
        (2, {}, True),
        (1, {}, False),
        (2, {"endpoint": "ipc:///run/events"}, True),
        (2, {"endpoint": "tcp://collector:5557"}, False),
        (2, {"endpoint": "tcp://collector:5557", "replay_endpoint": "tcp://*:5558"}, True),
        (2, {"enable_kv_cache_events": False}, False),
    ],
)
def test_replicas_cannot_all_listen_at_one_address(
    num_replicas: int, options: dict[str, object], is_refused: bool
) -> None:
    config = json.dumps({"enable_kv_cache_events": True, **options})
    situation = replace(GPU, num_replicas=num_replicas)
    found = refusals(configs.LLAMA, situation, "--kv-events-config", config)
    assert len(found) == is_refused


def test_all_that_cannot_work_is_told_at_once() -> None:
    found = refusals(configs.QWEN35, GPU, "--port", "1", "--mamba-cache-mode", "none", "-tp", "5")
    assert len(found) == 4, found


# ---------------------------------------------------------------- GPUs and memory


@pytest.mark.parametrize(
    ("num_gpus", "argv", "reason"),
    [
        (1, [], "2 replicas need 2 GPUs and 1 can be used"),
        (2, ["-tp", "2"], "2 replicas of 2 GPUs each need 4 GPUs and 2 can be used"),
        (7, ["-tp", "2", "-dp", "2"], "2 replicas of 4 GPUs each need 8 GPUs and 7 can be used"),
        (16, ["-tp", "7"], "does not divide the model's 24 attention heads"),
    ],
)
def test_gpus_that_do_not_suffice_are_counted(num_gpus: int, argv: list[str], reason: str) -> None:
    assert reason in the_refusal(configs.QWEN35, replace(GPU, num_gpus=num_gpus), *argv)


def test_on_cpus_ranks_need_no_gpu() -> None:
    assert refusals(configs.QWEN35, CPU, "-tp", "2") == []


def test_a_pool_that_does_not_fit_is_refused_with_both_figures() -> None:
    refusal = the_refusal(configs.LLAMA, replace(GPU, available_bytes=100 * GIB))
    assert "a pool of 256 GiB does not fit" in refusal
    assert "leaves 100 GiB" in refusal


def test_a_pool_below_one_block_is_refused() -> None:
    """784 tokens of 64 KiB are 49 MiB, and a state 147 MiB."""
    assert "in 196 MiB" in the_refusal(configs.QWEN35, replace(GPU, pool_bytes=190 * MIB))


def test_states_beyond_their_share_are_refused() -> None:
    small = replace(GPU, pool_bytes=256 * MIB)
    assert "may take 50% of a pool of 256 MiB, and one has 147 MiB" in the_refusal(
        configs.QWEN35, small
    )
    assert refusals(configs.QWEN35, replace(small, state_ratio=0.6)) == []


def test_an_unknown_model_is_refused_nothing_for_its_size() -> None:
    tiny = replace(GPU, pool_bytes=16 * MIB)
    given = GivenArguments(())
    assert find_refusals(UNKNOWN, given, tiny, choose_arguments(UNKNOWN, given, tiny)) == []
