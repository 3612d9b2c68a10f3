"""What the router tells of where tokens came from: by the pool's word, or as a guess."""

import asyncio
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from millpond.router import attribution
from millpond.router.placement.chosen import Policy
from millpond.service.client import SchedulerClient
from millpond.service.protocol import Report
from tests.faults.router_world import (
    DONE,
    EVENT,
    Call,
    Front,
    Script,
    ScriptedReplica,
    answer,
    front,
    run,
    stream,
    until,
)
from tests.faults.world import Daemon, identity

BODY = {"model": "m", "prompt": "word " * 1000, "stream": True}
Tokens = tuple[int, int, dict[str, int]]
"""Computed, local, loaded by writer."""


@pytest.fixture
def connectors() -> Iterator[ExitStack]:
    """What closes the replicas' connections to the pool."""
    with ExitStack() as stack:
        yield stack


def reporting(
    connectors: ExitStack, socket_path: str, replica: str, tokens: Callable[[], Tokens]
) -> Script:
    """Return a script that streams, and reports as a replica's connector does."""
    client = connectors.enter_context(
        SchedulerClient.connect(socket_path, identity(replica, f"key-{replica}"))
    )

    async def script(call: Call) -> None:
        await stream(EVENT, DONE)(call)
        computed, local, writers = tokens()
        loaded = sum(writers.values())
        (name,) = call.header("x-request-id")
        client.report(
            Report(
                request_id=f"cmpl-{name}-0-0123abcd",
                prompt_tokens=computed + local + loaded,
                computed_tokens=computed,
                local_tokens=local,
                loaded_tokens=loaded,
                writers=writers,
            )
        )

    return script


async def joined(router: Front) -> None:
    await until(lambda: router.router._attributor.has_pool, "the router has found the pool")


async def ask(router: Front, **headers: str) -> dict[str, str]:
    async with router.post(BODY, headers=headers) as reply:
        assert await reply.content.read() == EVENT + DONE
        return dict(reply.headers)


def metric(text: str, name: str, **labels: str) -> float:
    """Return the sum of a metric over the lines that have these labels."""
    found = 0.0
    for line in text.splitlines():
        if line.startswith((f"millpond_router_{name}{{", f"millpond_router_{name} ")):
            given = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if labels.items() <= given.items():
                found += float(line.rpartition(" ")[2])
    return found


async def metrics(router: Front) -> str:
    async with router.session.get(f"{router.url}/millpond/metrics") as reply:
        return await reply.text()


def test_tokens_are_what_the_pool_was_told(
    daemon: Daemon, socket_path: str, connectors: ExitStack
) -> None:
    tokens = {"a": (900, 100, {}), "b": (50, 0, {"a": 900, "b": 50})}

    async def scenario() -> None:
        replicas = [
            ScriptedReplica(
                name, reporting(connectors, socket_path, name, lambda name=name: tokens[name])
            )
            for name in "ab"
        ]
        async with front(*replicas, pool_socket=socket_path) as router:
            await joined(router)
            first = await ask(router)
            second = await ask(router)
            assert (first["x-millpond-prefix-holder"], first["x-millpond-moved"]) == ("none", "no")
            assert (second["x-millpond-replica"], second["x-millpond-moved"]) == ("b", "yes")
            assert second["x-millpond-prefix-holder"] == "a"
            assert second["x-millpond-prefix-identity"] == "text"
            one, other = [line["attribution"] for line in await router.logged(2)]
            assert (one["source"], one["reader"]) == ("pool", "a")
            assert (one["computed_tokens"], one["local_tokens"]) == (900, 100)
            assert (other["pool_own_tokens"], other["pool_other_tokens"]) == (50, 900)
            assert other["writers"] == {"a": 900, "b": 50}
            text = await metrics(router)
            by_source = {"computed": 950, "local": 100, "pool-own": 50, "pool-other": 900}
            for source, wanted in by_source.items():
                assert metric(text, "prompt_tokens_total", source=source) == wanted
            assert metric(text, "loaded_tokens_total", writer="a", reader="b") == 900
            assert metric(text, "moved_requests_total") == 1
            assert metric(text, "prefixed_requests_total") == 1
            assert metric(text, "ttft_seconds_count", source="pool-other") == 1
            assert metric(text, "ttft_seconds_count", source="computed") == 1
            assert metric(text, "prefill_saved_seconds_total") > 0

    run(scenario)


