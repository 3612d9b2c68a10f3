"""What a model's config.json says about the key/value state that its engine will keep.

    kind        layers                                      a request resumes from
    attention   full attention                              every page of its prefix
    latent      full attention, latent keys (MLA)           every page of its prefix
    sliding     windows, mostly beside full attention       every page, windows' last ones
    hybrid      recurrent layers beside attention           every page and one state
    recurrent   recurrent layers alone                      nothing: the engine keeps nothing
    foreign     chunks, compressed pages, an encoder        nothing: not known to Millpond
    unknown     what cannot be told from the file           whatever the engine says

Sizes are those of all ranks together, and None where the layers' arithmetic is not known here.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

Config = Mapping[str, object]

_RECURRENT_LAYERS: Final = frozenset(
    {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "lightning_attention", "hybrid"}
)
_LINEAR_LAYER: Final = "linear_attention"
_FULL_LAYER: Final = "full_attention"
_MIXED_LAYER: Final = "hybrid"
"""Attention and recurrence side by side in one layer."""
_CHUNKED_LAYER: Final = "chunked_attention"
_SLIDING_LAYER: Final = "sliding_attention"
_FOREIGN_TYPES: Final = frozenset({"deepseek_v4"})
_RECURRENT_TYPES: Final = frozenset({"mamba", "mamba2", "falcon_mamba"})
_RECURRENT_KEYS: Final = (
    "attn_layer_period",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "mamba_n_heads",
    "mamba_num_heads",
    "ssm_state_size",
)
"""Keys that configurations of hybrids have whose layers are not listed one by one."""
_DELTA_NET_KEYS: Final = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_STATE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
_CONV_ELEMENT_BYTES: Final = 2
_DEFAULT_FULL_INTERVAL: Final = 4
"""Of Qwen3-Next and Qwen3.5, where their configurations leave it out."""


class Kind(enum.Enum):
    """See the module."""

    ATTENTION = "attention"
    LATENT = "latent attention"
    SLIDING = "sliding windows"
    HYBRID = "hybrid"
    RECURRENT = "recurrent"
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention layers. ``page_elements`` is what one token has in one layer of one rank.

    ``num_kv_heads`` is what tensor parallelism can divide: 1 for latent keys, of which each
    rank has all.
    """

    num_layers: int
    num_kv_heads: int
    page_elements: int

    def token_bytes(self, element_bytes: int, num_ranks: int) -> int:
        """Return the bytes of a token in all layers of all ranks."""
        copies = max(1, num_ranks // self.num_kv_heads)
        return self.num_layers * self.page_elements * element_bytes * copies


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The gated-delta-net layers: elements of one layer's two states, and the wanted type."""

    num_layers: int
    conv_elements: int
    sum_elements: int
    dtype: str | None

    def layer_bytes(self, dtype: str | None = None) -> int:
        """Return the bytes of one layer's state at one boundary, kept as ``dtype``."""
        sum_bytes = _STATE_BYTES.get(dtype or self.dtype or "", _CONV_ELEMENT_BYTES)
        return self.conv_elements * _CONV_ELEMENT_BYTES + self.sum_elements * sum_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What is known of a model. ``max_tokens`` is the longest context that it was made for."""

    kind: Kind
    architecture: str = ""
    num_heads: int | None = None
    attention: AttentionShape | None = None
    recurrent: RecurrentShape | None = None
    max_tokens: int | None = None

    def describe(self) -> str:
        """Return the kind, the name and the layers on one line."""
        parts = [self.kind.value + (f" ({self.architecture})" if self.architecture else "")]
        if self.attention is not None:
            parts.append(f"{self.attention.num_layers} attention layers")
        if self.recurrent is not None:
            parts.append(f"{self.recurrent.num_layers} recurrent layers")
        return ", ".join(parts)


UNKNOWN: Final = ModelShape(kind=Kind.UNKNOWN)


def model_shape(config: Config) -> ModelShape:
    """Return what a model's config.json tells, of its text part where it has several."""
    text = _text_part(config)
    layers = _layers(text)
    kind = _kind(config, text, layers)
    return ModelShape(
        kind=kind,
        architecture=_architecture(config),
        num_heads=_count(text, "num_attention_heads"),
        attention=_attention(text, layers, kind),
        recurrent=_recurrent(text, layers) if kind is Kind.HYBRID else None,
        max_tokens=_count(text, "max_position_embeddings"),
    )


def _text_part(config: Config) -> Config:
    part = config.get("text_config")
    return cast("Config", part) if isinstance(part, Mapping) else config


def _architecture(config: Config) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names:
        return str(cast("Sequence[object]", names)[0])
    return ""


def _layers(text: Config) -> Sequence[str] | None:
    """Return each layer's kind; None where the configuration does not list them."""
    listed = text.get("layer_types")
    if isinstance(listed, list):
        return [str(name) for name in cast("Sequence[object]", listed)]
    numbered = text.get("attn_type_list")  # MiniMax: 0 is linear, 1 is full
    if isinstance(numbered, list):
        return [_LINEAR_LAYER if not each else _FULL_LAYER for each in cast("list[int]", numbered)]
    num_layers, interval = _count(text, "num_hidden_layers"), _full_interval(text)
    if num_layers is None or interval is None:
        return None
    return [_LINEAR_LAYER if (i + 1) % interval else _FULL_LAYER for i in range(num_layers)]


def _full_interval(text: Config) -> int | None:
    """Return the distance of layers with full attention, where the others are recurrent."""
    if _count(text, "linear_num_value_heads") is not None:
        return _count(text, "full_attention_interval") or _DEFAULT_FULL_INTERVAL
    return _count(text, "layer_group_size")  # Bailing's linear ones


def _kind(config: Config, text: Config, layers: Sequence[str] | None) -> Kind:
    kinds = set(layers or ())
    has_window = bool(text.get("sliding_window")) and text.get("use_sliding_window") is not False
    # The first that holds decides.
    rules = (
        (Kind.FOREIGN, config.get("is_encoder_decoder") is True),
        (Kind.FOREIGN, text.get("model_type") in _FOREIGN_TYPES),
        (Kind.FOREIGN, _CHUNKED_LAYER in kinds or bool(text.get("attention_chunk_size"))),
        (Kind.RECURRENT, text.get("model_type") in _RECURRENT_TYPES),
        (Kind.RECURRENT, bool(kinds) and kinds <= _RECURRENT_LAYERS - {_MIXED_LAYER}),
        (Kind.HYBRID, bool(kinds & _RECURRENT_LAYERS)),
        (Kind.HYBRID, layers is None and any(text.get(key) for key in _RECURRENT_KEYS)),
        (Kind.UNKNOWN, _count(text, "num_hidden_layers") is None),
        (Kind.UNKNOWN, _count(text, "num_attention_heads") is None),
        (Kind.LATENT, _count(text, "kv_lora_rank") is not None),
        (Kind.SLIDING, _SLIDING_LAYER in kinds or (layers is None and has_window)),
    )
    return next((kind for kind, is_so in rules if is_so), Kind.ATTENTION)


def _attention(text: Config, layers: Sequence[str] | None, kind: Kind) -> AttentionShape | None:
    num_layers = _num_attention_layers(text, layers, kind)
    heads = _count(text, "num_attention_heads")
    if num_layers is None or heads is None:
        return None
    if kind is Kind.LATENT:
        latent, rope = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
        # A sparse one keeps an index beside it, whose size is the engine's affair.
        if latent is None or rope is None or text.get("index_topk") is not None:
            return None
        return AttentionShape(num_layers, 1, latent + rope)
    hidden = _count(text, "hidden_size")
    head_dim = _count(text, "head_dim") or (None if hidden is None else hidden // heads)
    if head_dim is None:
        return None
    kv_heads = _count(text, "num_key_value_heads") or heads
    return AttentionShape(num_layers, kv_heads, 2 * kv_heads * head_dim)


def _num_attention_layers(text: Config, layers: Sequence[str] | None, kind: Kind) -> int | None:
    if kind not in (Kind.ATTENTION, Kind.LATENT, Kind.SLIDING, Kind.HYBRID):
        return None
    if layers is None:
        return None if kind is Kind.HYBRID else _count(text, "num_hidden_layers")
    if _MIXED_LAYER in layers:
        return None
    return sum(name not in _RECURRENT_LAYERS for name in layers)


def _recurrent(text: Config, layers: Sequence[str] | None) -> RecurrentShape | None:
    """Return the gated-delta-net layers; None for other kinds of recurrent ones.

    The shapes are those of vLLM's MambaStateShapeCalculator.gated_delta_net_state_shape.
    """
    counts = [_count(text, key) for key in _DELTA_NET_KEYS]
    if None in counts or layers is None:
        return None
    key_heads, key_dim, heads, dim, kernel = cast("list[int]", counts)
    dtype = text.get("mamba_ssm_dtype")
    return RecurrentShape(
        num_layers=layers.count(_LINEAR_LAYER),
        conv_elements=(kernel - 1) * (2 * key_heads * key_dim + heads * dim),
        sum_elements=heads * key_dim * dim,
        dtype=dtype if isinstance(dtype, str) else None,
    )


def _count(text: Config, key: str) -> int | None:
    value = text.get(key)
    return value if isinstance(value, int) and value > 0 else None
