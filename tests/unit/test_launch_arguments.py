"""Which arguments each kind of model gets from which engine, and what is said about memory."""

from dataclasses import replace
from typing import Any

import pytest

from millpond.launch.arguments import Choice, Situation, choose_arguments, show_bytes
from millpond.launch.given import GivenArguments
from millpond.launch.shape import UNKNOWN, ModelShape, model_shape
from millpond.model.limits import GIB, MIB
from tests.unit import launch_values as configs
from tests.unit.launch_values import CPU, GPU

CACHING = ("--enable-prefix-caching",)
ALIGNED = ("--mamba-cache-mode", "align")
FLOAT32 = ("--mamba-ssm-cache-dtype", "float32")
EAGER = ("--enforce-eager",)
TINY = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 128,
    "linear_num_value_heads": 2,
    "mamba_ssm_dtype": "float32",
}


def choose(config: dict[str, Any], situation: Situation = GPU, *argv: str) -> Choice:
    return choose_arguments(model_shape(config), GivenArguments(argv), situation)


@pytest.mark.parametrize("config", [configs.QWEN35, configs.QWEN35_TEXT, configs.QWEN3_NEXT])
@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.1.dev1+g0123abc"])
def test_a_hybrid_on_gpus_needs_prefix_caching_alone(config: dict[str, Any], version: str) -> None:
    assert choose(config, replace(GPU, engine_version=version)).argv == CACHING


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.31.2"])
def test_before_032_the_states_mode_and_type_are_told(version: str) -> None:
    older = replace(GPU, engine_version=version)
    assert choose(configs.QWEN35, older).argv == (*CACHING, *ALIGNED, *FLOAT32)
    assert choose(configs.QWEN3_NEXT, older).argv == (*CACHING, *ALIGNED), "it names no type"
    assert choose(configs.NEMOTRON, older).argv == (*CACHING, *ALIGNED)


def test_before_032_the_kernels_for_cpus_need_float32() -> None:
    older = replace(CPU, engine_version="0.27.1")
    assert set(FLOAT32) < set(choose(configs.QWEN3_NEXT, older).argv)


@pytest.mark.parametrize(
    ("config", "block"), [(TINY, 256), (configs.QWEN35_TEXT, 896), (configs.QWEN3_NEXT, 1152)]
)
@pytest.mark.parametrize(
    ("version", "told"), [("0.32.0", ()), ("0.28.0", (*ALIGNED, *FLOAT32))], ids=["0.32", "0.28"]
)
def test_on_cpus_a_hybrids_block_is_told(
    config: dict[str, Any], block: int, version: str, told: tuple[str, ...]
) -> None:
    """Multiples of 128 whose pages of one layer are as long as a layer's state.

    Qwen3-Next names no type of its states, and the kernels for CPUs keep them in 32 bits: 2.05 MiB
    a layer, 1,048 tokens of 2 KiB.
    """
    choice = choose(config, replace(CPU, engine_version=version))
    assert choice.argv == (*CACHING, *EAGER, *told, "--block-size", str(block))
    assert choice.sizes.block_tokens == block


def test_states_that_the_user_wants_narrow_need_shorter_blocks_on_cpus() -> None:
    choice = choose(configs.QWEN3_NEXT, CPU, "--mamba-ssm-cache-dtype", "bfloat16")
    assert choice.argv == (*CACHING, *EAGER, "--block-size", "640")
    assert choice.sizes.state_bytes < 0.6 * choose(configs.QWEN3_NEXT, CPU).sizes.state_bytes


def test_on_gpus_the_block_is_left_to_the_engine() -> None:
    choice = choose(configs.QWEN35)
    assert "--block-size" not in choice.argv
    assert choice.sizes.block_tokens == 784, "as vLLM sets it"


