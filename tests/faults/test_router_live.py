"""``millpond router`` as a process: three live replicas, drained, added, restarted, killed."""

import asyncio
import json
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import pytest

from millpond.cli.exits import Exit
from millpond.router.health import Health
from millpond.router.options import ServeOptions
from millpond.router.server import serve
from tests.faults.router_process import START_S, live
from tests.faults.router_world import (
    DONE,
    EVENT,
    WAIT_S,
    Call,
    ScriptedReplica,
    run,
    stream,
    until,
)

pytestmark = pytest.mark.timeout(120)


def test_three_replicas_are_drained_and_added_while_requests_run(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def scenario() -> None:
        async with live("a", "b", "c") as router, ScriptedReplica("d") as fourth:
            await router.start()
            assert sorted(await router.served_by(6)) == list("aabbcc")

            go_on = asyncio.Event()

            async def held(call: Call) -> None:
                await go_on.wait()
                await stream(EVENT, EVENT, DONE)(call)

            router.replicas[0].script = held
            running = asyncio.create_task(router.served_by(3))
            await until(lambda: len(router.replicas[0].calls) == 3, "a stream at a")
            assert await router.command("drain", "a") == Exit.OK
            assert "1 requests run there" in capfd.readouterr().out
            assert set(await router.served_by(4)) == {"b", "c"}
            go_on.set()
            assert "a" in await running, "what runs at a drained replica ends there"

            assert await router.command("add", f"d={fourth.url}") == Exit.OK
            await router.states(ready=4)
            assert set(await router.served_by(6)) == {"b", "c", "d"}
            assert await router.command("add", f"a={router.replicas[0].url}") == Exit.OK
            assert set(await router.served_by(8)) == {"a", "b", "c", "d"}

            capfd.readouterr()
            assert await router.command("replicas", "--json") == Exit.OK
            shown = json.loads(capfd.readouterr().out)["data"]["replicas"]
            assert [each["name"] for each in shown] == ["a", "b", "c", "d"]
            assert {each["num_running"] for each in shown} == {0}
            assert await router.command("replicas") == Exit.OK
            assert fourth.url in capfd.readouterr().out
            for words in (("drain", "z"), ("add", f"b={fourth.url}"), ("add", "e=ftp://x")):
                assert await router.command(*words) == Exit.USAGE
                assert words[1].partition("=")[0] in capfd.readouterr().err

    run(scenario)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_streams_and_then_the_router(number: int) -> None:
    async def scenario() -> None:
        async with live("a") as router:
            await router.start()
            closed = asyncio.Event()

            async def endless(call: Call) -> None:
                await stream(EVENT)(call) if False else call.write(b"")
                await call.closed_by_router()
                closed.set()

            router.replicas[0].script = endless
            asking = asyncio.create_task(router.served_by(1))
            await until(lambda: bool(router.replicas[0].calls), "a request runs")
            assert await router.stop(number) == Exit.OK
            async with asyncio.timeout(WAIT_S):
                await closed.wait()
            with pytest.raises((aiohttp.ClientError, AssertionError)):
                await asking
            assert not router.admin.exists()
            (line,) = router.log()
            assert json.loads(line)["ended"] == "router-stopped"

    run(scenario)


def test_a_killed_router_starts_again_at_the_same_places() -> None:
    async def scenario() -> None:
        async with live("a", "b") as router:
            await router.start()
            assert len(await router.served_by(2)) == 2
            await until(lambda: len(router.log()) == 2, "both are in the access log")
            port = router.port
            assert await router.stop(signal.SIGKILL) == -signal.SIGKILL
            assert router.admin.exists()
            await router.start(port)
            assert router.port == port
            assert len(await router.served_by(2)) == 2
            assert await router.stop(signal.SIGINT) == Exit.OK
            assert len(router.log()) == 4

    run(scenario)


def test_places_that_are_taken_are_named() -> None:
    async def scenario() -> None:
        async with live("a") as router:
            await router.start()
            argv = ["router", "--replica", f"a={router.replicas[0].url}"]
            argv += ["--pool-socket", str(router.folder / "none.sock")]
            busy_port = [*argv, "--port", str(router.port)]
            busy_port += ["--admin-socket", str(router.folder / "other.sock")]
            busy_socket = [*argv, "--port", "0", "--admin-socket", str(router.admin)]
            for words, named in ((busy_port, str(router.port)), (busy_socket, str(router.admin))):
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "millpond.cli", *words, stdout=PIPE, stderr=PIPE
                )
                async with asyncio.timeout(START_S):
                    _, errors = await process.communicate()
                assert process.returncode == Exit.SETUP
                assert named in errors.decode()
            assert await router.served_by(1) == ["a"]

    run(scenario)


def test_a_bug_in_a_task_of_its_own_ends_the_router_and_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its health checks, say, a router would go on and serve more and more wrongly."""

    async def fail(_health: Health) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Health, "run", fail)
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        options = ServeOptions(
            host="127.0.0.1",
            port=0,
            replicas={"a": "http://127.0.0.1:9"},
            admin_socket=Path(folder) / "router.sock",
            pool_socket=None,
        )
        with pytest.raises(KeyError, match="a bug"):
            serve(options)
