"""Asks a replica for the tokens of a prompt: its tokenizer, its chat template, its ids.

The router loads no tokenizer of its own, which would have to do what the replica's server does
with templates, tools and special tokens, in each of its versions. What cannot be named by
tokens, for whatever reason, is named by its text.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

import aiohttp
import msgspec

from millpond.router.replicas import Replica, Replicas
from millpond.router.tokens import TokenId, TokenNames

_log = logging.getLogger(__name__)

ASK_S: Final = 2.0
"""A prompt of 128k tokens takes a quarter of a second."""
REST_S: Final = 5.0
"""A replica that does not answer is not asked again so soon: else each request waits for it."""
_ASKING_MAX: Final = 64
_BODY_BYTES_MAX: Final = 4 * 2**20
_HEADERS: Final = {"content-type": "application/json", "accept-encoding": "identity"}
_COMPLETIONS: Final = "/v1/completions"
_CHAT: Final = "/v1/chat/completions"
_COMPLETION_FIELDS: Final = ("model", "prompt", "add_special_tokens")
_CHAT_FIELDS: Final = (
    *("model", "messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "chat_template", "chat_template_kwargs"),
)
_ELSEWHERE: Final = ("truncate_prompt_tokens", "prompt_embeds", "documents", "reasoning_effort")
"""Fields that change a prompt, and that ``/tokenize`` does not have."""


class _NoAnswer(Exception):
    """A replica does not say."""


class _Part(msgspec.Struct, frozen=True):
    type: str = "text"


class _Message(msgspec.Struct, frozen=True):
    content: str | list[_Part | str] | None = None


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[TokenId]


class _Model(msgspec.Struct, frozen=True):
    id: str
    parent: str | None = None


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


@dataclass(frozen=True, slots=True)
class TokenCall:
    """What names a prompt by tokens: its ids as given, or what to ask ``/tokenize`` for them."""

    model: str | None
    salt: str | None
    ids: list[int] | None = None
    question: bytes = b""


def read_call(path: str, body: bytes) -> TokenCall | None:
    """Return how a request's prompt gets its tokens; None if that is not known.

    It is not for several prompts in one request, images and sound, ``/v1/responses``, and fields
    that the replica's ``/tokenize`` does not take.
    """
    if len(body) > _BODY_BYTES_MAX:
        return None
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        given = {name: value for name, value in fields.items() if bytes(value) != b"null"}
        if any(name in given for name in _ELSEWHERE):
            return None
        model, salt = (_text(given.get(name)) for name in ("model", "cache_salt"))
        if path == _COMPLETIONS and "prompt" in given:
            prompt = given["prompt"]
            if bytes(prompt).startswith(b"["):
                ids = msgspec.json.decode(prompt, type=list[TokenId])
                return TokenCall(model, salt, ids=ids)
            msgspec.json.decode(prompt, type=str)
            return TokenCall(model, salt, question=_question(given, _COMPLETION_FIELDS))
        if path == _CHAT and "messages" in given and _is_plain(given):
            return TokenCall(model, salt, question=_question(given, _CHAT_FIELDS))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # for the replica to complain about
    return None


def _text(value: msgspec.Raw | None) -> str | None:
    return None if value is None else msgspec.json.decode(value, type=str)


def _is_plain(given: dict[str, msgspec.Raw]) -> bool:
    """Say whether a chat is text and nothing else, with its tools if it has any."""
    if bytes(given.get("tool_choice", b"")) == b'"none"':
        return False  # whether tools are part of the prompt is up to the server's flags
    for message in msgspec.json.decode(given["messages"], type=list[_Message]):
        parts = message.content if isinstance(message.content, list) else []
        if any(isinstance(part, _Part) and part.type != "text" for part in parts):
            return False
    return True


def _question(given: dict[str, msgspec.Raw], names: tuple[str, ...]) -> bytes:
    return msgspec.json.encode({name: given[name] for name in names if name in given})


class ReplicaTokenizer:
    """Names prompts by the tokens that replicas make of them; whatever fails has no name.

    Waits for at most ASK_S for each of two answers; the second, which model names are adapters,
    is kept.
    """

    def __init__(self, replicas: Replicas, session: aiohttp.ClientSession) -> None:
        self._replicas = replicas
        self._session = session
        self._resting: dict[str, float] = {}
        self._num_asking = 0
        self._adapters: dict[str, str | None] = {}
        self._learning = asyncio.Lock()
        self._learn_at = 0.0

    async def names(self, path: str, body: bytes, key: str | None) -> TokenNames | None:
        """Return a prompt's names; ``key`` is the client's ``authorization``, which passes on."""
        call = read_call(path, body)
        if call is None or self._num_asking >= _ASKING_MAX:
            return None
        self._num_asking += 1
        try:
            adapter = await self._adapter(call.model, key)
            ids = call.ids
            if ids is None:
                answer = await self._ask("POST", "/tokenize", key, call.question)
                ids = msgspec.json.decode(answer, type=_Tokens).tokens
        except (_NoAnswer, msgspec.DecodeError, UnicodeDecodeError) as error:
            _log.debug("no tokens: path=%s why=%s", path, error)
            return None
        finally:
            self._num_asking -= 1
        return TokenNames(ids, adapter=adapter, salt=call.salt)

    async def _adapter(self, model: str | None, key: str | None) -> str | None:
        """Return the model's name if it is an adapter's: caches tell these apart by it."""
        if model is None:
            return None
        async with self._learning:
            if model not in self._adapters and time.monotonic() >= self._learn_at:
                self._learn_at = time.monotonic() + REST_S
                answer = await self._ask("GET", "/v1/models", key)
                models = msgspec.json.decode(answer, type=_Models).data
                self._adapters = {each.id: each.id if each.parent else None for each in models}
        if model not in self._adapters:
            raise _NoAnswer("no such model")
        return self._adapters[model]

    async def _ask(
        self, method: str, path: str, key: str | None, body: bytes | None = None
    ) -> bytes:
        replica = self._choose()
        headers = _HEADERS if key is None else {**_HEADERS, "authorization": key}
        try:
            async with (
                asyncio.timeout(ASK_S),
                self._session.request(
                    method, replica.url + path, data=body, headers=headers, allow_redirects=False
                ) as answer,
            ):
                content = await answer.read()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self._rest(replica, f"{path} does not answer ({type(error).__name__})")
            raise _NoAnswer(path) from error
        if answer.status == 404 or answer.status >= 500:
            self._rest(replica, f"{path} answers {answer.status}")
        if answer.status != 200:
            raise _NoAnswer(f"{path} answers {answer.status}")
        return content

    def _choose(self) -> Replica:
        now = time.monotonic()
        awake = [
            each
            for each in self._replicas
            if each.is_available and self._resting.get(each.name, 0.0) <= now
        ]
        if not awake:
            raise _NoAnswer("nobody to ask")
        return min(awake, key=lambda each: each.num_running)

    def _rest(self, replica: Replica, why: str) -> None:
        _log.warning("no tokens for a while: replica=%s why=%s", replica.name, why)
        self._resting[replica.name] = time.monotonic() + REST_S
