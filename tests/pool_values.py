"""Namespaces and chains of keys for tests of the pool."""

import hashlib

from millpond.model.limits import KIB
from millpond.model.names import Coverage
from millpond.model.namespace import Namespace, PartSpec

KEY_BYTES = 16

EVERY = PartSpec("pages", Coverage.EVERY, 8 * KIB)
LAST = PartSpec("state", Coverage.LAST, 12 * KIB)
WINDOW = PartSpec("window", Coverage.WINDOW, 4 * KIB, window_blocks=2)


def namespace(*parts: PartSpec, model: str = "model") -> Namespace:
    """Return a namespace that differs from others by its model's name and its parts."""
    return Namespace(
        model=model,
        revision="",
        weights="",
        dtype="bfloat16",
        kv_cache_dtype="auto",
        quantization="",
        block_tokens=256,
        engine_block_tokens=16,
        tensor_parallel_size=1,
        attention_backend="",
        layout="",
        hash_algorithm="sha256",
        hash_seed="",
        engine="",
        engine_version="",
        parts=parts,
    )


def chain(num_blocks: int, *, tag: str = "", after: bytes = b"") -> bytes:
    """Return the keys ``after``, continued by ``num_blocks`` more that ``tag`` tells apart."""
    keys = [after[at : at + KEY_BYTES] for at in range(0, len(after), KEY_BYTES)]
    for _ in range(num_blocks):
        before = keys[-1] if keys else b""
        keys.append(hashlib.sha256(before + tag.encode()).digest()[:KEY_BYTES])
    return b"".join(keys)
