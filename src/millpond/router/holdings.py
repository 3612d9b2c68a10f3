"""Who holds how much of a prompt: by whatever the router can find out about it.

    identity   a prompt is named by       and held by whom is known from
    text       its text                   what this router sent where, and has not forgotten
    tokens     the replica's tokenizer    the same
    events     the replica's tokenizer    the replicas' caches, as their events tell

Each is used where the one below is not to be had, for this very request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

from millpond.router.kv_events import KvEvents
from millpond.router.options import Identity
from millpond.router.prefixes import (
    TEXT_BLOCK_BYTES,
    HeldPrefixes,
    PrefixesUnderway,
    TextIdentity,
)
from millpond.router.prompts import GENERATING, Prompt, read_prompt
from millpond.router.records import Record
from millpond.router.replicas import Replica, Replicas
from millpond.router.tokenizing import ReplicaTokenizer
from millpond.router.tokens import TOKEN_BLOCK

TEXT: Final = "text"
TOKENS: Final = "tokens"
EVENTS: Final = "events"


@dataclass(frozen=True, slots=True)
class Located:
    """Tokens of a prompt that can be taken over: from each replica's own cache, from the pool."""

    identity: str
    local_tokens: Mapping[str, int]
    pooled_tokens: int

    def holder(self, served_by: str) -> str | None:
        """Return who held the most, ``served_by`` among equals; None if nobody held any."""
        most = max(self.local_tokens.values(), default=0)
        if not most:
            return None
        if self.local_tokens.get(served_by) == most:
            return served_by
        return min(name for name, num in self.local_tokens.items() if num == most)


class Holdings:
    """Names prompts and finds them; see the module. Between ``start`` and ``stop`` it asks and
    listens, in one event loop; without it prompts have their text.

    ``local_tokens`` and ``pool_tokens`` are what a replica's cache and the pool hold, about.
    """

    def __init__(
        self, replicas: Replicas, identity: Identity, *, local_tokens: int, pool_tokens: int
    ) -> None:
        self._replicas = replicas
        self._identity = identity
        self.text = TextIdentity()
        text_blocks = self.text.bytes_per_token / TEXT_BLOCK_BYTES
        self._by_text, self._by_tokens = (
            HeldPrefixes(
                local_blocks_max=max(1, round(local_tokens * blocks)),
                pool_blocks_max=max(1, round(pool_tokens * blocks)),
            )
            for blocks in (text_blocks, 1 / TOKEN_BLOCK)
        )
        self._underway = PrefixesUnderway()
        self._events = KvEvents()
        self._tokenizer: ReplicaTokenizer | None = None

    def start(self, session: aiohttp.ClientSession) -> None:
        """Begin to listen; replicas are asked through ``session``."""
        self._tokenizer = ReplicaTokenizer(self._replicas, session)
        for replica in self._replicas:
            self.follow(replica)

    async def stop(self) -> None:
        """Listen to nobody."""
        await self._events.close()

    def follow(self, replica: Replica) -> None:
        """Take note of a new replica, or one at another address."""
        self.forget(replica.name)
        if self._tokenizer is not None and self._identity is not Identity.TEXT:
            self._events.follow(replica)

    @property
    def identity(self) -> str:
        """What a request is placed by right now, if its tokens are to be had."""
        if not self._is_by_tokens():
            return TEXT
        available = [each for each in self._replicas if each.is_available]
        is_known = bool(available) and all(each.is_cache_known for each in available)
        return EVENTS if is_known else TOKENS

    # ------------------------------------------------------------ a request

    async def read(self, path: str, body: bytes, named: str | None, key: str | None) -> Prompt:
        """Return what a request asks for, named as well as can be; never fails.

        ``named`` is the conversation that its headers name, ``key`` the client's, for the
        replica that is asked.
        """
        prompt = read_prompt(path, body, named, self.text)
        if path not in GENERATING or self._tokenizer is None or not self._is_by_tokens():
            return prompt
        names = await self._tokenizer.names(path, body, key)
        return prompt if names is None else prompt.named(names)

    def locate(self, prompt: Prompt) -> Located:
        """Return who holds how much of a prompt."""
        held = (self._by_text if prompt.names is None else self._by_tokens).held(prompt.keys)
        local = {name: prompt.tokens_of(num) for name, num in held.by_replica.items()}
        pooled = prompt.tokens_of(held.num_pooled)
        if prompt.names is None:
            return Located(TEXT, local, pooled)
        known = self._events.num_tokens(prompt.names)
        for name, num in known.items():
            underway = self._underway.num_held(name, prompt.keys)
            local[name] = max(num, prompt.tokens_of(underway))
        asked = [each.name for each in self._replicas if each.is_available]
        is_fact = bool(asked) and all(name in known for name in asked)
        return Located(EVENTS if is_fact else TOKENS, local, pooled)

    def note(self, prompt: Prompt, record: Record) -> None:
        """Take note that the replica of ``record`` gets a prompt."""
        if record.replica is None:
            return
        if prompt.names is None:
            self._by_text.note(record.replica, prompt.keys)
        else:
            self._by_tokens.note(record.replica, prompt.keys)
            self._underway.note(record, prompt.keys)

    # ------------------------------------------------------------ what is gone

    def forget(self, replica: str) -> None:
        """Take note that a replica's own cache is gone."""
        for each in (self._by_text, self._by_tokens, self._underway, self._events):
            each.forget(replica)

    def forget_pool(self) -> None:
        """Take note that the pool is gone, or another one."""
        self._by_text.forget_pool()
        self._by_tokens.forget_pool()

    def _is_by_tokens(self) -> bool:
        if self._identity is Identity.AUTO:
            return any(each.address.events is not None for each in self._replicas)
        return self._identity is Identity.TOKENS
