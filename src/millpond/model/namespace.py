"""Namespaces: everything that two replicas could disagree about.

A block is named by (namespace, key). The key is the engine's chained digest of the prefix
and its extra keys (LoRA, cache salt, multimodal inputs); the namespace fixes what that digest
leaves out, the model above all. Replicas with different namespaces can never see each
other's blocks, because the pool keeps a separate index for each namespace.
"""

import hashlib
from typing import NewType

import msgspec

from millpond.model.limits import FORMAT_VERSION, PARTS_MAX, RANKS_MAX, SLOT_ALIGNMENT_BYTES
from millpond.model.names import Coverage

BlockKey = NewType("BlockKey", bytes)
"""Digest of a whole prefix up to the end of one block, 16 or 32 bytes, unique in a namespace."""


class PartSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of data a block may carry: attention pages, a window's pages, or a state.

    ``slot_bytes`` is the size for all tensor-parallel ranks together: rank r owns the bytes
    ``[r * slot_bytes / num_ranks, (r + 1) * slot_bytes / num_ranks)`` of each slot.
    ``window_blocks`` is given for ``Coverage.WINDOW`` and for nothing else.
    """

    name: str
    coverage: Coverage
    slot_bytes: int
    window_blocks: int | None = None


class FieldDifference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One field in which two namespaces differ, with both values as text."""

    field: str
    mine: str
    theirs: str


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that must be equal for two replicas to read each other's bytes.

    ``weights`` is a fingerprint of the model's files, so that two folders of one name are
    told apart. ``layout`` describes groups, layers, page sizes and the order of bytes within
    a page. ``hash_seed`` is the digest that stands for the empty prefix, in hex.
    """

    model: str
    revision: str
    weights: str
    dtype: str
    kv_cache_dtype: str
    quantization: str
    block_tokens: int
    engine_block_tokens: int
    tensor_parallel_size: int
    attention_backend: str
    layout: str
    hash_algorithm: str
    hash_seed: str
    engine: str
    engine_version: str
    parts: tuple[PartSpec, ...]
    format_version: int = FORMAT_VERSION

    def digest(self) -> bytes:
        """Return 32 bytes that are equal exactly when all fields are."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()

    def differences(self, other: "Namespace") -> tuple[FieldDifference, ...]:
        """Return the fields in which ``other`` differs, in declaration order."""
        return tuple(
            FieldDifference(name, _text(getattr(self, name)), _text(getattr(other, name)))
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        )


def check_parts(parts: tuple[PartSpec, ...], num_ranks: int) -> None:
    """Raise ``ValueError`` with the offending value unless the parts can be served."""
    if not 1 <= num_ranks <= RANKS_MAX:
        raise ValueError(f"num_ranks is {num_ranks}, must be 1 to {RANKS_MAX}")
    if not 1 <= len(parts) <= PARTS_MAX:
        raise ValueError(f"{len(parts)} parts, must be 1 to {PARTS_MAX}")
    for part in parts:
        if part.slot_bytes <= 0 or part.slot_bytes % num_ranks:
            raise ValueError(
                f"part {part.name!r}: slot_bytes {part.slot_bytes} is not a positive "
                f"multiple of num_ranks {num_ranks}"
            )
        if (part.window_blocks is None) is (part.coverage is Coverage.WINDOW):
            raise ValueError(
                f"part {part.name!r}: window_blocks {part.window_blocks} with "
                f"coverage {part.coverage.value!r}"
            )
        if part.window_blocks is not None and part.window_blocks < 1:
            raise ValueError(f"part {part.name!r}: window_blocks {part.window_blocks} < 1")


def aligned_slot_bytes(slot_bytes: int) -> int:
    """Return the distance between two slots that hold ``slot_bytes`` each."""
    return -(-slot_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()
