"""Tiny models: the same seed is the same model, and what is written is what was meant."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from millpond.launch.tiny import (
    END_OF_TEXT,
    END_OF_TEXT_ID,
    VOCAB_SIZE,
    TinyModel,
    make_adapter,
    make_attention,
    make_hybrid,
    make_sliding,
)

Make = Callable[..., TinyModel]
each = pytest.mark.parametrize("make", [make_hybrid, make_attention, make_sliding])


def contents(model: TinyModel) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(model.path.iterdir())}


def tensors(model: TinyModel) -> dict[str, np.ndarray[Any, Any]]:
    """Read the checkpoint by the format's own rules: length, header, bytes."""
    data = (model.path / "model.safetensors").read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + header_bytes])
    assert header.pop("__metadata__") == {"format": "pt"}
    found: dict[str, np.ndarray[Any, Any]] = {}
    end = 0
    for name, entry in header.items():
        assert entry["dtype"] == "BF16"
        start, stop = entry["data_offsets"]
        assert start == end, "no holes between tensors"
        end = stop
        raw = np.frombuffer(data[8 + header_bytes :], "<u2")[start // 2 : stop // 2]
        values = (raw.astype("<u4") << 16).view("<f4")
        found[name] = values.reshape(entry["shape"])
    assert end == len(data) - 8 - header_bytes
    return found


@each
def test_the_same_seed_writes_the_same_bytes(make: Make, tmp_path: Path) -> None:
    assert contents(make(tmp_path / "one", seed=5)) == contents(make(tmp_path / "two", seed=5))


@each
def test_another_seed_changes_the_weights_and_nothing_else(make: Make, tmp_path: Path) -> None:
    one, other = contents(make(tmp_path / "1", seed=1)), contents(make(tmp_path / "2", seed=2))
    assert {name for name in one if one[name] != other[name]} == {"model.safetensors"}


@each
def test_a_model_of_that_size_is_written(make: Make, tmp_path: Path) -> None:
    model = make(tmp_path, seed=1)
    config = json.loads((model.path / "config.json").read_text())
    found = tensors(model)
    assert sum(values.size for values in found.values()) == model.num_parameters
    assert config["vocab_size"] == found["lm_head.weight"].shape[0] == VOCAB_SIZE
    assert config["max_position_embeddings"] >= 32_768
    layers = {name.split(".")[2] for name in found if name.startswith("model.layers.")}
    assert len(layers) == config["num_hidden_layers"]


def test_the_hybrid_has_three_state_layers_to_one_attention_layer(tmp_path: Path) -> None:
    config = json.loads((make_hybrid(tmp_path, seed=1).path / "config.json").read_text())
    assert config["layer_types"].count("linear_attention") == 6
    assert config["layer_types"].count("full_attention") == 2


def test_the_sliding_model_has_five_windows_to_one_attention_layer(tmp_path: Path) -> None:
    config = json.loads(
        (make_sliding(tmp_path, seed=1, window=300).path / "config.json").read_text()
    )
    assert config["layer_types"].count("sliding_attention") == 5
    assert config["layer_types"].count("full_attention") == 1
    assert config["sliding_window"] == 300


def test_states_decay_slowly_and_matrices_keep_the_scale(tmp_path: Path) -> None:
    found = tensors(make_hybrid(tmp_path, seed=1))
    gated = "model.layers.0.linear_attn"
    assert np.all(found[f"{gated}.A_log"] == -6)
    assert np.all(found[f"{gated}.dt_bias"] == 0)
    for name in (f"{gated}.out_proj.weight", "model.layers.3.self_attn.o_proj.weight"):
        expected = found[name].shape[1] ** -0.5
        assert found[name].std() == pytest.approx(expected, rel=0.02)


def test_weights_are_rounded_to_the_nearest_bfloat16(tmp_path: Path) -> None:
    found = tensors(make_attention(tmp_path, seed=3))
    # The first tensor is the first that the generator draws.
    name, values = next(iter(found.items()))
    drawn = np.random.default_rng(3).standard_normal(values.shape, np.float32)
    exact = drawn * np.float32(values.shape[1] ** -0.5)
    # 8 bits of precision: half a unit in the last place is 2**-9 of the value.
    assert np.abs(values - exact).max() <= (np.abs(exact) * 2**-8).max(), name
    assert np.all(np.abs(values - exact) <= np.abs(exact) * 2**-8)
    assert np.abs((values - exact).mean()) < 1e-6, "truncation would be biased towards zero"


def test_every_token_has_a_text_and_text_survives(tmp_path: Path) -> None:
    path = make_hybrid(tmp_path, seed=1).path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID
    text = "Hällo, pond!\n\t日本"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_an_adapter_is_made_for_each_attention_layer(tmp_path: Path) -> None:
    one, same = make_adapter(tmp_path / "1", seed=1), make_adapter(tmp_path / "2", seed=1)
    other = make_adapter(tmp_path / "3", seed=2)
    assert (one / "adapter_model.safetensors").read_bytes() == (
        same / "adapter_model.safetensors"
    ).read_bytes()
    assert (one / "adapter_model.safetensors").read_bytes() != (
        other / "adapter_model.safetensors"
    ).read_bytes()
    config = json.loads((make_attention(tmp_path / "m", seed=1).path / "config.json").read_text())
    header = (one / "adapter_model.safetensors").read_bytes()
    assert header.count(b"q_proj.lora_A") == config["num_hidden_layers"]
