"""A router between scripted replicas and clients, on real sockets and in one event loop."""

import asyncio
import io
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import aiohttp

from millpond.router.app import Router
from millpond.router.attribution import PoolReports
from millpond.router.options import HealthOptions, Identity, Limits, RouterOptions
from millpond.router.placement.chosen import Policy
from millpond.router.records import AccessLog
from millpond.router.replicas import Replicas
from millpond.router.server import http_server, listen

WAIT_S = 20.0
EVENT = b'data: {"choices":[{"index":0,"text":" token"}]}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"
LIMITS = Limits()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine, for less than WAIT_S times three."""

    async def bounded() -> None:
        async with asyncio.timeout(3 * WAIT_S):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds; fail with ``what`` when it is late."""
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {WAIT_S:g} s: {what}"
        await asyncio.sleep(0.01)


def chunk(data: bytes) -> bytes:
    """Return data as one chunk of HTTP's chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(body: bytes, *, status: str = "200 OK", headers: tuple[bytes, ...] = ()) -> "Script":
    """Return a script that answers in one piece."""

    async def script(call: "Call") -> None:
        lines = [f"HTTP/1.1 {status}".encode(), b"content-length: %d" % len(body), *headers]
        call.write(b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if call.method == "HEAD" else body))

    return script


def stream(*events: bytes) -> "Script":
    """Return a script that sends each event in a chunk of its own."""

    async def script(call: "Call") -> None:
        call.write(STREAM_HEAD)
        for event in events:
            call.write(chunk(event))
            await call.drain()
        call.write(END)

    return script


@dataclass
class Call:
    """A request as a replica got it, and the connection to answer on."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def write(self, data: bytes) -> None:
        self.writer.write(data)

    async def drain(self) -> None:
        await self.writer.drain()

    def kill(self) -> None:
        """End the connection as a killed process would."""
        self.writer.transport.abort()

    async def closed_by_router(self) -> None:
        """Wait until the router ends the connection."""
        with suppress(ConnectionError):
            assert await self.reader.read(1) == b""

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


Script = Callable[[Call], Awaitable[None]]


@dataclass
class ScriptedReplica:
    """Answers /health by ``health``, ``asides`` by their own scripts, and the rest by ``script``.

    ``events`` is what its address says of its cache's events.
    """

    name: str
    script: Script = field(default_factory=lambda: stream(EVENT, EVENT, DONE))
    health: int = 200
    asides: dict[str, Script] = field(default_factory=dict[str, Script])
    events: str = ""
    calls: list[Call] = field(default_factory=list[Call])
    port: int = 0
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, limit=2**20, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End as a killed process would: all connections at once, and nobody listens."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                call = await _read_call(reader, writer)
                if call.target == "/health":
                    await answer(b"", status=f"{self.health} X")(call)
                elif call.target in self.asides:
                    await self.asides[call.target](call)
                else:
                    self.calls.append(call)
                    await self.script(call)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()


async def _read_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = [(name, value.strip()) for name, _, value in (x.partition(":") for x in head[1:-2])]
    length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
    return Call(method, target, headers, await reader.readexactly(length), reader, writer)


@dataclass
class Front:
    """A running router, a client session to it, and what its access log says."""

    router: Router
    port: int
    session: aiohttp.ClientSession
    log_file: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(
        self, body: object, path: str = "/v1/completions", headers: Mapping[str, str] | None = None
    ) -> Any:  # noqa: ANN401 (aiohttp's context manager)
        """Return the request, to be entered."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        return self.session.post(self.url + path, data=data, headers=headers)

    @asynccontextmanager
    async def raw(
        self, data: bytes
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Open a connection of one's own and send."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            yield reader, writer
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the access log."""
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    async def logged(self, num_lines: int) -> list[dict[str, Any]]:
        """Wait for so many lines of the access log, and return them."""
        await until(lambda: len(self.lines()) >= num_lines, f"{num_lines} lines of the access log")
        return self.lines()

    async def ready(self, num_replicas: int) -> None:
        """Wait until so many replicas may get requests."""
        await until(
            lambda: sum(each.is_available for each in self.router.replicas) == num_replicas,
            f"{num_replicas} replicas are ready",
        )

    def loads(self) -> dict[str, int]:
        return {each.name: each.num_running for each in self.router.replicas}


@asynccontextmanager
async def front(
    *replicas: ScriptedReplica,
    policy: Policy = Policy.ROUND_ROBIN,
    limits: Limits = LIMITS,
    api_key: str | None = None,
    identity: Identity = Identity.AUTO,
    pool_socket: str | None = None,
) -> AsyncIterator[Front]:
    """Run a router in front of these replicas, which are up."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-"))
        known = Replicas()
        for each in replicas:
            await stack.enter_async_context(each)
            known.add(each.name, each.url + each.events)
        options = RouterOptions(
            policy=policy,
            identity=identity,
            api_key=api_key,
            limits=limits,
            health=HealthOptions(every_s=0.1),
        )
        log_file = Path(folder) / "access.jsonl"
        pool = None if pool_socket is None else PoolReports(Path(pool_socket))
        router = Router(known, options, pool, AccessLog(log_file))
        await router.start()
        stack.push_async_callback(router.stop)
        listener = listen("127.0.0.1", 0)
        server = http_server(router, limits, stop_grace_s=1)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(WAIT_S)
            )
        )
        made = Front(router, listener.getsockname()[1], session, log_file)
        await made.ready(len(replicas))
        await until(lambda: server.started, "the server has started")
        try:
            yield made
        finally:
            await session.close()
            server.should_exit = True
            await serving
