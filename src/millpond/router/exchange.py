"""One request from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp
from yarl import URL

from millpond.router import errors
from millpond.router.errors import Ended, Refusal
from millpond.router.headers import RawHeaders, facts, request_headers, response_headers
from millpond.router.options import Limits, Waits
from millpond.router.prompts import Prompt
from millpond.router.records import Record
from millpond.router.replicas import Replica

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

ATTEMPTS_MAX: Final = 3
_STALE_S: Final = 1.0
"""An idle connection that the replica had closed fails at once. What fails later was worked on,
and may be what ended the replica: the next one is not given it."""
_NO_EXTRA_HEADERS: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_REPEATABLE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_REPEATABLE_PATHS: Final = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/pooling", "/classify"),
        *("/tokenize", "/detokenize", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    }
)
"""POSTs that leave nothing behind in a replica. ``/v1/responses`` may store its answer."""
_PIECE_BYTES: Final = 2**20
_EVENTS: Final = b"text/event-stream"
_LAST_EVENT: Final = b"data: [DONE]\n\n"
"""Behind which clients hang up: OpenAI's does not wait for the end of the body."""
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


@dataclass(frozen=True, slots=True)
class Call:
    """What a client asked for. ``target`` is path and query as they were written."""

    method: str
    path: str
    target: str
    headers: RawHeaders
    body: bytes
    prompt: Prompt


class Placer(Protocol):
    """Chooses replicas for an exchange, and hears what came of it."""

    def place(self, call: Call, record: Record) -> Replica | None:
        """Return a replica that is not in ``record.tried``, and note it there."""
        ...

    def note_refused(self, replica: Replica) -> None:
        """Take note that a replica does not accept connections."""
        ...


class _BrokenStream(Exception):
    """The replica's answer ended before its end."""


class _NoAnswer(Exception):
    """No byte of an answer came.

    ``is_unsent`` if the request cannot have reached the engine; ``is_stale`` if it probably
    did not, for the connection was an old one.
    """

    def __init__(self, *, is_unsent: bool = False, is_stale: bool = False) -> None:
        super().__init__()
        self.is_unsent = is_unsent
        self.is_stale = is_stale


