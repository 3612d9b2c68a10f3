"""Tiny models made on the spot: real checkpoints with random weights, and a tokenizer.

They exist to prove that moved key/value data is right, so wrong data must *change the
output*: attention is sharp (a page matters), recurrent states decay slowly (a state matters),
and the logits have heavy tails (the greedy choice is far from a tie, so that rounding alone
does not change it).
"""

import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE: Final = 2048
END_OF_TEXT: Final = "<|endoftext|>"
END_OF_TEXT_ID: Final = VOCAB_SIZE - 1
MAX_POSITIONS: Final = 65_536
HYBRID_ENGINE_ARGS: Final = ("--block-size", "256")
"""Left alone, vLLM takes blocks of 128 for a hybrid this small while its caches have 256, and
keeps no state at the end of a prompt that it sees for the first time."""

_HIDDEN: Final = 256
_INTERMEDIATE: Final = 1024
_ATTENTION_HEADS: Final = 8
_KV_HEADS: Final = 2
_HEAD_DIM: Final = 128
_ATTENTION_LAYERS: Final = 4
_ADAPTER_RANK: Final = 8
_GDN_HEADS: Final = 2
_GDN_HEAD_DIM: Final = 128
_GDN_KERNEL: Final = 4
_WINDOW: Final = 512
"""Tokens that a sliding-window layer looks back over, as in Gemma3."""
_SCORE_STD: Final = 3.0
"""Spread of attention scores: with 1 a softmax over thousands of random keys is flat."""
_LOGIT_SPREAD: Final = 0.5
"""Sigma of the log-normal scale of the output rows; 0 would be plain Gaussian logits."""
_GDN_A_LOG: Final = -6.0
"""A state forgets over some 600 tokens; with vLLM's defaults it would forget within a few."""


@dataclass(frozen=True, slots=True)
class TinyModel:
    """A model on disk: what to pass as ``--model``, and what it needs to be asked with."""

    path: Path
    num_parameters: int
    vocab_size: int = VOCAB_SIZE
    max_positions: int = MAX_POSITIONS


@dataclass(frozen=True, slots=True)
class _Weight:
    """One tensor to draw: normal with ``std`` around ``mean``; a plain constant if std is 0."""

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    mean: float = 0.0
    row_spread: float = 0.0


def make_hybrid(path: Path, *, seed: int) -> TinyModel:
    """Write a Qwen3.5-shaped hybrid: six gated-delta-net and two full-attention layers.

    The same seed writes the same bytes. The folder is created; files in it are replaced.
    """
    kinds = ("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": _GDN_KERNEL,
        "linear_key_head_dim": _GDN_HEAD_DIM,
        "linear_value_head_dim": _GDN_HEAD_DIM,
        "linear_num_key_heads": _GDN_HEADS,
        "linear_num_value_heads": _GDN_HEADS,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
        },
        "partial_rotary_factor": 0.25,
    }
    return _write_model(path, config, list(_hybrid_weights(kinds)), seed)


def make_attention(path: Path, *, seed: int) -> TinyModel:
    """Write a Qwen3-shaped model: four layers of full attention.

    The same seed writes the same bytes. The folder is created; files in it are replaced.
    """
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": _ATTENTION_LAYERS,
        "layer_types": ["full_attention"] * _ATTENTION_LAYERS,
        "rope_theta": 1_000_000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    return _write_model(path, config, list(_attention_weights(_ATTENTION_LAYERS)), seed)


def make_sliding(path: Path, *, seed: int, window: int = _WINDOW) -> TinyModel:
    """Write a Gemma3-shaped model: five layers that see ``window`` tokens, one that sees all.

    The same seed writes the same bytes. The folder is created; files in it are replaced.
    """
    kinds = ("sliding_attention",) * 5 + ("full_attention",)
    config = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": window,
        "query_pre_attn_scalar": _HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    return _write_model(path, config, list(_sliding_weights(len(kinds))), seed)


