"""Machines, and the parts of published config.json files that say what an engine keeps."""

from dataclasses import replace
from typing import Any

from millpond.launch.arguments import Situation
from millpond.model.limits import GIB

GPU = Situation(
    device="cuda",
    engine_version="0.33.0",
    num_replicas=2,
    num_gpus=2,
    pool_bytes=256 * GIB,
    state_ratio=0.5,
    available_bytes=1024 * GIB,
)
CPU = replace(GPU, device="cpu", engine_version="0.32.0", num_gpus=0)

_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_value_head_dim": 128,
}
_KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]

QWEN35_TEXT: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "layer_types": _KINDS * 16,
    "full_attention_interval": 4,
    "hidden_size": 5120,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262_144,
    **_DELTA_NET,
}
QWEN35: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "vision_config": {"num_hidden_layers": 27, "num_attention_heads": 16},
    "text_config": {key: QWEN35_TEXT[key] for key in QWEN35_TEXT if key != "architectures"},
}
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 262_144,
    **_DELTA_NET,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "sliding_window": None,
    "use_sliding_window": False,
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "vision_config": {"num_hidden_layers": 27},
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "hidden_size": 5376,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    },
}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "max_position_embeddings": 163_840,
}
DEEPSEEK_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
}
MAMBA: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "num_hidden_layers": 64,
    "hidden_size": 4096,
}
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M*-M-",
    "num_hidden_layers": 9,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "mamba_num_heads": 128,
    "ssm_state_size": 128,
}
FALCON_H1: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "layer_types": ["hybrid"] * 4,
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
}
LLAMA4: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "attention_chunk_size": 8192,
    },
}
WHISPER: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "is_encoder_decoder": True,
    "num_hidden_layers": 32,
}