class Exchange:
    """Passes one call on and its answer back.

    ``waits`` and ``waits_since_s`` (of ``time.monotonic``) tell a watch from outside whom it
    waits for: that costs less a token than a timer. ``expire`` ends it.
    """

    def __init__(
        self, call: Call, record: Record, send: Send, session: aiohttp.ClientSession, limits: Limits
    ) -> None:
        self._call = call
        self._record = record
        self._send = send
        self._session = session
        self._limits = limits
        self._is_started = False
        self._is_repeated = False
        self._tail = b""
        self._queued: tuple[Replica, int] | None = None
        self._expired: Waits | None = None
        self._task: asyncio.Task[None] | None = None
        self.waits = Waits.FIRST_BYTE
        self.waits_since_s = time.monotonic()

    def expire(self, now_s: float) -> None:
        """End the exchange if it has waited for too long."""
        if now_s - self.waits_since_s > self._limits.seconds(self.waits) and self._task is not None:
            self._expired = self.waits
            self._task.cancel()

    @property
    def is_stalled(self) -> bool:
        """Whether it has ended because its client takes nothing."""
        return self._expired is Waits.CLIENT

    async def run(self, placer: Placer) -> None:
        """Serve the call, by another replica where one fails before its first byte."""
        self._task = asyncio.current_task()
        try:
            await self._run(placer)
        except asyncio.CancelledError:
            if self._expired is None:
                has_all = self._record.is_stream and self._tail.endswith(_LAST_EVENT)
                self._record.ended = Ended.COMPLETE if has_all else Ended.CLIENT_GONE
                raise
            await self._end_expired(self._expired)

    async def _run(self, placer: Placer) -> None:
        while True:
            replica = placer.place(self._call, self._record)
            if replica is None:
                tried = self._record.tried
                await self.refuse(errors.replica_gone(tried[-1]) if tried else errors.no_replica())
                return
            try:
                await self._attempt(replica)
            except _NoAnswer as error:
                if error.is_unsent:
                    placer.note_refused(replica)
                if len(self._record.tried) >= ATTEMPTS_MAX or not self._may_repeat(error):
                    await self.refuse(errors.replica_gone(replica.name))
                    return
            except _BrokenStream:
                await self._end_broken(errors.replica_gone(replica.name))
                return
            else:
                return

    def _may_repeat(self, error: _NoAnswer) -> bool:
        """Say whether another replica may be asked; of what was sent, a POST is once at most."""
        if error.is_unsent or self._call.method in _REPEATABLE_METHODS:
            return True
        if self._is_repeated or not error.is_stale or self._call.path not in _REPEATABLE_PATHS:
            return False
        self._is_repeated = True
        return True

    async def _attempt(self, replica: Replica) -> None:
        num_tokens = 0 if self._record.planned is None else self._record.planned.computed
        self._queued = (replica, num_tokens)
        replica.num_running += 1
        replica.queued_tokens += num_tokens
        try:
            self._wait_for(Waits.FIRST_BYTE)
            async with await self._ask(replica) as answer:
                await self._pass_back(answer)
        finally:
            replica.num_running -= 1
            self._leave_queue()

    async def _ask(self, replica: Replica) -> aiohttp.ClientResponse:
        call = self._call
        asked_s = time.monotonic()
        try:
            return await self._session.request(
                call.method,
                URL(replica.url + call.target, encoded=True),
                data=_payload(call.body),
                headers=request_headers(call.headers, self._record.request_id),
                skip_auto_headers=_NO_EXTRA_HEADERS,
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _NoAnswer(is_unsent=True) from error
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            raise _NoAnswer(is_stale=time.monotonic() - asked_s < _STALE_S) from error
        except (aiohttp.ClientError, OSError) as error:
            raise _NoAnswer from error

    async def _pass_back(self, answer: aiohttp.ClientResponse) -> None:
        record = self._record
        record.status = answer.status
        record.is_stream = answer.headers.get("content-type", "").startswith(_EVENTS.decode())
        await self._start(answer.status, response_headers(answer.raw_headers, record))
        # What arrived goes on at once; when the client does not read, neither do we.
        self._wait_for(Waits.FIRST_BYTE)
        try:
            async for data in answer.content.iter_any():
                if record.first_byte_ns is None:
                    record.first_byte_ns = time.perf_counter_ns()
                    self._leave_queue()
                await self._send_body(data)
        except (aiohttp.ClientError, OSError) as error:
            raise _BrokenStream from error
        await self._finish()

    async def _start(self, status: int, headers: RawHeaders) -> None:
        self._is_started = True
        self._wait_for(Waits.CLIENT)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_body(self, data: bytes) -> None:
        self._record.response_bytes += len(data)
        self._tail = data
        self._wait_for(Waits.CLIENT)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._wait_for(Waits.NEXT_BYTE)

    async def _finish(self) -> None:
        self._record.ended_ns = time.perf_counter_ns()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error of the router's own; nothing may have been sent yet."""
        record = self._record
        record.status, record.ended = refusal.status, refusal.ended
        body = refusal.body()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *refusal.headers,
            *facts(record),
        ]
        if refusal.status in (408, 413):
            headers.append((b"connection", b"close"))  # what is left of the body is not read
        await self._start(refusal.status, headers)
        record.response_bytes += len(body)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        record.ended_ns = time.perf_counter_ns()

    async def _end_expired(self, waits: Waits) -> None:
        if waits is Waits.CLIENT:
            self._record.ended = Ended.CLIENT_STALLED
            return  # what is written waits for the client: the connection has to be aborted
        refusal = errors.replica_silent(self._record.tried[-1], self._limits.seconds(waits))
        if self._is_started:
            await self._end_broken(refusal)
        else:
            await self.refuse(refusal)

    async def _end_broken(self, refusal: Refusal) -> None:
        """End an answer that has begun, so that nobody takes it for whole.

        A stream between two events gets one more that says so. Anything else, and half an
        event cannot be taken back, is left without its end: the connection closes.
        """
        self._record.ended = refusal.ended
        self._record.ended_ns = time.perf_counter_ns()
        if self._record.is_stream and (not self._tail or self._tail.endswith(_EVENT_ENDS)):
            await self._send_body(refusal.event(self._call.path))
            await self._finish()

    def _wait_for(self, waits: Waits) -> None:
        self.waits = waits
        self.waits_since_s = time.monotonic()

    def _leave_queue(self) -> None:
        if self._queued is not None:
            replica, num_tokens = self._queued
            replica.queued_tokens -= num_tokens
            self._queued = None


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    # Large ones go out in pieces, between which others get their turn.
    return io.BytesIO(body) if len(body) > _PIECE_BYTES else body or None


def header_map(headers: RawHeaders) -> Mapping[bytes, bytes]:
    """Return headers by name, of several the last."""
    return dict(headers)
