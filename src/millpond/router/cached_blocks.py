"""What a replica's own cache holds, as its events tell: no socket, no clock.

vLLM keeps blocks in groups of layers that are cached alike. Full attention needs every block
of a prefix, a sliding window the last few, a recurrent layer the state at its end: a request
resumes where all of them can. A block's hash stands for all tokens up to its end and is the
same in every group, so that one group of full attention, whose events leave no block out, says
which prefix a hash is of:

    prompt's names  ->  hashes of its blocks  ->  held by each other group, or not
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Final

import msgspec

from millpond.router.tokens import NO_EXTRA, ROOT, TokenId, TokenNames, block_names, pack

BLOCKS_MAX: Final = 1_000_000
"""Of one replica, all groups together; 16 M tokens in blocks of 16."""
_GROUPS_MAX: Final = 256
_OWN_MEDIA: Final = frozenset({None, "GPU"})
"""Events also tell of further tiers, which are not the cache that a request finds."""
_NIL: Final = b"\xc0"
_EVERY: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
_WINDOWS: Final = frozenset({"sliding_window", "sliding_window_mla"})
_STATES: Final = frozenset({"mamba"})

BlockHash = int | bytes
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Blocks that are cached now, with the tokens of all of them in a row.

    A block that its group leaves out has tokens and no hash. ``extra_keys``: one for each hash.
    """

    block_hashes: list[BlockHash]
    token_ids: list[TokenId]
    block_size: BlockTokens
    parent_block_hash: BlockHash | None = None
    medium: str | None = None
    extra_keys: list[msgspec.Raw] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Blocks that are no longer cached. One that was stored twice has to go twice."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Nothing is cached."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class NotUnderstood(Exception):
    """Events contradict each other, or tell of more than can be kept: nothing is known."""


@dataclass(slots=True)
class _Group:
    """The blocks of one group: how many copies the cache has of each.

    ``num_needed`` blocks before its end let a request resume; None: every one of them.
    """

    block_tokens: int
    num_needed: int | None
    copies: dict[BlockHash, int] = field(default_factory=dict[BlockHash, int])

    def fit(self, hashes: Sequence[BlockHash], num_blocks: int, block_tokens: int) -> int:
        """Return how many of ``num_blocks`` blocks of ``block_tokens`` leave a place to resume."""
        step = self.block_tokens // block_tokens
        num_blocks -= num_blocks % step
        if self.num_needed is None:
            whole = takewhile(self.copies.__contains__, hashes[step - 1 : num_blocks : step])
            return step * sum(1 for _ in whole)
        num_held, i = 0, num_blocks
        while i and num_held < self.num_needed:
            num_held += 1
            if hashes[i - 1] not in self.copies:
                num_blocks, num_held = i - step, 0
            i -= step
        return num_blocks


