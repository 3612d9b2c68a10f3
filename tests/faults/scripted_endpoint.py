"""An OpenAI endpoint that does what a test says, in a thread of its own."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

from millpond.bench.client import Target
from millpond.bench.stages import Scene

START_S = 20.0


@dataclass
class Asked:
    """One request as it came; times are of the endpoint's clock."""

    request_id: str
    unit: str
    prompt: list[int]
    begun_s: float
    ended_s: float | None = None


Script = Callable[["Endpoint", Asked, "Stream"], Coroutine[Any, Any, None]]


@dataclass
class Stream:
    """The answer to one request, as events."""

    response: web.StreamResponse
    num_tokens: int = 0

    async def event(self, event: Mapping[str, object]) -> None:
        await self.response.write(f"data: {json.dumps(event)}\n\n".encode())

    async def role(self) -> None:
        await self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})

    async def token(self, text: str = "x") -> None:
        self.num_tokens += 1
        usage = {"completion_tokens": self.num_tokens}
        await self.event({"choices": [{"index": 0, "text": text}], "usage": usage})

    async def done(self) -> None:
        await self.response.write(b"data: [DONE]\n\n")


@dataclass
class Endpoint:
    """Serves ``script`` at ``url`` while it is used as a context."""

    script: Script
    asked: list[Asked] = field(default_factory=list[Asked])
    num_resets: int = 0
    cache: str = "off"
    url: str = ""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(START_S)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(START_S)
        assert not self._thread.is_alive()

    def now_s(self) -> float:
        return self._loop.time()

    @property
    def target(self) -> Target:
        return Target("a", self.url, "m")

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/reset_prefix_cache", self._reset)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _reset(self, _request: web.Request) -> web.Response:
        self.num_resets += 1
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = Asked(
            request.headers["X-Request-Id"],
            request.headers["X-Session-Id"],
            body["prompt"],
            self.now_s(),
        )
        self.asked.append(asked)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.script(self, asked, Stream(response))
        asked.ended_s = self.now_s()
        return response


@dataclass
class ScriptedStage:
    """Switches the endpoint's ``cache`` and nothing else."""

    endpoint: Endpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None: ...

    @contextmanager
    def scene(self, cache: str, number: int) -> Iterator[Scene]:
        del number  # all periods are served alike
        self.endpoint.cache = cache
        yield Scene([self.endpoint.target], [self.endpoint.target], None)
