"""Prefixes named by the ids of their tokens, in blocks as long as whoever is asked has them.

A block's name stands for all tokens up to its end, and for what else an engine mixes into its
own name of it (an adapter, a cache salt, an image): two texts that make the same tokens have
the same names, whoever tokenized them.
"""

import array
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
import xxhash

from millpond.model.limits import BLOCK_TOKENS_MIN

TOKEN_BLOCK: Final = BLOCK_TOKENS_MIN
"""Tokens to a block where nobody says otherwise: the pool's, for most engines."""
ROOT: Final = bytes(16)
"""The parent of a first block."""
NO_EXTRA: Final = b""
_ID_BYTES: Final = 4

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


def pack(ids: Sequence[int]) -> bytes:
    """Return ids of at most 32 bits in a row, as ``block_names`` takes them."""
    return array.array("I", ids).tobytes()


def extra_of(keys: Sequence[str]) -> bytes:
    """Return what a block's name depends on beside its tokens, as vLLM's events write it."""
    return msgspec.msgpack.encode(list(keys)) if keys else NO_EXTRA


def block_names(
    packed: bytes, block_tokens: int, extras: Sequence[bytes], *, parent: bytes = ROOT
) -> list[bytes]:
    """Return the names of a row of whole blocks that follows ``parent``, one for each extra.

    128-bit xxHash: a fifth of blake2b's time for blocks of 16 tokens. Somebody who makes two
    prompts of one name on purpose misplaces requests, and gets no wrong answers.
    """
    size = block_tokens * _ID_BYTES
    names: list[bytes] = []
    for i, extra in enumerate(extras):
        parent = xxhash.xxh3_128_digest(parent + packed[i * size : (i + 1) * size] + extra)
        names.append(parent)
    return names


class TokenNames:
    """The names of one prompt, for blocks of any length; those that were asked for are kept.

    ``adapter`` is the LoRA that it is for, None for the model itself.
    """

    def __init__(
        self, ids: Sequence[int], *, adapter: str | None = None, salt: str | None = None
    ) -> None:
        self._packed = pack(ids)
        self.num_tokens = len(ids)
        of_all = [adapter] if adapter else []
        self._extra_of_first = extra_of([*of_all, salt] if salt else of_all)
        self._extra_of_rest = extra_of(of_all)
        self._names: dict[int, list[bytes]] = {}

    def names(self, block_tokens: int) -> list[bytes]:
        """Return the names of the blocks that a request can take over.

        The last token is never among them: an engine computes it again.
        """
        if block_tokens not in self._names:
            num_rest = (self.num_tokens - 1) // block_tokens - 1
            extras = [self._extra_of_first, *[self._extra_of_rest] * num_rest][: num_rest + 1]
            self._names[block_tokens] = block_names(self._packed, block_tokens, extras)
        return self._names[block_tokens]
