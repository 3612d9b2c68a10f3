"""``millpond router`` as a process in front of scripted replicas."""

import asyncio
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from millpond.cli import run as run_cli
from tests.faults.router_world import DONE, EVENT, WAIT_S, ScriptedReplica

START_S = 60.0


class Live:
    """A router's process and folder, and commands to it."""

    def __init__(self, folder: Path, replicas: list[ScriptedReplica]) -> None:
        self.folder = folder
        self.replicas = replicas
        self.process: Process | None = None
        self.url = ""

    async def start(self, port: int = 0, *flags: str) -> None:
        """Start the router, and wait until it serves and has found all replicas."""
        argv = [sys.executable, "-m", "millpond.cli", "router", "--policy", "round-robin"]
        argv += ["--port", str(port), "--pool-socket", str(self.folder / "none.sock")]
        argv += ["--admin-socket", str(self.admin), "--access-log", str(self.folder / "log")]
        argv += ["--stop-grace", "1"]
        for each in self.replicas:
            argv += ["--replica", f"{each.name}={each.url}"]
        argv += flags
        self.process = await asyncio.create_subprocess_exec(*argv, stdout=PIPE, stderr=PIPE)
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = (await self.process.stdout.readline()).decode()
        self.url = line.strip().removeprefix("serving at ")
        assert self.url.startswith("http://127.0.0.1:"), await self.errors()
        await self.states(ready=len(self.replicas))

    @property
    def admin(self) -> Path:
        return self.folder / "router.sock"

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def stop(self, number: int) -> int:
        """Send a signal; return the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        async with asyncio.timeout(WAIT_S):
            await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode

    def log(self) -> list[str]:
        """Return the lines of the access log."""
        return (self.folder / "log").read_text().splitlines()

    async def errors(self) -> str:
        assert self.process is not None
        return (await self.process.communicate())[1].decode()

    async def command(self, *words: str) -> int:
        """Run ``millpond router WORDS``."""
        argv = ["router", *words, "--admin-socket", str(self.admin)]
        return await asyncio.to_thread(run_cli, argv, {})

    async def states(self, *, ready: int) -> None:
        """Wait until the router says that so many replicas are ready."""
        transport = aiohttp.UnixConnector(str(self.admin))
        async with aiohttp.ClientSession(connector=transport) as session:

            async def num_ready() -> int:
                async with session.get("http://router/replicas") as reply:
                    found = (await reply.json())["replicas"]
                return sum(each["state"] == "ready" for each in found)

            async with asyncio.timeout(WAIT_S):
                while await num_ready() != ready:  # noqa: ASYNC110 - another process decides
                    await asyncio.sleep(0.02)

    async def served_by(self, num_requests: int) -> list[str]:
        """Return who served each of some requests."""
        names: list[str] = []
        async with aiohttp.ClientSession() as session:
            for _ in range(num_requests):
                async with session.post(f"{self.url}/v1/completions", data=b"{}") as reply:
                    assert await reply.read() == EVENT + EVENT + DONE
                    names.append(reply.headers["x-millpond-replica"])
        return names


@asynccontextmanager
async def process_of(folder: Path, replicas: list[ScriptedReplica]) -> AsyncIterator[Live]:
    """Return a router that is to be started; its process does not outlive this."""
    made = Live(folder, replicas)
    try:
        yield made
    finally:
        if made.process is not None and made.process.returncode is None:
            made.process.kill()
            await made.process.communicate()


@asynccontextmanager
async def live(*names: str) -> AsyncIterator[Live]:
    """Return the same, with replicas of these names that are up."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mp-"))
        replicas = [await stack.enter_async_context(ScriptedReplica(name)) for name in names]
        yield await stack.enter_async_context(process_of(Path(folder), replicas))