@pytest.mark.parametrize(
    "config",
    [
        configs.QWEN3,
        configs.LLAMA,
        configs.GEMMA3,
        configs.DEEPSEEK,
        configs.MAMBA,
        configs.LLAMA4,
        {"model_type": "new"},
    ],
)
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_other_models_get_nothing_of_a_hybrids(config: dict[str, Any], version: str) -> None:
    assert choose(config, replace(GPU, engine_version=version)).argv == CACHING
    assert choose(config, replace(CPU, engine_version=version)).argv == (*CACHING, *EAGER)


@pytest.mark.parametrize(
    "given",
    [
        ("--mamba-ssm-cache-dtype", "bfloat16"),
        ("--mamba-cache-mode", "align"),
        ("--no-enable-prefix-caching",),
        ("--block-size", "1024"),
        ("--no-enforce-eager",),
    ],
)
def test_what_the_user_gave_is_not_chosen_again(given: tuple[str, ...]) -> None:
    older = replace(CPU, engine_version="0.27.1")
    name = given[0].replace("--no-", "--")
    assert name in choose(TINY, older).argv
    assert name not in choose(TINY, older, *given).argv


def test_every_argument_says_why() -> None:
    choice = choose(TINY, replace(CPU, engine_version="0.27.1"))
    assert len(choice.arguments) == 5
    assert all(len(each.why) > 20 for each in choice.arguments)


# ---------------------------------------------------------------- several GPUs


@pytest.mark.parametrize("config", [configs.QWEN35, configs.QWEN3, configs.DEEPSEEK])
@pytest.mark.parametrize("num_gpus", [2, 8, 16])
def test_a_replica_gets_one_gpu_and_those_left_idle_are_pointed_out(
    config: dict[str, Any], num_gpus: int
) -> None:
    choice = choose(config, replace(GPU, num_gpus=num_gpus))
    assert choice.argv == CACHING
    assert choice.sizes.num_ranks == 1
    notes = " ".join(choice.notes)
    is_told = (
        f"{num_gpus - 2} of {num_gpus} GPUs are left idle: more --replicas, or another " in notes
    )
    assert is_told is (num_gpus > 2)
    assert ("--tensor-parallel-size" in notes) is (num_gpus > 2)


@pytest.mark.parametrize("given", [("-tp", "1"), ("--data-parallel-size", "2")])
def test_a_users_own_parallelism_is_left_alone(given: tuple[str, ...]) -> None:
    choice = choose(configs.QWEN35, replace(GPU, num_gpus=8), *given)
    assert choice.argv == CACHING
    left = 8 - 2 * (2 if "2" in given else 1)
    assert f"{left} of 8 GPUs are left idle" in " ".join(choice.notes)


def test_copies_of_pages_are_pointed_out() -> None:
    choice = choose(configs.QWEN35, replace(GPU, num_gpus=16), "-tp", "8")
    assert "each page is in the pool 2 times" in " ".join(choice.notes)
    assert choice.sizes.token_bytes == 128 * 1024


# ---------------------------------------------------------------- memory


def test_the_size_of_the_longest_request_is_told() -> None:
    sizes = choose(configs.QWEN35).sizes
    assert sizes.request_bytes(262_144) == 262_144 * 65_536 + 153_944_064
    notes = " ".join(choose(configs.QWEN35).notes)
    assert "64 KiB of pages a token and 147 MiB a state" in notes
    assert "262,144 tokens takes 16.1 GiB, and the pool holds 15.9 of them" in notes


def test_a_pool_below_one_longest_request_is_pointed_out() -> None:
    notes = choose(configs.QWEN35, replace(GPU, pool_bytes=4 * GIB)).notes
    assert any("no more than 25% of it" in note for note in notes)
    shorter = choose(configs.QWEN35, replace(GPU, pool_bytes=4 * GIB), "--max-model-len", "32K")
    assert any("32,768 tokens takes 2.14 GiB" in note for note in shorter.notes)


