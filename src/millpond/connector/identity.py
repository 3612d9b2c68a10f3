"""Who this engine is to the pool: its namespace and the fingerprint of its model."""

import hashlib
import json
from pathlib import Path
from typing import Any

from vllm import __version__ as engine_version
from vllm.config import VllmConfig

from millpond.connector.geometry import EngineLayout
from millpond.connector.metadata import RankLayout
from millpond.model.errors import UnsupportedEngine
from millpond.model.namespace import Namespace

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_SAMPLE_BYTES = 4096
_NUM_SAMPLES = 16
_VOLATILE_CONFIG_KEYS = ("_name_or_path", "transformers_version")


def build_namespace(
    vllm_config: VllmConfig,
    layout: EngineLayout,
    ranks: dict[int, RankLayout],
    *,
    empty_prefix: bytes,
    weights: str,
) -> Namespace:
    """Return the namespace of this engine.

    ``weights`` is the ``fingerprint`` taken when the engine started: files that are replaced
    later are not what it serves. ``ranks`` is what each tensor-parallel worker said of itself;
    ``UnsupportedEngine`` where one of them cannot take part or where they differ.
    """
    refusals = [rank.refusal for rank in ranks.values() if rank.refusal]
    if refusals:
        raise UnsupportedEngine(refusals[0])
    first = ranks[0]
    if any(rank != first for rank in ranks.values()):
        raise UnsupportedEngine("the tensor-parallel ranks lay out their pages differently")
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    return Namespace(
        model=str(model.model),
        revision=str(model.revision or ""),
        weights=weights,
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(cache.cache_dtype),
        quantization=str(model.quantization or ""),
        block_tokens=layout.block_tokens,
        engine_block_tokens=max(layout.group_tokens),
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        attention_backend=first.attention_backend,
        layout=hashlib.sha256(first.layout.encode()).hexdigest(),
        hash_algorithm=f"{cache.prefix_caching_hash_algo}/{layout.hash_tokens}",
        hash_seed=empty_prefix.hex(),
        engine="vllm",
        engine_version=engine_version,
        parts=layout.part_specs(len(ranks)),
    )


def fingerprint(vllm_config: VllmConfig) -> str:
    """Return a digest of the model's configuration and of samples of its weight files.

    Samples cover each file's name, size, start, end and points between: enough to tell two
    trainings, quantisations or seeds apart without reading hundreds of gigabytes. A model
    named by a hub is told apart by its configuration and resolved revision. Settings that
    change what is computed for the same tokens count too. ``UnsupportedEngine`` where the
    files cannot be read.
    """
    model = vllm_config.model_config
    digest = hashlib.sha256()
    for setting in _settings_that_count(vllm_config):
        digest.update(f"{setting}\0".encode())
    hf_config: Any = model.hf_config
    settings: dict[str, Any] = hf_config.to_dict()
    for key in _VOLATILE_CONFIG_KEYS:
        settings.pop(key, None)
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(str(getattr(hf_config, "_commit_hash", None) or "").encode())
    load_format = str(vllm_config.load_config.load_format)
    if "dummy" in load_format:
        digest.update(f"dummy {model.seed}".encode())
    try:
        digest.update(weights_digest(Path(str(model.model))))
    except OSError as error:
        raise UnsupportedEngine(f"the model's files cannot be read: {error}") from error
    return digest.hexdigest()


def _settings_that_count(vllm_config: VllmConfig) -> list[object]:
    """Return engine settings that decide what is in a page beyond weights and tokens."""
    model = vllm_config.model_config
    hf_config: Any = model.hf_config
    # Some rotary embeddings pick their factors by the longest context that is allowed.
    is_long = getattr(hf_config, "original_max_position_embeddings", None) is not None
    rope: Any = getattr(hf_config, "rope_parameters", None) or {}
    is_long = is_long or "original_max_position_embeddings" in str(rope)
    multimodal: Any = getattr(model, "multimodal_config", None)
    return [
        model.max_model_len if is_long else None,
        getattr(multimodal, "mm_processor_kwargs", None),
    ]


def weights_digest(root: Path) -> bytes:
    """Return a digest of a weight file, or of those below a folder; empty where neither is.

    Raises ``OSError`` where a file cannot be read.
    """
    if root.is_file():
        return _sample(root)
    if not root.is_dir():
        return b""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in _WEIGHT_SUFFIXES and path.is_file():
            digest.update(str(path.relative_to(root)).encode())
            digest.update(_sample(path))
    return digest.digest()


def _sample(path: Path) -> bytes:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for i in range(_NUM_SAMPLES + 1):
            file.seek(max(0, size - _SAMPLE_BYTES) * i // _NUM_SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.digest()
