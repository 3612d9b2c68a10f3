"""What real engines' caches hold, by their events, against what the engines then reuse.

One test of them all is part of `make test`; the others start four engines and belong to
`make test-engines`.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from millpond.router.kv_events import KvEvents
from millpond.router.replicas import Replicas as KnownReplicas
from millpond.router.tokens import TokenNames
from tests.e2e.engines import (
    BLOCK,
    SKIP_POOL,
    WINDOW,
    Replicas,
    prompt,
    telling_address,
)
from tests.e2e.test_router import router

pytestmark = pytest.mark.timeout(600)

WAIT_S = 60.0


def addresses(replicas: Replicas, names: str) -> dict[str, str]:
    """Return addresses as ``--replica`` has them."""
    system = replicas.system
    return {n: f"{system.replica(n).url},{telling_address(system.socket, n)}" for n in names}


@asynccontextmanager
async def listening(replicas: Replicas, names: str = "abcd") -> AsyncIterator[KvEvents]:
    """Follow engines as the router does."""
    known, events = KnownReplicas(), KvEvents()
    for name, address in addresses(replicas, names).items():
        events.follow(known.add(name, address))
    try:
        yield events
    finally:
        await events.close()


async def holds(
    events: KvEvents, replica: str, ids: list[int], num_tokens: int, **names: str
) -> None:
    """Wait until a request for ``ids`` would find so many of its tokens."""

    def found() -> int | None:
        return events.num_tokens(TokenNames(ids, **names)).get(replica)

    deadline = asyncio.get_running_loop().time() + WAIT_S
    while found() != num_tokens:
        assert asyncio.get_running_loop().time() < deadline, (replica, found(), num_tokens)
        await asyncio.sleep(0.01)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def cached_tokens(replicas: Replicas, replica: str, ids: list[int], **fields: object) -> int:
    """Send a request past the pool; return how many tokens the engine says its cache had."""
    place = replicas.system.replica(replica)
    before = replicas.metric(replica, "vllm:prefix_cache_hits_total")
    body = {"model": place.model, "prompt": ids, "max_tokens": 1, **SKIP_POOL, **fields}
    answer = httpx.post(f"{place.url}/v1/completions", json=body, timeout=120, trust_env=False)
    answer.raise_for_status()
    return round(replicas.metric(replica, "vllm:prefix_cache_hits_total") - before)


@pytest.mark.engines
def test_a_caches_tokens_are_known_exactly_until_it_is_reset(telling: Replicas) -> None:
    async def scenario() -> None:
        async with listening(telling) as events:
            ids = prompt(3 * BLOCK + 50, 7001)
            await asyncio.to_thread(telling.ask, "a", ids)
            await holds(events, "a", ids, 3 * BLOCK)
            assert events.num_tokens(TokenNames(ids))["b"] == 0
            assert await asyncio.to_thread(cached_tokens, telling, "a", ids) == 3 * BLOCK
            await asyncio.to_thread(telling.reset, "a")
            # An idle engine says so with its next step.
            await asyncio.to_thread(telling.ask, "a", prompt(20, 7002))
            await holds(events, "a", ids, 0)

    run(scenario)


@pytest.mark.engines
@pytest.mark.parametrize(("replica", "num_prompts"), [("a", 3), ("c", 3), ("d", 9)])
def test_what_is_known_is_what_the_engine_reuses(
    telling: Replicas, replica: str, num_prompts: int
) -> None:
    """Prompts with common beginnings, of which d must evict some to take others."""

    async def scenario() -> None:
        async with listening(telling) as events:
            common = prompt(2 * WINDOW, 7100)
            prompts = [
                (common if i % 2 else []) + prompt(700 + 100 * i, 7101 + i)
                for i in range(num_prompts)
            ]
            block = 64 if replica == "d" else 128 if replica == "c" else BLOCK
            num_evicted = 0
            for i, ids in enumerate([*prompts, *prompts[::-1], *(ids[:900] for ids in prompts)]):
                # Another prompt's answer tells that all events before it have come.
                seen = prompt(300, 7150)
                await asyncio.to_thread(cached_tokens, telling, replica, seen)
                await holds(events, replica, seen, 299 // block * block)
                known = events.num_tokens(TokenNames(ids))[replica]
                found = await asyncio.to_thread(cached_tokens, telling, replica, ids)
                assert known == found, (len(ids), known, found)
                num_evicted += i >= num_prompts and found < (len(ids) - 1) // block * block
            if replica == "d":
                assert num_evicted, "its memory is too large to show anything"

    run(scenario)


def test_an_older_engine_tells_the_same(older: Replicas) -> None:
    async def scenario() -> None:
        async with listening(older, "ab") as events:
            for num_tokens, seed in ((700, 7400), (1100, 7401), (1500, 7402)):
                ids = prompt(num_tokens, seed)
                await asyncio.to_thread(cached_tokens, older, "a", ids)
                await holds(events, "a", ids, (num_tokens - 1) // BLOCK * BLOCK)
                known = events.num_tokens(TokenNames(ids))
                assert known == {
                    "a": await asyncio.to_thread(cached_tokens, older, "a", ids),
                    "b": 0,
                }
            await asyncio.to_thread(older.reset, "a")
            await asyncio.to_thread(older.ask, "a", prompt(20, 7403))
            await holds(events, "a", ids, 0)

    run(scenario)


@pytest.mark.engines
def test_adapters_and_salts_have_blocks_of_their_own(telling: Replicas) -> None:
    async def scenario() -> None:
        async with listening(telling) as events:
            ids = prompt(300, 7200)
            ask = asyncio.to_thread
            await ask(cached_tokens, telling, "d", ids, model="x")
            await holds(events, "d", ids, 256, adapter="x")
            await ask(cached_tokens, telling, "d", ids, cache_salt="s")
            await holds(events, "d", ids, 256, salt="s")
            await holds(events, "d", ids, 0)
            await ask(cached_tokens, telling, "d", ids, model="x", cache_salt="s")
            await holds(events, "d", ids, 256, adapter="x", salt="s")

    run(scenario)


@pytest.mark.engines
def test_the_router_sends_requests_where_their_tokens_are(telling: Replicas) -> None:
    text = "once upon a time " * 60
    model = telling.system.replica("a").model
    chat = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    with router(telling, "prefix-affinity", addresses(telling, "ab")) as front:

        def ask(body: dict[str, Any], path: str) -> tuple[dict[str, Any], httpx.Headers]:
            # Other spaces and escapes than another client's: the same tokens.
            indent = 1 if path == "/v1/completions" else None
            answer = front.http.post(
                path,
                content=json.dumps(body, indent=indent).replace("once", "\\u006fnce"),
                headers={"content-type": "application/json"},
            )
            line = front.logged(answer.raise_for_status().headers["x-millpond-request-id"])
            return line, answer.headers

        # Past the router: it is not told of what b computes but by b.
        place = telling.system.replica("b")
        httpx.post(
            f"{place.url}/v1/chat/completions", json=chat, timeout=120, trust_env=False
        ).raise_for_status()
        line, headers = ask(chat, "/v1/chat/completions")
        assert headers["x-millpond-prefix-identity"] == "events"
        assert headers["x-millpond-replica"] == headers["x-millpond-prefix-holder"] == "b"
        found = line["attribution"]
        assert found["source"] == "pool"
        assert line["prompt_tokens_guessed"] == found["prompt_tokens"], "with the chat's template"
        assert line["local_tokens_guessed"] == found["local_tokens"] >= BLOCK
        telling.reset("b")
        telling.ask("b", prompt(20, 7300))
        text_only = {"model": model, "prompt": text, "max_tokens": 4}
        line, headers = ask(text_only, "/v1/completions")
        assert headers["x-millpond-prefix-holder"] == "none", "other tokens, for want of a template"
        assert line["prompt_tokens_guessed"] == line["attribution"]["prompt_tokens"]
        line, headers = ask(text_only, "/v1/completions")
        assert line["local_tokens_guessed"] == line["attribution"]["local_tokens"] >= BLOCK
        line, headers = ask(chat, "/v1/chat/completions")
        assert headers["x-millpond-prefix-holder"] == "none", "b has forgotten it, and said so"