@pytest.mark.parametrize(
    ("given", "token_bytes"),
    [
        (("--kv-cache-dtype", "fp8"), 32 * 1024),
        (("--kv-cache-dtype=fp8_e4m3",), 32 * 1024),
        (("--dtype", "float32"), 128 * 1024),
        (("--dtype", "bfloat16"), 64 * 1024),
    ],
)
def test_pages_are_as_wide_as_the_user_says(given: tuple[str, ...], token_bytes: int) -> None:
    assert choose(configs.QWEN35, GPU, *given).sizes.token_bytes == token_bytes


def test_narrow_states_are_half_as_large() -> None:
    sizes = choose(configs.QWEN35, GPU, "--mamba-ssm-cache-dtype", "bfloat16").sizes
    assert sizes.state_bytes == 78_446_592


@pytest.mark.parametrize("config", [configs.NEMOTRON, configs.FALCON_H1])
def test_states_of_unknown_size_are_said_to_be(config: dict[str, Any]) -> None:
    choice = choose(config)
    assert choice.sizes.token_bytes is None
    assert any("size of this model's recurrent states is not known" in n for n in choice.notes)


@pytest.mark.parametrize(
    ("left", "is_told"), [(8 * GIB - 1, True), (8 * GIB, False), (100 * GIB, False)]
)
def test_what_is_left_for_the_engines_is_looked_at(left: int, is_told: bool) -> None:
    situation = replace(GPU, available_bytes=GPU.pool_bytes + left)
    notes = " ".join(choose(configs.QWEN3, situation).notes)
    assert ("are left for 2 engines" in notes) is is_told


# ---------------------------------------------------------------- other notes


def unknown_notes(shape: ModelShape, situation: Situation, *argv: str) -> str:
    return " ".join(choose_arguments(shape, GivenArguments(argv), situation).notes)


def test_an_unknown_model_is_left_to_the_engine() -> None:
    assert "event=pool_unused" in unknown_notes(UNKNOWN, GPU)


@pytest.mark.parametrize(
    ("version", "is_told"),
    [
        ("0.34.0", True),
        ("1.0", True),
        ("nightly", True),
        ("0.1.dev1+g0123abc", True),
        ("0.0.0", True),
        ("0.33.9", False),
        ("0.26.0", False),
    ],
)
def test_versions_that_were_never_tried_are_pointed_out(version: str, is_told: bool) -> None:
    notes = unknown_notes(UNKNOWN, replace(GPU, engine_version=version))
    assert (f"vLLM {version} has not been tried" in notes) is is_told


def test_arguments_in_a_file_are_said_to_be_unseen() -> None:
    notes = unknown_notes(UNKNOWN, GPU, "--config", "vllm.yaml", "--hf-overrides", "{}")
    assert "what --config says has not been looked at: nothing is chosen" in notes
    assert "what --hf-overrides says has not been looked at" in notes


@pytest.mark.parametrize("given", [("--config", "vllm.yaml"), ("--config=vllm.yaml",)])
def test_beside_a_file_nothing_is_chosen_that_would_count_before_it(
    given: tuple[str, ...],
) -> None:
    older = replace(CPU, engine_version="0.27.1")
    assert "--block-size" in choose(TINY, older).argv
    choice = choose(TINY, older, *given)
    assert choice.argv == (*CACHING, *EAGER)
    assert choice.sizes.token_bytes is None, "the file may say how wide pages are"


def test_a_file_may_use_gpus_that_seem_idle() -> None:
    many = replace(GPU, num_gpus=8)
    assert "left idle" in " ".join(choose(configs.QWEN3, many).notes)
    assert "left idle" not in " ".join(choose(configs.QWEN3, many, "--config", "f.yaml").notes)


def test_steps_are_left_alone_and_said_to_be() -> None:
    assert any("--max-num-batched-tokens" in note for note in choose(configs.QWEN35).notes)
    assert "--max-num-batched-tokens" not in choose(configs.QWEN35).argv


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(512, "512 B"), (65_536, "64 KiB"), (153_944_064, "147 MiB"), (MIB * 1020, "1020 MiB")],
)
def test_bytes_are_shown_to_three_digits(num_bytes: int, text: str) -> None:
    assert show_bytes(num_bytes) == text