def test_the_sum_over_requests_is_the_pools(
    daemon: Daemon, socket_path: str, connectors: ExitStack
) -> None:
    num_requests = 40
    counter = iter(range(10_000))

    def tokens() -> Tokens:
        i = next(counter)
        return 100 + i, i % 3, {"a": i % 7, "b": i % 5}

    async def scenario() -> None:
        replicas = [ScriptedReplica(n, reporting(connectors, socket_path, n, tokens)) for n in "ab"]
        async with front(*replicas, pool_socket=socket_path) as router:
            await joined(router)
            await asyncio.gather(*(ask(router) for _ in range(num_requests)))
            lines = await router.logged(num_requests)
            sums: dict[str, Counter[str]] = {"a": Counter(), "b": Counter()}
            for line in lines:
                found = line["attribution"]
                assert found["source"] == "pool"
                for name in ("prompt", "computed", "local", "loaded"):
                    sums[line["replica"]][f"{name}_tokens"] += found[f"{name}_tokens"]
                sums[line["replica"]]["num_requests"] += 1
            with daemon.admin() as admin:
                status: Any = admin.status()
            for name, totals in status["tokens"].items():
                assert sums[name] == {key: totals[key] for key in sums[name]}

    run(scenario)


def test_one_name_for_several_requests_is_ambiguous(
    daemon: Daemon, socket_path: str, connectors: ExitStack
) -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a", reporting(connectors, socket_path, "a", lambda: (10, 0, {})))
        async with front(replica, pool_socket=socket_path) as router:
            await joined(router)
            headers = await ask(router, **{"X-Request-Id": "mine"})
            assert headers["x-millpond-request-id"] == "mine"
            await router.logged(1)
            await ask(router, **{"X-Request-Id": "mine"})
            one, other = await router.logged(2)
            assert one["attribution"]["source"] == "pool"
            assert other["attribution"]["source"] == "pool-ambiguous"
            assert other["attribution"]["computed_tokens"] == 20
            assert metric(await metrics(router), "prompt_tokens_total", source="computed") == 10

    run(scenario)


def test_of_two_requests_at_once_under_a_new_name_neither_is_sure(
    daemon: Daemon, socket_path: str, connectors: ExitStack
) -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a")
        report = reporting(connectors, socket_path, "a", lambda: (10, 0, {}))

        async def once_both_are_here(call: Call) -> None:
            await until(lambda: len(replica.calls) == 2, "both requests run")
            # Only one of the two reports has come when the router first asks.
            await (report if call is replica.calls[0] else stream(EVENT, DONE))(call)

        replica.script = once_both_are_here
        async with front(replica, pool_socket=socket_path) as router:
            await joined(router)
            await asyncio.gather(*(ask(router, **{"X-Request-Id": "mine"}) for _ in range(2)))
            sources = [line["attribution"]["source"] for line in await router.logged(2)]
            assert sources == ["pool-ambiguous"] * 2

    run(scenario)


@pytest.mark.parametrize(("num_reports", "is_learnt"), [(1, True), (2, False)])
def test_only_a_request_of_one_prompt_teaches_anything(
    daemon: Daemon, socket_path: str, connectors: ExitStack, num_reports: int, is_learnt: bool
) -> None:
    async def scenario() -> None:
        one = reporting(connectors, socket_path, "a", lambda: (5000, 0, {}))
        other = reporting(connectors, socket_path, "b", lambda: (5000, 0, {}))

        async def script(call: Call) -> None:
            await one(call)
            if num_reports == 2:
                await other(call)

        async with front(ScriptedReplica("a", script), pool_socket=socket_path) as router:
            await joined(router)
            before = (
                router.router._holdings.text.bytes_per_token,
                router.router._estimates.constants,
            )
            async with router.post(BODY) as reply:
                await reply.content.read()
            (line,) = await router.logged(1)
            assert line["attribution"]["prompt_tokens"] == 5000 * num_reports
            now = router.router._holdings.text.bytes_per_token, router.router._estimates.constants
            assert (now[0] != before[0], now[1] != before[1]) == (is_learnt, is_learnt)

    run(scenario)