class CachedBlocks:
    """The blocks of one replica's own cache, named by their tokens.

    After ``NotUnderstood`` it is to be restarted, or thrown away.
    """

    def __init__(self, *, num_blocks_max: int = BLOCKS_MAX) -> None:
        self._num_blocks_max = num_blocks_max
        self._main: int | None = None
        self._groups: dict[int, _Group] = {}
        self._names: dict[BlockHash, bytes] = {}
        self._hashes: dict[bytes, BlockHash] = {}
        self._unknown_kind: str | None = None

    def restart(self) -> None:
        """Forget everything: another process may have other groups and other blocks."""
        self._main = self._unknown_kind = None
        self._groups.clear()
        self._names.clear()
        self._hashes.clear()

    def clear(self) -> None:
        """Forget all blocks; which groups there are stays known."""
        for group in self._groups.values():
            group.copies.clear()
        self._names.clear()
        self._hashes.clear()

    def apply(self, event: Event) -> None:
        """Take note of an event; raises ``NotUnderstood``."""
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif event.medium in _OWN_MEDIA:
            if isinstance(event, BlockStored):
                self._store(event)
            else:
                self._remove(event)

    def num_tokens(self, prompt: TokenNames) -> int | None:
        """Return how many tokens of a prompt a request would find; None if that is unknown.

        It is where the replica has groups of a kind that is not known here.
        """
        if self._unknown_kind is not None:
            return None
        if self._main is None:
            return None if self._groups else 0
        main = self._groups[self._main]
        held = list(takewhile(self._hashes.__contains__, prompt.names(main.block_tokens)))
        others = [group for i, group in self._groups.items() if i != self._main]
        if any(group.block_tokens % main.block_tokens for group in others):
            return None
        num_blocks = len(held)
        hashes = [self._hashes[name] for name in held] if others else []
        before = -1
        while num_blocks != before:
            before = num_blocks
            for group in others:
                num_blocks = group.fit(hashes, num_blocks, main.block_tokens)
        return num_blocks * main.block_tokens

    def statistics(self) -> dict[str, int]:
        """Return how many blocks are known, over all groups."""
        return {"num_blocks": self._num_blocks()}

    def _num_blocks(self) -> int:
        return sum(len(group.copies) for group in self._groups.values())

    def _store(self, event: BlockStored) -> None:
        index = event.group_idx or 0
        group = self._group(index, event)
        if group is None or not event.block_hashes:
            return
        if index == self._main and not self._name(event, group):
            return
        for each in event.block_hashes:
            group.copies[each] = group.copies.get(each, 0) + 1
        if self._num_blocks() > self._num_blocks_max:
            raise NotUnderstood(f"more than {self._num_blocks_max} blocks")

    def _group(self, index: int, event: BlockStored) -> _Group | None:
        """Return the group of an event; None where its block is not one of the group's.

        Some groups also name beginnings of a block, which are shorter than it.
        """
        kind = event.kv_cache_spec_kind
        group = self._groups.get(index)
        if group is None or event.block_size > group.block_tokens:
            if len(self._groups) >= _GROUPS_MAX:
                raise NotUnderstood(f"more than {_GROUPS_MAX} groups")
            num_needed = _num_needed(event)
            if num_needed == 0:
                self._unknown_kind = kind
            group = self._groups[index] = _Group(event.block_size, num_needed)
            if kind in _EVERY and self._main in {None, index}:
                self._main = index
                self._names.clear()
                self._hashes.clear()
        return group if event.block_size == group.block_tokens else None

    def _name(self, event: BlockStored, group: _Group) -> bool:
        """Name the blocks of an event; false for what no prefix leads to, and no request finds."""
        hashes = event.block_hashes
        if len(event.token_ids) != len(hashes) * group.block_tokens:
            raise NotUnderstood(f"{len(hashes)} blocks of {len(event.token_ids)} tokens")
        parent = ROOT
        if event.parent_block_hash is not None:
            parent = self._names.get(event.parent_block_hash, b"")
            if not parent:
                return False
        extras = _extras(event.extra_keys, len(hashes))
        names = block_names(pack(event.token_ids), group.block_tokens, extras, parent=parent)
        for each, name in zip(hashes, names, strict=True):
            if self._names.setdefault(each, name) != name:
                raise NotUnderstood("one hash for different tokens")
            self._hashes[name] = each
        return True

    def _remove(self, event: BlockRemoved) -> None:
        index = event.group_idx or 0
        group = self._groups.get(index)
        if group is None:
            return
        for each in event.block_hashes:
            num_left = group.copies.pop(each, 0) - 1
            if num_left > 0:
                group.copies[each] = num_left
            elif index == self._main and num_left == 0:
                self._hashes.pop(self._names.pop(each), None)


def _num_needed(event: BlockStored) -> int | None:
    """Return how many blocks a request that resumes needs; None for all, 0 if unknown."""
    kind, window = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
    if kind in _EVERY:
        return None
    if kind in _STATES:
        return 1
    if kind in _WINDOWS and window is not None and window > 0:
        return max(1, math.ceil((window - 1) / event.block_size))
    return 0


def _extras(keys: Sequence[msgspec.Raw] | None, num_blocks: int) -> list[bytes]:
    if keys is None:
        return [NO_EXTRA] * num_blocks
    if len(keys) != num_blocks:
        raise NotUnderstood(f"{len(keys)} extra keys of {num_blocks} blocks")
    written = [bytes(key) for key in keys]
    return [NO_EXTRA if key == _NIL else key for key in written]
