"""What placement has to know of a request's body; the body itself is passed on untouched."""

import contextlib
import hashlib
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from http.cookies import CookieError, SimpleCookie
from typing import Final, cast

import msgspec

from millpond.router.prefixes import TEXT_BLOCK_BYTES, TextIdentity
from millpond.router.tokens import TOKEN_BLOCK, TokenNames

_OPENING_BYTES: Final = 256
_NAME_BYTES_MAX: Final = 512
_NOTHING: Final = msgspec.Raw(b"")
GENERATING: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
"""Paths whose answers have a first token, and reports in the pool."""


class _Body(msgspec.Struct, frozen=True):
    """The fields of OpenAI's requests that matter here, as the client wrote them."""

    model: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING
    user: msgspec.Raw = _NOTHING


class _Message(msgspec.Struct, frozen=True):
    role: object = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks to compute.

    ``num_tokens`` is exact where they were named, and where the request has token ids; else it
    is guessed from the length of a text. ``text_bytes`` is that length, 0 for token ids.
    ``names`` are what ``keys`` are taken from if that is tokens, None if it is text.
    """

    num_tokens: int = 0
    text_bytes: int = 0
    tokens_per_block: float = 0.0
    keys: Sequence[Hashable] = ()
    conversation: str | None = None
    opening: str | None = None
    names: TokenNames | None = None

    def named(self, names: TokenNames) -> "Prompt":
        """Return the same prompt, known by its tokens."""
        return replace(
            self,
            num_tokens=names.num_tokens,
            tokens_per_block=TOKEN_BLOCK,
            keys=names.names(TOKEN_BLOCK),
            names=names,
        )

    def tokens_of(self, num_blocks: int) -> int:
        """Return about how many tokens the first so many blocks have."""
        return min(self.num_tokens, round(num_blocks * self.tokens_per_block))


@dataclass(frozen=True, slots=True)
class Affinity:
    """Where a client names the conversation that a request belongs to, in this order.

    A header, a cookie, and last the body's ``user``.
    """

    header: str = "x-session-id"
    cookie: str = "session_id"


def read_prompt(path: str, body: bytes, named: str | None, identity: TextIdentity) -> Prompt:
    """Return what a request asks for; a body that is not understood has no prompt.

    Whether such a body is an error is for the replica to say. ``named`` is the conversation
    that its headers name. Only what generates leaves a prefix behind.
    """
    if path not in GENERATING:
        return Prompt(conversation=named)
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Prompt(conversation=named)
    text = bytes(fields.messages or fields.prompt or fields.input)
    seed = b"\0".join(
        map(bytes, (fields.model, fields.cache_salt, fields.tools, fields.instructions))
    )
    num_ids = _num_token_ids(text)
    num_tokens = num_ids or identity.tokens_of(len(text))
    return Prompt(
        num_tokens=num_tokens,
        text_bytes=0 if num_ids else len(text),
        tokens_per_block=num_tokens * TEXT_BLOCK_BYTES / len(text) if text else 0.0,
        # A list that goes on differs from one that ends in its last byte.
        keys=identity.keys(seed, text.removesuffix(b"]")),
        conversation=named or _name(fields.user),
        opening=_opening(fields, seed, text),
    )


def named_by_headers(headers: Mapping[bytes, bytes], affinity: Affinity) -> str | None:
    """Return the conversation that a header or a cookie names."""
    named = headers.get(affinity.header.lower().encode())
    if named:
        return named[:_NAME_BYTES_MAX].decode("latin-1")
    cookies = headers.get(b"cookie")
    if not cookies:
        return None
    try:
        morsel = SimpleCookie(cookies.decode("latin-1")).get(affinity.cookie)
    except CookieError:
        return None
    return morsel.value[:_NAME_BYTES_MAX] if morsel is not None and morsel.value else None


def _name(user: msgspec.Raw) -> str | None:
    if not user:
        return None
    try:
        value = cast("object", msgspec.json.decode(user))
    except (msgspec.DecodeError, UnicodeDecodeError):  # no number, or no text: for the replica
        return None
    return value[:_NAME_BYTES_MAX] if isinstance(value, str) and value else None


def _num_token_ids(text: bytes) -> int:
    """Return how many token ids a prompt is made of; 0 if it is a text."""
    is_ids = text[:1] == b"[" and text[1:16].lstrip()[:1].isdigit()
    return text.count(b",") + 1 if is_ids else 0


def _opening(fields: _Body, seed: bytes, text: bytes) -> str | None:
    """Return what tells conversations apart: all up to the end of the first user's message."""
    if not text:
        return None
    opening = text[:_OPENING_BYTES]
    # What is no list of objects is for the replica to complain about.
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        if fields.messages:
            opening = _first_messages(fields.messages)
    return hashlib.blake2b(seed + b"\0" + opening, digest_size=16).hexdigest()


def _first_messages(messages: msgspec.Raw) -> bytes:
    found: list[bytes] = []
    for message in msgspec.json.decode(messages, type=list[msgspec.Raw]):
        found.append(bytes(message))
        if msgspec.json.decode(message, type=_Message).role == "user":
            break
    return b"\0".join(found)
