"""Prompts named by what a replica's /tokenize says, and by their text where it says nothing."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from millpond.router import tokenizing
from millpond.router.options import Identity
from tests.faults.router_world import (
    Call,
    Front,
    Script,
    ScriptedReplica,
    answer,
    front,
    run,
    until,
)

MODELS = answer(msgspec.json.encode({"data": [{"id": "m"}, {"id": "x", "parent": "m"}]}))
LONG = "word " * 1000


async def tokenize(call: Call) -> None:
    """Make a token of each word, as a tokenizer would that does not care for case."""
    asked: dict[str, Any] = json.loads(call.body)
    text = (
        asked["prompt"] if "prompt" in asked else " ".join(x["content"] for x in asked["messages"])
    )
    tokens = [sum(word.encode()) for word in text.lower().split()]
    await answer(json.dumps({"tokens": tokens, "count": len(tokens)}).encode())(call)


def replica(name: str = "a", **asides: Script) -> ScriptedReplica:
    named = {f"/{key.replace('__', '/')}": script for key, script in asides.items()}
    return ScriptedReplica(name, asides={"/v1/models": MODELS, "/tokenize": tokenize, **named})


async def ask(router: Front, body: object, path: str = "/v1/completions") -> dict[str, str]:
    key = {"authorization": "Bearer of the client"}
    async with router.post(body, path=path, headers=key) as reply:
        await reply.read()
        assert reply.status == 200
        return {
            name.removeprefix("x-millpond-"): value
            for name, value in reply.headers.items()
            if name.startswith("x-millpond-")
        }


def test_texts_of_the_same_tokens_are_the_same() -> None:
    async def scenario() -> None:
        async with front(replica("a"), replica("b"), identity=Identity.TOKENS) as router:
            first = await ask(router, {"model": "m", "prompt": LONG + "one"})
            assert (first["prefix-identity"], first["prefix-holder"]) == ("tokens", "none")
            same = [
                {"model": "m", "prompt": LONG.upper() + "two"},
                {"prompt": LONG + "two"},
                {"model": "m", "prompt": [sum(b"word")] * 1001},
            ]
            for body in same:
                assert (await ask(router, body))["prefix-holder"] != "none", list(body)
            chat = {"model": "m", "messages": [{"role": "user", "content": LONG + "three"}]}
            found = await ask(router, chat, "/v1/chat/completions")
            assert found["prefix-holder"] != "none"
            others = [{"model": "x", "prompt": LONG}, {"prompt": LONG, "cache_salt": "s"}]
            for body in others:
                assert (await ask(router, body))["prefix-holder"] == "none", list(body)
            lines = await router.logged(7)
            assert {line["prompt_tokens_guessed"] for line in lines} == {1000, 1001}
            assert {line["prefix_identity"] for line in lines} == {"tokens"}

    run(scenario)


def test_the_key_of_the_client_goes_along() -> None:
    keys: list[list[str]] = []

    async def noting(call: Call) -> None:
        keys.append(call.header("authorization"))
        await (MODELS if call.method == "GET" else tokenize)(call)

    async def scenario() -> None:
        one = replica("a", tokenize=noting, v1__models=noting)
        async with front(one, identity=Identity.TOKENS) as router:
            for _ in range(3):
                await ask(router, {"model": "m", "prompt": "word"})
            assert keys == [["Bearer of the client"]] * 4, "models once, and tokens each time"

    run(scenario)


async def hang(call: Call) -> None:
    await call.closed_by_router()


async def die(call: Call) -> None:
    call.kill()


FAILURES = {
    "missing": answer(b"", status="404 X"),
    "broken": answer(b"oops", status="500 X"),
    "silent": hang,
    "dead": die,
}


@pytest.mark.parametrize("what", ["tokenize", "v1__models"])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
def test_a_tokenizer_that_fails_costs_a_request_nothing_and_is_left_alone_for_a_while(
    what: str,
    failure: Script,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizing, "ASK_S", 0.3)
    asked: list[str] = []

    async def failing(call: Call) -> None:
        asked.append(call.target)
        await failure(call)

    async def scenario() -> None:
        async with front(replica("a", **{what: failing}), identity=Identity.TOKENS) as router:
            for _ in range(3):
                found = await ask(router, {"model": "m", "prompt": LONG})
                assert found["prefix-identity"] == "text"
            assert len(asked) <= (2 if what == "v1__models" else 1), "a GET is sent twice at most"

    run(scenario)


@pytest.mark.parametrize(
    "said",
    [
        answer(b"no", status="400 X"),
        answer(b"{"),
        answer(b'{"tokens": "x"}'),
        answer(b'{"tokens": [-1]}'),
        answer(b"[" * 100_000),
    ],
)
def test_an_answer_without_sense_is_of_one_request(said: Script) -> None:
    async def scenario() -> None:
        one = replica("a", tokenize=said)
        async with front(one, identity=Identity.TOKENS) as router:
            assert (await ask(router, {"prompt": LONG}))["prefix-identity"] == "text"
            one.asides["/tokenize"] = tokenize
            assert (await ask(router, {"prompt": LONG}))["prefix-identity"] == "tokens"

    run(scenario)


def test_one_replica_names_prompts_for_all() -> None:
    async def scenario() -> None:
        broken = replica("a", tokenize=FAILURES["broken"])
        async with front(broken, replica("b"), identity=Identity.TOKENS) as router:
            found = [await ask(router, {"prompt": LONG}) for _ in range(5)]
            assert [each["prefix-identity"] for each in found] == ["text"] + ["tokens"] * 4

    run(scenario)


def test_more_questions_than_a_tokenizer_can_take_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizing, "_ASKING_MAX", 2)
    go_on = asyncio.Event()
    asked: list[Call] = []

    async def held(call: Call) -> None:
        asked.append(call)
        await go_on.wait()
        await tokenize(call)

    async def scenario() -> None:
        async with front(replica("a", tokenize=held), identity=Identity.TOKENS) as router:
            waiting = [asyncio.create_task(ask(router, {"prompt": LONG})) for _ in range(2)]
            await until(lambda: len(asked) == 2, "two questions")
            assert (await ask(router, {"prompt": LONG}))["prefix-identity"] == "text"
            go_on.set()
            found = await asyncio.gather(*waiting)
            assert [each["prefix-identity"] for each in found] == ["tokens"] * 2

    run(scenario)


def test_by_text_nobody_is_asked() -> None:
    async def scenario() -> None:
        for identity in (Identity.TEXT, Identity.AUTO):
            one = replica("a", tokenize=die, v1__models=die)
            async with front(one, identity=identity) as router:
                assert (await ask(router, {"prompt": LONG}))["prefix-identity"] == "text"

    run(scenario)
