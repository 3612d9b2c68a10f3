"""Who holds which prefix, as far as the router can know.

A prompt is named by the keys of its blocks, each of which stands for everything up to its end:
pieces of the request's text (``TextIdentity``), or of its tokens (``tokens.TokenNames``). What
is here only compares them.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from millpond.router.records import Record

TEXT_BLOCK_BYTES: Final = 512
"""Bytes of text to a block: about 128 tokens of English."""
_BYTES_PER_TOKEN: Final = 4.0
_BYTES_PER_TOKEN_RANGE: Final = (0.5, 64.0)
_WEIGHT: Final = 0.05


class TextIdentity:
    """Names a prefix by its text as the client wrote it, in pieces of TEXT_BLOCK_BYTES.

    It needs no tokenizer, but two texts that make the same tokens count as different, and
    tokens are guessed from bytes, at a rate that reports of the pool correct.
    """

    def __init__(self) -> None:
        self.bytes_per_token = _BYTES_PER_TOKEN

    def keys(self, seed: bytes, text: bytes) -> Sequence[Hashable]:
        """Return the keys of the whole blocks of a prompt, from its beginning.

        ``seed`` is what a prefix depends on beside its text: the model, a cache salt, tools.
        """
        key = hashlib.blake2b(seed, digest_size=16).digest()
        keys: list[bytes] = []
        for start in range(0, len(text) - TEXT_BLOCK_BYTES + 1, TEXT_BLOCK_BYTES):
            block = text[start : start + TEXT_BLOCK_BYTES]
            key = hashlib.blake2b(block, digest_size=16, key=key).digest()
            keys.append(key)
        return keys

    def tokens_of(self, num_bytes: int) -> int:
        """Return about how many tokens a text of so many bytes has."""
        return int(num_bytes / self.bytes_per_token)

    def learn(self, num_bytes: int, num_tokens: int) -> None:
        """Note how many tokens an engine made of a text."""
        if num_bytes >= TEXT_BLOCK_BYTES and num_tokens > 0:
            low, high = _BYTES_PER_TOKEN_RANGE
            seen = min(high, max(low, num_bytes / num_tokens))
            self.bytes_per_token += _WEIGHT * (seen - self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class Held:
    """Blocks of a prompt's prefix: in each replica's own cache, and in the pool."""

    by_replica: Mapping[str, int]
    num_pooled: int


class HeldPrefixes:
    """Remembers which replica was given which prefixes, and forgets as a cache would.

    Each replica has room for ``local_blocks_max`` blocks and the pool for ``pool_blocks_max``;
    the least recently used go first. A prefix is always used from its end to its beginning, so
    what is left of it is never a hole, and its length is found by bisection.
    """

    def __init__(self, *, local_blocks_max: int, pool_blocks_max: int) -> None:
        self._local_blocks_max = local_blocks_max
        self._pool_blocks_max = pool_blocks_max
        self._local: dict[str, OrderedDict[Hashable, None]] = {}
        self._pool: OrderedDict[Hashable, None] = OrderedDict()

    def held(self, keys: Sequence[Hashable]) -> Held:
        """Return how much of a prompt is held where."""
        return Held(
            {name: _num_held(held, keys) for name, held in self._local.items()},
            _num_held(self._pool, keys),
        )

    def note(self, replica: str, keys: Sequence[Hashable]) -> None:
        """Take note that ``replica`` gets a prompt: it will hold it, and so will the pool."""
        _use(self._local.setdefault(replica, OrderedDict()), keys, self._local_blocks_max)
        _use(self._pool, keys, self._pool_blocks_max)

    def forget(self, replica: str) -> None:
        """Take note that a replica's own cache is gone."""
        self._local.pop(replica, None)

    def forget_pool(self) -> None:
        """Take note that the pool is gone, or another one."""
        self._pool.clear()

    def statistics(self) -> dict[str, int]:
        """Return how many blocks are remembered."""
        return {
            "num_local_blocks": sum(map(len, self._local.values())),
            "num_pool_blocks": len(self._pool),
        }


class PrefixesUnderway:
    """Prefixes that replicas are computing right now, and will hold in a moment.

    Those of a request count until its first byte.
    """

    def __init__(self) -> None:
        self._underway: dict[str, list[tuple[Record, Sequence[Hashable]]]] = {}

    def note(self, record: Record, keys: Sequence[Hashable]) -> None:
        """Take note that the replica of ``record`` gets a prompt."""
        if record.replica is not None:
            underway = self._still_underway(record.replica)
            self._underway[record.replica] = [*underway, (record, keys)]

    def num_held(self, replica: str, keys: Sequence[Hashable]) -> int:
        """Return how many blocks of a prompt a replica is computing for other requests."""
        underway = self._still_underway(replica)
        return max((_num_common(others, keys) for _, others in underway), default=0)

    def _still_underway(self, replica: str) -> list[tuple[Record, Sequence[Hashable]]]:
        return [
            (record, keys)
            for record, keys in self._underway.get(replica, ())
            if record.first_byte_ns is None
            and record.ended_ns is None
            # A request that was tried there in vain is at another one.
            and record.replica == replica
        ]

    def forget(self, replica: str) -> None:
        """Take note that a replica computes nothing of what it was given."""
        self._underway.pop(replica, None)


def _num_common(some: Sequence[Hashable], others: Sequence[Hashable]) -> int:
    low, high = 0, min(len(some), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if some[middle - 1] == others[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _num_held(held: Mapping[Hashable, None], keys: Sequence[Hashable]) -> int:
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low


def _use(held: OrderedDict[Hashable, None], keys: Sequence[Hashable], num_max: int) -> None:
    for key in reversed(keys):
        held[key] = None
        held.move_to_end(key)
    while len(held) > num_max:
        held.popitem(last=False)
