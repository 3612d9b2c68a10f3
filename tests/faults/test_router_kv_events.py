"""Events of caches over real sockets: lost, repeated, restarted, without sense. Requests go on."""

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from millpond.router import kv_events
from millpond.router.placement.chosen import Policy
from tests.faults.kv_publisher import Publisher
from tests.faults.router_world import Front, ScriptedReplica, answer, front, run, until
from tests.router_events import CLEARED, hashes, payload, removed, stored

IDS = list(range(1000, 2000))
OTHER = list(range(5000, 6000))
MODELS = answer(msgspec.json.encode({"data": [{"id": "m"}, {"id": "x", "parent": "m"}]}))


def known(router: Front, ids: list[int] = IDS) -> dict[str, int]:
    """Return what each replica is known to hold of a prompt that goes on after ``ids``."""
    names = kv_events.TokenNames([*ids, 0])
    return dict(router.router._holdings._events.num_tokens(names))


async def ask(router: Front, ids: list[int] = IDS, model: str = "m") -> dict[str, str]:
    async with router.post({"model": model, "prompt": [*ids, 0], "stream": True}) as reply:
        await reply.read()
        assert reply.status == 200
        return {
            name.removeprefix("x-millpond-"): value
            for name, value in reply.headers.items()
            if name.startswith("x-millpond-")
        }