def make_adapter(path: Path, *, seed: int) -> Path:
    """Write a LoRA adapter for ``make_attention``'s model that changes what it keeps and says.

    The same seed writes the same bytes. The folder is created; files in it are replaced.
    """
    path.mkdir(parents=True, exist_ok=True)
    modules = {"q_proj": _ATTENTION_HEADS * _HEAD_DIM, "v_proj": _KV_HEADS * _HEAD_DIM}
    weights: list[_Weight] = []
    for i, (name, width) in itertools.product(range(_ATTENTION_LAYERS), modules.items()):
        module = f"base_model.model.model.layers.{i}.self_attn.{name}"
        weights.append(_matrix(f"{module}.lora_A.weight", _ADAPTER_RANK, _HIDDEN))
        weights.append(_matrix(f"{module}.lora_B.weight", width, _ADAPTER_RANK))
    _write_json(
        path / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": _ADAPTER_RANK,
            "lora_alpha": _ADAPTER_RANK,
            "target_modules": list(modules),
        },
    )
    _write_tensors(path / "adapter_model.safetensors", weights, seed)
    return path


def _write_model(
    path: Path, config: Mapping[str, object], weights: list[_Weight], seed: int
) -> TinyModel:
    path.mkdir(parents=True, exist_ok=True)
    common = {
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_attention_heads": _ATTENTION_HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
    }
    _write_json(path / "config.json", {**common, **config})
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID},
    )
    _write_tokenizer(path)
    _write_tensors(path / "model.safetensors", weights, seed)
    return TinyModel(path, sum(math.prod(weight.shape) for weight in weights))


def _write_tensors(path: Path, weights: list[_Weight], seed: int) -> None:
    # One generator in a fixed order: the seed alone decides every byte.
    generator = np.random.default_rng(seed)
    _write_safetensors(path, [(w, _bfloat16(_draw(w, generator))) for w in weights])


def _draw(weight: _Weight, generator: np.random.Generator) -> npt.NDArray[np.float32]:
    values = np.full(weight.shape, weight.mean, np.float32)
    if weight.std:
        values += weight.std * generator.standard_normal(weight.shape, np.float32)
    if weight.row_spread:
        rows = generator.standard_normal((weight.shape[0], 1), np.float32)
        values *= np.exp(weight.row_spread * rows)
    return values


