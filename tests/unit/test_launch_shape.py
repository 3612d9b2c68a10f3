"""What config.json files of several families tell: the kind, the layers, the bytes."""

from typing import Any

import pytest

from millpond.launch.shape import Kind, model_shape
from tests.unit import launch_values as configs


@pytest.mark.parametrize(
    ("config", "kind", "num_attention", "num_recurrent"),
    [
        (configs.QWEN35, Kind.HYBRID, 16, 48),
        (configs.QWEN35_TEXT, Kind.HYBRID, 16, 48),
        (configs.QWEN3_NEXT, Kind.HYBRID, 12, 36),
        (configs.NEMOTRON, Kind.HYBRID, None, None),
        (configs.FALCON_H1, Kind.HYBRID, None, None),
        (configs.QWEN3, Kind.ATTENTION, 36, None),
        (configs.LLAMA, Kind.ATTENTION, 32, None),
        (configs.GEMMA3, Kind.SLIDING, 62, None),
        (configs.DEEPSEEK, Kind.LATENT, 61, None),
        (configs.DEEPSEEK_V4, Kind.FOREIGN, None, None),
        (configs.MAMBA, Kind.RECURRENT, None, None),
        (configs.LLAMA4, Kind.FOREIGN, None, None),
        (configs.WHISPER, Kind.FOREIGN, None, None),
        ({"model_type": "new", "architectures": ["NewModel"]}, Kind.UNKNOWN, None, None),
        ({}, Kind.UNKNOWN, None, None),
    ],
    ids=lambda value: (value.get("architectures") or ["?"])[0] if isinstance(value, dict) else None,
)
def test_each_family_has_its_kind(
    config: dict[str, Any], kind: Kind, num_attention: int | None, num_recurrent: int | None
) -> None:
    shape = model_shape(config)
    assert shape.kind is kind
    assert (None if shape.attention is None else shape.attention.num_layers) == num_attention
    assert (None if shape.recurrent is None else shape.recurrent.num_layers) == num_recurrent


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        (configs.QWEN35, 16 * 2 * 4 * 256 * 2),
        (configs.QWEN3, 36 * 2 * 8 * 128 * 2),
        (configs.LLAMA, 32 * 2 * 8 * (4096 // 32) * 2),
        (configs.DEEPSEEK, 61 * (512 + 64) * 2),
    ],
)
def test_bytes_of_a_token_in_16_bits(config: dict[str, Any], token_bytes: int) -> None:
    attention = model_shape(config).attention
    assert attention is not None
    assert attention.token_bytes(2, 1) == token_bytes


def test_the_27b_has_64_kib_a_token_and_154_mb_a_state() -> None:
    shape = model_shape(configs.QWEN35)
    assert shape.attention is not None
    assert shape.recurrent is not None
    assert shape.attention.token_bytes(2, 1) == 64 * 1024
    assert shape.recurrent.num_layers * shape.recurrent.layer_bytes() == 153_944_064
    assert shape.recurrent.num_layers * shape.recurrent.layer_bytes("bfloat16") == 78_446_592


@pytest.mark.parametrize(
    ("config", "num_ranks", "copies"),
    [(configs.QWEN35, 4, 1), (configs.QWEN35, 8, 2), (configs.DEEPSEEK, 8, 8)],
)
def test_ranks_beyond_the_heads_keep_copies(
    config: dict[str, Any], num_ranks: int, copies: int
) -> None:
    attention = model_shape(config).attention
    assert attention is not None
    assert attention.token_bytes(2, num_ranks) == copies * attention.token_bytes(2, 1)


def test_a_text_part_is_looked_into_and_the_whole_is_named() -> None:
    shape = model_shape(configs.QWEN35)
    assert shape.architecture == "Qwen3_5ForConditionalGeneration"
    assert (shape.num_heads, shape.max_tokens) == (24, 262_144)


def test_windows_that_are_switched_off_are_none() -> None:
    on = {**configs.QWEN3, "sliding_window": 4096, "use_sliding_window": True}
    assert model_shape(on).kind is Kind.SLIDING
    assert model_shape({**on, "use_sliding_window": False}).kind is Kind.ATTENTION
    full = {**on, "layer_types": ["full_attention"] * 36}
    assert model_shape(full).kind is Kind.ATTENTION


def test_layers_that_are_all_recurrent_are_no_hybrid() -> None:
    text = {**configs.QWEN35_TEXT, "layer_types": ["linear_attention"] * 64}
    assert model_shape(text).kind is Kind.RECURRENT


@pytest.mark.parametrize(
    ("told", "kind", "num_attention"),
    [
        ({"attn_type_list": [0, 0, 0, 1] * 9}, Kind.HYBRID, 9),  # MiniMax-Text-01
        ({"attn_type_list": [1] * 36}, Kind.ATTENTION, 36),  # MiniMax-M2
        ({"layer_group_size": 4}, Kind.HYBRID, 9),  # Bailing's linear ones
        ({"layer_group_size": 1}, Kind.ATTENTION, 36),
    ],
)
def test_linear_layers_that_are_numbered_or_grouped_are_seen(
    told: dict[str, Any], kind: Kind, num_attention: int
) -> None:
    shape = model_shape({**configs.QWEN3, **told})
    assert shape.kind is kind
    assert shape.attention is not None
    assert shape.attention.num_layers == num_attention
    assert shape.recurrent is None, "nothing is known of the size of such a state"


def test_a_sparse_index_leaves_the_size_open() -> None:
    assert model_shape({**configs.DEEPSEEK, "index_topk": 2048}).attention is None


@pytest.mark.parametrize("value", [None, "64", 0, -1, 2.5])
def test_counts_that_are_none_leave_a_model_unknown(value: object) -> None:
    assert model_shape({**configs.QWEN3, "num_hidden_layers": value}).kind is Kind.UNKNOWN
