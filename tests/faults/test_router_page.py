"""The live page of a running router: its figures, who may see it, and what is away."""

import asyncio
import base64
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.faults.router_process import Live, process_of
from tests.faults.router_traffic import BLOCK, PooledReplicas, ask
from tests.faults.router_world import WAIT_S, Front, ScriptedReplica, answer, front, run
from tests.faults.world import Daemon

pytestmark = pytest.mark.timeout(120)
KEY = "a key with: a colon"
BEARER = {"authorization": f"Bearer {KEY}"}


@pytest.fixture
def connectors() -> Iterator[ExitStack]:
    """What closes the replicas' connections to the pool."""
    with ExitStack() as stack:
        yield stack


async def state_when(router: Live | Front, is_so: Callable[[Any], bool], **headers: str) -> Any:  # noqa: ANN401
    """Ask for the page's state until it is as wanted, and return it."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(WAIT_S):
        while True:
            async with session.get(f"{router.url}/millpond/state.json", headers=headers) as reply:
                assert reply.status == 200
                state = await reply.json()
            if is_so(state):
                return state
            await asyncio.sleep(0.1)


def is_joined(state: Any) -> bool:  # noqa: ANN401
    return state["pool"] == "joined"


def has_shown(num_requests: int) -> Callable[[Any], bool]:
    return lambda state: len(state["requests"]) == num_requests


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


async def start(router: Live, socket_path: str, *flags: str) -> None:
    """Start a router with a pool, and wait until it has found that."""
    key_file = router.folder / "key"
    key_file.write_text(KEY)
    await router.start(0, "--pool-socket", socket_path, "--api-key-file", str(key_file), *flags)
    await state_when(router, is_joined, **BEARER)


def test_the_figures_are_what_the_replicas_have_reported(
    daemon: Daemon, socket_path: str, connectors: ExitStack, tmp_path: Path
) -> None:
    made = PooledReplicas(connectors, socket_path, "abc", s_per_token=1e-4)
    conversations, turns = 10, 3

    async def scenario() -> None:
        for each in made.replicas:
            connectors.callback((await each.__aenter__()).kill)
        async with process_of(tmp_path, made.replicas) as router, aiohttp.ClientSession() as http:
            await start(router, socket_path)

            async def talk(number: int) -> None:
                for turn in range(1, turns + 1):
                    await ask(http, router.url, number, turn * number * BLOCK + 17, **BEARER)

            await asyncio.gather(*map(talk, range(1, conversations + 1)))
            state = await state_when(router, has_shown(conversations * turns), **BEARER)
            assert await router.stop(signal.SIGINT) == 0
        wanted: dict[str, Counter[str]] = {}
        for replica, report in made.reports:
            sums = wanted.setdefault(replica, Counter())
            sums += Counter(computed=report.computed_tokens, local=report.local_tokens)
            sums += Counter(report.writers)
        assert sum(sums.total() for sums in wanted.values()) == sum(
            report.prompt_tokens for _, report in made.reports
        )
        found = {
            reader: +Counter({"computed": own["computed"], "local": own["local"], **own["writers"]})
            for reader, own in state["prompt_tokens"].items()
        }
        assert found == {reader: +sums for reader, sums in wanted.items()}
        assert state["verdict"]["finding"] == "pays", state["verdict"]
        assert 0 < state["verdict"]["saved_s"] < 3 * 0.0001 * turns * conversations * BLOCK
        assert sum(each["num_requests"] for each in state["replicas"]) == len(made.reports)
        assert len(state["requests"]) == len(made.reports)
        assert {each["attribution"] for each in state["requests"]} == {"pool"}
        assert sum(each["num_requests"] for each in state["ttft"]["groups"]) == len(made.reports)

    run(scenario)


@pytest.mark.parametrize("path", ["/millpond", "/millpond/", "/millpond/state.json"])
def test_a_browser_is_asked_for_the_key_as_a_password(path: str) -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a"), api_key=KEY) as router:

            async def get(path: str, **headers: str) -> tuple[int, str | None]:
                async with router.session.get(router.url + path, headers=headers) as reply:
                    return reply.status, reply.headers.get("www-authenticate")

            challenge = 'Basic realm="Millpond router", charset="UTF-8"'
            right = basic("anybody", KEY)
            assert await get(path) == (401, challenge)
            assert await get(path, authorization=right) == (200, None)
            assert await get(path, authorization=right.replace("Basic", "basic")) == (200, None)
            assert await get(path, **BEARER) == (200, None)
            wrong = basic(KEY, "wrong")
            for given in (wrong, "Basic", "Basic !", "Basic YQ==", f"Basic {KEY}", "Bearer"):
                assert await get(path, authorization=given) == (401, challenge)
            # What a browser remembers and adds to any site's requests opens the page and no more.
            assert await get("/v1/models", authorization=right) == (401, None)
            assert await get("/millpond-other", authorization=right) == (401, None)
            assert await get("/v1/models", **BEARER) == (200, None)

    run(scenario)


def test_looking_is_neither_counted_nor_logged() -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a", answer(b"{}"))) as router:
            for path in ("/millpond", "/millpond/", "/millpond/state.json", "/millpond/metrics"):
                for method in ("GET", "HEAD"):
                    async with router.session.request(method, router.url + path) as reply:
                        assert reply.status == 200
                        assert bool(await reply.read()) == (method == "GET")
            async with router.session.get(router.url + "/millpond/else") as reply:
                assert reply.status == 404
            async with router.post({"prompt": "x"}):
                pass
            assert [each["path"] for each in await router.logged(2)] == [
                "/millpond/else",
                "/v1/completions",
            ]
            state = await state_when(router, has_shown(1))
            assert state["replicas"][0]["num_requests"] == 1

    run(scenario)


def test_the_page_is_no_script_of_others_and_no_frame_in_others() -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a")) as router:
            async with router.session.get(router.url + "/millpond") as reply:
                assert reply.headers["content-type"] == "text/html; charset=utf-8"
                page = reply.headers
            async with router.session.get(router.url + "/millpond/state.json") as reply:
                assert reply.headers["content-type"] == "application/json"
                state = reply.headers
            for headers in (page, state):
                assert headers["cache-control"] == "no-store"
                assert headers["x-content-type-options"] == "nosniff"
                assert "access-control-allow-origin" not in headers
            assert "frame-ancestors 'none'" in page["content-security-policy"]

    run(scenario)


def test_what_clients_call_a_request_is_shown_as_they_wrote_it() -> None:
    name = "<img src=x onerror=\"alert('1')\">\\u0041&amp;</script>"

    async def scenario() -> None:
        async with front(ScriptedReplica("a")) as router:
            async with router.post({"prompt": "x"}, headers={"x-request-id": name}):
                pass
            state = await state_when(router, has_shown(1))
            assert [each["request_id"] for each in state["requests"]] == [name]

    run(scenario)


def test_a_pool_that_goes_is_away_and_comes_back(socket_path: str, connectors: ExitStack) -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a"), pool_socket=socket_path) as router:
            state = await state_when(router, has_shown(0))
            assert state["pool"] == "away"
            assert state["verdict"]["finding"] == "no-pool"
            with Daemon(socket_path) as daemon:
                await asyncio.to_thread(daemon.wait_ready)
                state = await state_when(router, is_joined)
                assert state["verdict"]["finding"] == "too-few"
                daemon.kill()
            async with router.post({"prompt": "x" * 3000}):
                pass
            state = await state_when(router, has_shown(1))
            assert state["pool"] == "away"
            assert state["requests"][0]["attribution"] == "guessed"
            assert "not counted: 1" in state["verdict"]["counted"]

    run(scenario)