def _bfloat16(values: npt.NDArray[np.float32]) -> bytes:
    """Return little-endian bfloat16, rounded to nearest even as torch does."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _write_safetensors(path: Path, tensors: list[tuple[_Weight, bytes]]) -> None:
    # The format itself, https://github.com/huggingface/safetensors#format: a u64 length, a JSON
    # header, the bytes. The package's own functions take numpy dtypes, which have no bfloat16.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for weight, data in tensors:
        header[weight.name] = {
            "dtype": "BF16",
            "shape": weight.shape,
            "data_offsets": (offset, offset + len(data)),
        }
        offset += len(data)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.writelines(data for _, data in tensors)


def _matrix(name: str, num_out: int, num_in: int) -> _Weight:
    return _Weight(name, (num_out, num_in), std=num_in**-0.5)


def _hybrid_weights(kinds: tuple[str, ...]) -> Iterator[_Weight]:
    yield from _outer_weights(norm_weight=0.0)
    for i, kind in enumerate(kinds):
        layer = f"model.layers.{i}"
        # These norms multiply by 1 + weight.
        yield from _block_weights(layer, norm_weight=0.0)
        if kind == "full_attention":
            yield from _self_attention(layer, norm_weight=_SCORE_STD**0.5 - 1.0, gated=True)
        else:
            yield from _gated_delta_net(f"{layer}.linear_attn")


def _attention_weights(num_layers: int) -> Iterator[_Weight]:
    yield from _outer_weights(norm_weight=1.0)
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        yield from _block_weights(layer, norm_weight=1.0)
        yield from _self_attention(layer, norm_weight=_SCORE_STD**0.5, gated=False)


def _sliding_weights(num_layers: int) -> Iterator[_Weight]:
    # These norms multiply by 1 + weight, as those of the hybrid.
    yield from _outer_weights(norm_weight=0.0)
    for i in range(num_layers):
        layer = f"model.layers.{i}"
        yield from _block_weights(layer, norm_weight=0.0)
        for side in ("pre", "post"):
            yield _Weight(f"{layer}.{side}_feedforward_layernorm.weight", (_HIDDEN,))
        yield from _self_attention(layer, norm_weight=_SCORE_STD**0.5 - 1.0, gated=False)


def _outer_weights(norm_weight: float) -> Iterator[_Weight]:
    # A small embedding: what the layers add, which depends on the context, outweighs it.
    yield _Weight("model.embed_tokens.weight", (VOCAB_SIZE, _HIDDEN), std=_HIDDEN**-0.5)
    yield _Weight("model.norm.weight", (_HIDDEN,), mean=norm_weight)
    yield _Weight(
        "lm_head.weight", (VOCAB_SIZE, _HIDDEN), std=_HIDDEN**-0.5, row_spread=_LOGIT_SPREAD
    )


def _block_weights(layer: str, norm_weight: float) -> Iterator[_Weight]:
    yield _Weight(f"{layer}.input_layernorm.weight", (_HIDDEN,), mean=norm_weight)
    yield _Weight(f"{layer}.post_attention_layernorm.weight", (_HIDDEN,), mean=norm_weight)
    yield _matrix(f"{layer}.mlp.gate_proj.weight", _INTERMEDIATE, _HIDDEN)
    yield _matrix(f"{layer}.mlp.up_proj.weight", _INTERMEDIATE, _HIDDEN)
    yield _matrix(f"{layer}.mlp.down_proj.weight", _HIDDEN, _INTERMEDIATE)


def _self_attention(layer: str, *, norm_weight: float, gated: bool) -> Iterator[_Weight]:
    name = f"{layer}.self_attn"
    width = _ATTENTION_HEADS * _HEAD_DIM
    # A gated layer's query projection also makes the output gate, head by head.
    yield _matrix(f"{name}.q_proj.weight", 2 * width if gated else width, _HIDDEN)
    yield _matrix(f"{name}.k_proj.weight", _KV_HEADS * _HEAD_DIM, _HIDDEN)
    yield _matrix(f"{name}.v_proj.weight", _KV_HEADS * _HEAD_DIM, _HIDDEN)
    yield _matrix(f"{name}.o_proj.weight", _HIDDEN, width)
    yield _Weight(f"{name}.q_norm.weight", (_HEAD_DIM,), mean=norm_weight)
    yield _Weight(f"{name}.k_norm.weight", (_HEAD_DIM,), mean=norm_weight)


def _gated_delta_net(name: str) -> Iterator[_Weight]:
    width = _GDN_HEADS * _GDN_HEAD_DIM
    yield _matrix(f"{name}.in_proj_qkv.weight", 3 * width, _HIDDEN)
    yield _matrix(f"{name}.in_proj_z.weight", width, _HIDDEN)
    yield _matrix(f"{name}.in_proj_b.weight", _GDN_HEADS, _HIDDEN)
    yield _matrix(f"{name}.in_proj_a.weight", _GDN_HEADS, _HIDDEN)
    yield _Weight(f"{name}.conv1d.weight", (3 * width, 1, _GDN_KERNEL), std=_GDN_KERNEL**-0.5)
    yield _Weight(f"{name}.A_log", (_GDN_HEADS,), mean=_GDN_A_LOG)
    yield _Weight(f"{name}.dt_bias", (_GDN_HEADS,))
    yield _Weight(f"{name}.norm.weight", (_GDN_HEAD_DIM,), mean=1.0)
    yield _matrix(f"{name}.out_proj.weight", _HIDDEN, width)


def _write_tokenizer(path: Path) -> None:
    """Write a byte-level BPE of 256 bytes and pairs of letters, so that every id has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [letter for letter in alphabet if letter.isascii() and letter.isalpha()]
    num_merges = VOCAB_SIZE - len(alphabet) - 1
    merges = list(itertools.islice(itertools.product(letters, letters), num_merges))
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])  # pyright: ignore[reportUnknownMemberType]
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": (
                "{% for message in messages %}{{ message['role'] }}: "
                "{{ message['content'] }}\n{% endfor %}assistant: "
            ),
        },
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
