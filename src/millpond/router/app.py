"""The front: an ASGI app that answers its own few paths and passes on everything else."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiohttp

from millpond.router import errors
from millpond.router.attribution import Attributor, PoolReports, SeenNames
from millpond.router.errors import Ended, Refusal
from millpond.router.exchange import Call, Exchange, Message, Send, header_map
from millpond.router.headers import REQUEST_ID, request_headers
from millpond.router.health import Health
from millpond.router.holdings import Holdings
from millpond.router.http_protocol import ABORT
from millpond.router.metrics import CONTENT_TYPE, Metrics
from millpond.router.options import METRICS_PATH, RouterOptions
from millpond.router.page.serving import PAGE_PATHS, STATE_PATH, Answer, LivePage
from millpond.router.placement.base import Asked
from millpond.router.placement.chosen import make_placement
from millpond.router.placement.cost import work_of
from millpond.router.placement.estimates import Estimates, Work
from millpond.router.prompts import GENERATING, Prompt, named_by_headers
from millpond.router.records import AccessLog, Record
from millpond.router.replicas import Replica, Replicas, State

Receive = Callable[[], Awaitable[Message]]
Scope = dict[str, Any]

_log = logging.getLogger(__name__)

OWN_PATHS: Final = "/millpond"
_ANSWERED_PATHS: Final = frozenset({METRICS_PATH, STATE_PATH, *PAGE_PATHS})
"""Answered by the router itself, and neither logged nor counted."""
_OPEN_PATHS: Final = frozenset({"/health"})
"""Answered without the router's own key, as by vLLM."""
_WATCH_S_MAX: Final = 1.0
_WATCHES_PER_LIMIT: Final = 10
_STOP_S_MAX: Final = 5.0
_KEEPALIVE_S: Final = 3.0
"""Less than the 5 s after which vLLM closes an idle connection: none is used as it closes."""