def test_what_nobody_reports_is_a_guess_that_says_so(
    daemon: Daemon, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attribution, "_ASK_AFTER_S", (0.01, 0.02))

    async def scenario() -> None:
        async with front(
            ScriptedReplica("a", stream(EVENT, DONE)), pool_socket=socket_path
        ) as router:
            await joined(router)
            for _ in range(2):
                await ask(router)
            cold, again = [line["attribution"] for line in await router.logged(2)]
            assert (cold["source"], again["source"]) == ("guessed", "guessed")
            assert cold["local_tokens"] == 0
            assert again["local_tokens"] > 0.8 * again["prompt_tokens"] > 900
            text = await metrics(router)
            assert metric(text, "prompt_tokens_total", attribution="pool") == 0
            assert metric(text, "prompt_tokens_total", attribution="guessed") == 2500

    run(scenario)


def test_without_the_pool_routing_goes_on_and_the_pool_is_found_again(
    socket_path: str, connectors: ExitStack
) -> None:
    async def scenario() -> None:
        replicas = [ScriptedReplica(name, stream(EVENT, DONE)) for name in "ab"]
        async with front(*replicas, pool_socket=socket_path, policy=Policy.COST) as router:
            await ask(router)
            with Daemon(socket_path) as daemon:
                await asyncio.to_thread(daemon.wait_ready)
                await joined(router)
                replicas[0].script = replicas[1].script = reporting(
                    connectors, socket_path, "a", lambda: (7, 0, {})
                )
                await ask(router)
                lines = await router.logged(2)
                assert [x["attribution"]["source"] for x in lines] == ["guessed", "pool"]
                daemon.kill()
                replicas[0].script = replicas[1].script = stream(EVENT, DONE)
                for _ in range(3):
                    await ask(router)
            await until(lambda: not router.router._attributor.has_pool, "the pool is known gone")
            await ask(router)
            lines = await router.logged(6)
            assert [x["attribution"]["source"] for x in lines[2:]] == ["guessed"] * 4

    run(scenario)


def test_a_daemon_that_freezes_holds_up_nobody(
    daemon: Daemon, socket_path: str, connectors: ExitStack
) -> None:
    async def scenario() -> None:
        async with front(
            ScriptedReplica("a", stream(EVENT, DONE)), pool_socket=socket_path
        ) as router:
            await joined(router)
            daemon.signal(signal.SIGSTOP)
            try:
                for _ in range(5):
                    async with asyncio.timeout(1.5):  # less than the router's patience with it
                        await ask(router)
                lines = await router.logged(5)
            finally:
                daemon.signal(signal.SIGCONT)
            assert {line["attribution"]["source"] for line in lines} == {"guessed"}

    run(scenario)


def test_only_what_generates_is_attributed() -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a", answer(b"{}"))) as router:
            for path in ("/tokenize", "/v1/embeddings", "/v1/completions"):
                async with router.post({"prompt": "x" * 3000}, path=path):
                    pass
            lines = await router.logged(3)
            found = {line["path"]: line["attribution"] for line in lines}
            assert found["/tokenize"] is found["/v1/embeddings"] is None
            assert found["/v1/completions"]["source"] == "guessed"

    run(scenario)


def test_cost_goes_where_the_prefix_is() -> None:
    async def scenario() -> None:
        replicas = [ScriptedReplica(name, stream(EVENT, DONE)) for name in "ab"]
        async with front(*replicas, policy=Policy.COST) as router:
            first, second = replicas
            first.health = 503
            await router.ready(1)
            assert (await ask(router))["x-millpond-replica"] == "b"
            first.health = 200
            await router.ready(2)
            # Of equals it would be a.
            assert (await ask(router))["x-millpond-replica"] == "b"
            second.health = 503
            await router.ready(1)
            headers = await ask(router)
            # b is down and may have lost all it held: nobody is known to hold the prefix.
            assert headers["x-millpond-prefix-holder"] == "none"
            assert headers["x-millpond-replica"] == "a"

    run(scenario)


def test_a_name_at_another_address_holds_nothing_of_what_it_held_before() -> None:
    async def scenario() -> None:
        one, other = (ScriptedReplica(name, stream(EVENT, DONE)) for name in "ab")
        async with front(one) as router, other:
            await ask(router)
            assert (await ask(router))["x-millpond-prefix-holder"] == "a"
            router.router.replicas.drain("a")
            router.router.add("a", one.url)
            assert (await ask(router))["x-millpond-prefix-holder"] == "a", "it is the same one"
            await until(lambda: router.loads() == {"a": 0}, "nothing runs there")
            router.router.replicas.drain("a")
            router.router.add("a", other.url)
            await router.ready(1)
            assert (await ask(router))["x-millpond-prefix-holder"] == "none"
            assert len(other.calls) == 1

    run(scenario)