@asynccontextmanager
async def world(
    *, address: Callable[[Publisher], str] = lambda publisher: publisher.address
) -> AsyncIterator[tuple[Front, Publisher, Publisher]]:
    """Run a router before a and b, whose publishers it listens to."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        async with Publisher(Path(folder), "a") as a, Publisher(Path(folder), "b") as b:
            replicas = [
                ScriptedReplica(name, asides={"/v1/models": MODELS}, events=address(publisher))
                for name, publisher in (("a", a), ("b", b))
            ]
            async with front(*replicas, policy=Policy.PREFIX_AFFINITY) as router:
                for each in (a, b):
                    await each.heard()
                yield router, a, b


async def holds(router: Front, **tokens: int) -> None:
    await until(lambda: known(router) == tokens, f"{tokens} tokens are known, and no others")


def test_requests_go_where_the_cache_holds_their_prefix() -> None:
    async def scenario() -> None:
        async with world() as (router, _, b):
            await holds(router, a=0, b=0)
            first = await ask(router)
            assert (first["replica"], first["prefix-identity"]) == ("a", "events")
            assert first["prefix-holder"] == "none"
            # It was sent to a, and b says that it has it: that counts, and nothing else.
            await b.publish(stored(IDS, 16))
            await holds(router, a=0, b=992)
            for _ in range(3):
                found = await ask(router)
                assert (found["replica"], found["prefix-holder"], found["moved"]) == (
                    "b",
                    "b",
                    "no",
                )
            await b.publish(removed(hashes(IDS, 16)))
            await holds(router, a=0, b=0)
            assert (await ask(router))["prefix-holder"] == "none"
            lines = await router.logged(5)
            assert [line["local_tokens_guessed"] for line in lines] == [0, 992, 992, 992, 0]
            assert {line["prompt_tokens_guessed"] for line in lines} == {1001}
            assert {line["prefix_identity"] for line in lines} == {"events"}

    run(scenario)


def test_an_adapter_has_blocks_of_its_own() -> None:
    async def scenario() -> None:
        async with world() as (router, a, b):
            keys = [["x"]] * 62
            await b.publish(stored(IDS, 16, salt="x", extra_keys=keys, lora_name="x"))
            await a.publish(stored(IDS, 16))
            await until(lambda: known(router) == {"a": 992, "b": 0}, "a's are known")
            await until(lambda: router.router._holdings._events._feeds["b"]._next == 1, "b's too")
            assert (await ask(router))["prefix-holder"] == "a"
            assert (await ask(router, model="x"))["prefix-holder"] == "b"
            unknown = await ask(router, model="nobody")
            assert unknown["prefix-identity"] == "text", "whose blocks it has nobody says"

    run(scenario)


def test_lost_batches_come_again() -> None:
    async def scenario() -> None:
        async with world() as (router, a, _):
            await a.publish(stored(IDS[:160], 16))
            await a.publish(stored(IDS[:320], 16, first=10), is_lost=True)
            await a.publish(stored(IDS[:480], 16, first=20), is_lost=True)
            assert known(router).get("a", 0) <= 160
            await a.publish(stored(IDS, 16, first=30))
            await holds(router, a=992, b=0)
            assert a.num_asked == 2, "at the start, and for the gap"

    run(scenario)


def test_a_router_that_comes_late_learns_what_was_said_before() -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory(prefix="mp-") as folder:
            async with Publisher(Path(folder)) as a:
                await a.publish(stored(IDS[:480], 16))
                await a.publish(stored(IDS, 16, first=30))
                replica = ScriptedReplica("a", asides={"/v1/models": MODELS})
                async with front(replica) as router:
                    assert (await ask(router))["prefix-identity"] == "text"
                    # As `millpond router add` does: drained, and back at its address and more.
                    router.router.replicas.drain("a")
                    router.router.add("a", replica.url + a.address)
                    await holds(router, a=992)
                    await router.ready(1)
                    assert (await ask(router))["prefix-identity"] == "events"

    run(scenario)


@pytest.mark.parametrize("loses", ["no address", "no answer", "forgotten"])
def test_what_is_missing_for_good_leaves_what_the_router_remembers(
    loses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "_AGAIN_S", 0.1)

    async def scenario() -> None:
        def address(publisher: Publisher) -> str:
            return publisher.without_replay if loses == "no address" else publisher.address

        async with world(address=address) as (router, a, b):
            await a.publish(stored(IDS, 16))
            await b.publish(stored(OTHER, 16))
            await holds(router, a=992, b=0)
            a.is_deaf = loses == "no answer"
            await a.publish(stored(OTHER, 16), is_lost=True)
            if loses == "forgotten":
                a.buffer.clear()
            await a.publish(removed(hashes(IDS, 16)))
            await until(lambda: "a" not in known(router), "a's cache is unknown")
            first = await ask(router)
            assert first["prefix-identity"] == "tokens"
            assert first["prefix-holder"] == "none", "nothing was sent there so far"
            second = await ask(router)
            assert second["prefix-holder"] == first["replica"]
            await a.publish(CLEARED, stored(IDS[:160], 16))
            await holds(router, a=160, b=0)
            assert (await ask(router))["prefix-identity"] == "events"

    run(scenario)


def test_a_publisher_that_restarts_begins_with_nothing() -> None:
    async def scenario() -> None:
        async with world() as (router, a, _):
            await a.publish(stored(IDS, 16))
            await a.publish(stored(OTHER, 16))
            await holds(router, a=992, b=0)
            await a.restart()
            await holds(router, a=0, b=0)
            await a.publish(stored(IDS[:160], 16))
            await holds(router, a=160, b=0)
            await a.restart()
            await a.publish(stored(IDS[:320], 16), is_lost=True)
            await a.publish(stored(IDS[:480], 16, first=20))
            await holds(router, a=480, b=0)

    run(scenario)


def test_a_replica_that_dies_holds_nothing() -> None:
    async def scenario() -> None:
        async with world() as (router, a, b):
            for each in (a, b):
                await each.publish(stored(IDS, 16))
            await holds(router, a=992, b=992)
            router.router._holdings.forget("a")  # what health does with a replica that is down
            assert known(router) == {"b": 992}
            await a.restart()
            await a.publish(stored(OTHER, 16))
            await holds(router, a=0, b=992)

    run(scenario)


NONSENSE = {
    "garbage": (b"topic", (1).to_bytes(8, "big"), b"\xc1garbage"),
    "other event": (b"", (1).to_bytes(8, "big"), msgspec.msgpack.encode([1, [{"type": "X"}], 0])),
    "contradiction": (b"", (1).to_bytes(8, "big"), payload(stored(IDS, 16, token_ids=[1]))),
    "one frame": (b"hello",),
    "short number": (b"topic", b"1", payload(CLEARED)),
    "many frames": (b"",) * 50,
    "large": (b"topic", (1).to_bytes(8, "big"), bytes(2**20)),
}


@pytest.mark.parametrize("frames", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_makes_one_cache_unknown_and_nothing_else(frames: tuple[bytes, ...]) -> None:
    async def scenario() -> None:
        async with world() as (router, a, b):
            for each in (a, b):
                await each.publish(stored(IDS, 16))
            await holds(router, a=992, b=992)
            await a.send(*frames)
            await until(lambda: known(router) == {"b": 992}, "a's cache is unknown")
            assert (await ask(router))["prefix-identity"] == "tokens"
            await a.restart()
            await a.publish(stored(IDS[:160], 16))
            await holds(router, a=160, b=992)

    run(scenario)


def test_nobody_at_the_address_costs_nothing() -> None:
    async def scenario() -> None:
        with tempfile.TemporaryDirectory(prefix="mp-") as folder:
            events = f",events=ipc://{folder}/nobody,replay=tcp://127.0.0.1:9"
            replica = ScriptedReplica("a", asides={"/v1/models": MODELS}, events=events)
            async with front(replica) as router:
                assert (await ask(router))["prefix-identity"] == "tokens"

    run(scenario)


def test_a_flood_of_events_does_not_hold_up_requests() -> None:
    async def scenario() -> None:
        async with world() as (router, a, _):
            for start in range(0, 2_000_000, 2_000):
                await a.publish(stored(list(range(start, start + 1_000)), 16))
            assert (await ask(router))["replica"] in {"a", "b"}
            await a.publish(stored(IDS[:160], 16))
            await holds(router, a=160, b=0)

    run(scenario)