class Router:
    """The app. Between ``start`` and ``stop`` it serves; both belong to one event loop."""

    def __init__(
        self, replicas: Replicas, options: RouterOptions, pool: PoolReports | None, log: AccessLog
    ) -> None:
        self.replicas = replicas
        self._options = options
        self._log = log
        self._estimates = Estimates()
        self._placement = make_placement(options.policy, self._estimates)
        self._holdings = Holdings(
            replicas,
            options.identity,
            local_tokens=options.local_tokens,
            pool_tokens=options.pool_tokens,
        )
        self._metrics = Metrics(replicas, self._estimates)
        self._page = LivePage(
            replicas,
            options.policy.value,
            identity=lambda: self._holdings.identity,
            has_pool=lambda: self._attributor.has_pool,
        )
        self._attributor = Attributor(
            pool, on_done=self._note_done, on_new_pool=self._holdings.forget_pool
        )
        self._seen_names = SeenNames()
        self._exchanges: set[Exchange] = set()
        self._serving: set[asyncio.Task[object]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None
        self._health: Health | None = None

    async def start(self) -> None:
        """Begin to look after the replicas."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._options.limits.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._holdings.start(self._session)
        self._health = Health(
            self.replicas, self._session, self._options.health, on_down=self._holdings.forget
        )
        self._tasks = [
            asyncio.create_task(each)
            for each in (self._health.run(), self._attributor.run(), self._watch())
        ]

    async def wait_broken(self) -> None:
        """Wait for ever, or raise what ended one of the router's own tasks: a bug."""
        await asyncio.gather(*self._tasks)

    async def stop(self) -> None:
        """End everything; requests that still run are cut off."""
        ending = {*self._tasks, *self._serving}
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=_STOP_S_MAX)
        await self._holdings.stop()
        self._attributor.close()
        self._log.close()
        if self._session is not None:
            await self._session.close()

    def add(self, name: str, address: str) -> Replica:
        """Take a replica in (see ``Replicas.add``), and look at it at once."""
        added = self.replicas.add(name, address)
        if added.state is State.STARTING:
            self._holdings.follow(added)  # another process of this name, maybe
        if self._health is not None:
            self._health.check_soon()
        return added

    # ------------------------------------------------------------ serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._session is None:
            raise RuntimeError(f"the router serves HTTP once it has started, not {scope['type']}")
        record = self._record(scope)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            exchange = await self._take(scope, receive, send, record)
            if exchange is not None:
                await self._serve(exchange, receive)
                if exchange.is_stalled:
                    scope["extensions"][ABORT]["abort"]()
        except asyncio.CancelledError:
            record.ended = Ended.ROUTER_STOPPED
            raise
        except Exception:
            record.ended = Ended.ROUTER_FAILED
            _log.exception("request failed: request_id=%s", record.request_id)
            raise
        finally:
            self._serving.discard(task)
            self._note_ended(record)

    async def _take(
        self, scope: Scope, receive: Receive, send: Send, record: Record
    ) -> Exchange | None:
        """Read a request; None if it was answered already, or its client has gone."""
        assert self._session is not None
        refusal = self._refusal(scope)
        prompt, body = Prompt(), b""
        if refusal is None:
            found = await self._read_body(receive)
            if found is None:
                record.ended = Ended.CLIENT_GONE
                return None
            refusal, body = found
        if refusal is None:
            headers = header_map(scope["headers"])
            named = named_by_headers(headers, self._options.affinity)
            key = headers.get(b"authorization", b"").decode() or None
            prompt = await self._holdings.read(record.path, body, named, key)
        record.request_bytes = len(body)
        call = Call(record.method, record.path, _target(scope), scope["headers"], body, prompt)
        exchange = Exchange(call, record, send, self._session, self._options.limits)
        if refusal is not None:
            await exchange.refuse(refusal)
        elif record.path in _ANSWERED_PATHS:
            await _answer(send, self._own_answer(record.path))
        else:
            return exchange
        return None

    def _refusal(self, scope: Scope) -> Refusal | None:
        path: str = scope["path"]
        headers = scope["headers"]
        is_own = path == OWN_PATHS or path.startswith(OWN_PATHS + "/")
        key = self._options.api_key
        if key is not None and path not in _OPEN_PATHS:
            given = header_map(headers).get(b"authorization", b"")
            if not _is_key(given, key.encode(), or_password=is_own):
                return errors.password_missing() if is_own else errors.unauthorized()
        if is_own and path not in _ANSWERED_PATHS:
            return errors.not_found(path)
        try:
            request_headers(headers, "")
        except UnicodeDecodeError:
            return errors.bad_header()
        length = header_map(headers).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._options.limits.body_bytes_max:
            return errors.body_too_large(self._options.limits.body_bytes_max)
        return None

    def _own_answer(self, path: str) -> Answer:
        if path == METRICS_PATH:
            return Answer([(b"content-type", CONTENT_TYPE.encode())], self._metrics.text())
        return self._page.answer(path)

    async def _read_body(self, receive: Receive) -> tuple[Refusal | None, bytes] | None:
        limits = self._options.limits
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            try:
                async with asyncio.timeout(limits.client_s):
                    message = await receive()
            except TimeoutError:
                return errors.body_late(limits.client_s), b""
            if message["type"] == "http.disconnect":
                return None
            part: bytes = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > limits.body_bytes_max:
                return errors.body_too_large(limits.body_bytes_max), b""
            parts.append(part)
            if not message.get("more_body"):
                return None, b"".join(parts)

    async def _serve(self, exchange: Exchange, receive: Receive) -> None:
        """Run an exchange until it ends or its client has gone, which ends it upstream too."""
        self._exchanges.add(exchange)
        running = asyncio.create_task(exchange.run(self))
        gone = asyncio.create_task(_wait_gone(receive))
        try:
            await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (running, gone):
                task.cancel()
            results = await asyncio.gather(running, gone, return_exceptions=True)
            self._exchanges.discard(exchange)
        for result in results:
            if isinstance(result, Exception):
                raise result

    # ------------------------------------------------------------ placing

    def place(self, call: Call, record: Record) -> Replica | None:
        """Choose a replica for a call (see ``Placer``)."""
        prompt = call.prompt
        located = self._holdings.locate(prompt)
        asked = Asked(
            num_tokens=prompt.num_tokens,
            conversation=prompt.conversation,
            opening=prompt.opening,
            local_tokens=located.local_tokens,
            pooled_tokens=located.pooled_tokens if self._attributor.has_pool else 0,
        )
        loads = self.replicas.loads(without=record.tried)
        name = self._placement.choose(asked, loads)
        if name is None:
            return None
        record.tried.append(name)
        record.replica = name
        record.prompt_tokens = prompt.num_tokens
        record.prompt_bytes = prompt.text_bytes
        record.local_tokens = asked.local_tokens.get(name, 0)
        if prompt.num_tokens:
            record.identity = located.identity
            record.holder = located.holder(name)
            load = next(each for each in loads if each.name == name)
            record.planned = work_of(asked, load, self._estimates)
            self._holdings.note(prompt, record)
        return self.replicas[name]

    def note_refused(self, replica: Replica) -> None:
        """Take a replica for down (see ``Placer``)."""
        if self._health is not None:
            self._health.note_refused(replica)

    # ------------------------------------------------------------ afterwards

    def _record(self, scope: Scope) -> Record:
        named = [value for name, value in scope["headers"] if name == REQUEST_ID]
        # Of several names none is better than the others, and a report has one.
        given = named[0].decode("latin-1") if len(named) == 1 else ""
        is_reported = scope["path"] in GENERATING
        return Record(
            request_id=given or secrets.token_hex(16),
            method=scope["method"],
            path=scope["path"],
            policy=self._options.policy.value,
            is_own_id=not given,
            given_name=self._seen_names.note(given) if given and is_reported else None,
        )

    def _note_ended(self, record: Record) -> None:
        if record.ended_ns is None:
            record.ended_ns = time.perf_counter_ns()
        if record.replica is not None:
            self.replicas[record.replica].num_requests += 1
        if record.path not in _ANSWERED_PATHS:
            self._attributor.submit(record)

    def _note_done(self, record: Record) -> None:
        seen, planned = record.attribution, record.planned
        if seen is not None and seen.is_of_one_prompt:
            if seen.source == "pool":
                self._holdings.text.learn(record.prompt_bytes, seen.prompt_tokens)
            if planned is not None and record.ttft_s is not None:
                self._estimates.learn(
                    Work(planned.queued, seen.computed_tokens, seen.loaded_tokens), record.ttft_s
                )
        self._metrics.add(record)
        self._page.window.note(record)
        self._log.write(record)

    async def _watch(self) -> None:
        """Expire exchanges that wait for too long, for ever."""
        limits = self._options.limits
        shortest_s = min(limits.first_byte_s, limits.next_byte_s, limits.client_s)
        while True:
            await asyncio.sleep(min(_WATCH_S_MAX, shortest_s / _WATCHES_PER_LIMIT))
            now_s = time.monotonic()
            for exchange in tuple(self._exchanges):
                exchange.expire(now_s)


def _target(scope: Scope) -> str:
    """Return path and query as they were written; the parser lets ASCII through only."""
    path, query = scope["raw_path"].decode("ascii"), scope["query_string"].decode("ascii")
    return f"{path}?{query}" if query else path


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _is_key(given: bytes, key: bytes, *, or_password: bool) -> bool:
    """Say whether an Authorization header has the key; a browser sends it as a password."""
    scheme, _, credentials = given.partition(b" ")
    if or_password and scheme.lower() == b"basic":
        try:
            _, _, password = base64.b64decode(credentials, validate=True).partition(b":")
        except binascii.Error:
            return False
        return hmac.compare_digest(password, key)
    return hmac.compare_digest(given, b"Bearer " + key)


async def _answer(send: Send, answer: Answer) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": answer.headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
