"""Names of tokens, what is asked of a tokenizer, and what is known of a prompt."""

import asyncio
import json

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.router.holdings import Holdings
from millpond.router.options import Identity
from millpond.router.prefixes import PrefixesUnderway
from millpond.router.prompts import Prompt
from millpond.router.records import Record
from millpond.router.replicas import Replicas, State
from millpond.router.tokenizing import TokenCall, read_call
from millpond.router.tokens import TOKEN_BLOCK, TokenNames, block_names, pack

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ids = st.lists(st.integers(0, 2**32 - 1), max_size=200)


# ---------------------------------------------------------------- names


@given(ids, ids, st.integers(1, 40))
def test_prompts_share_the_names_of_the_blocks_that_they_begin_with(
    one: list[int], other: list[int], block: int
) -> None:
    other = one[: len(one) // 2] + other
    a, b = TokenNames(one).names(block), TokenNames(other).names(block)
    assert len(a) == max(0, len(one) - 1) // block
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        assert (x == y) == (one[: (i + 1) * block] == other[: (i + 1) * block])


def test_a_block_is_named_alike_whether_its_parent_was_named_before_or_with_it() -> None:
    whole = block_names(pack(range(64)), 16, [b""] * 4)
    first = block_names(pack(range(32)), 16, [b""] * 2)
    rest = block_names(pack(range(32, 64)), 16, [b""] * 2, parent=first[-1])
    assert first + rest == whole
    assert TokenNames(range(65)).names(16) == whole


def test_models_of_other_adapters_and_salts_share_nothing() -> None:
    some: dict[str, dict[str, str]] = {
        "plain": {},
        "adapter": {"adapter": "x"},
        "salt": {"salt": "s"},
        "both": {"adapter": "x", "salt": "s"},
    }
    names = [name for each in some.values() for name in TokenNames(range(1000), **each).names(256)]
    assert len(set(names)) == 3 * len(some)


# ---------------------------------------------------------------- what is asked


def call(path: str, **body: object) -> TokenCall | None:
    return read_call(path, json.dumps(body).encode())


def question(path: str, **body: object) -> dict[str, object]:
    found = call(path, **body)
    assert found is not None
    return json.loads(found.question)


def test_ids_need_no_tokenizer() -> None:
    assert call(COMPLETIONS, model="m", prompt=[1, 2], cache_salt="s") == TokenCall(
        "m", "s", ids=[1, 2]
    )


def test_a_question_has_what_makes_the_prompt_and_nothing_else() -> None:
    assert question(
        COMPLETIONS, model="m", prompt="x", add_special_tokens=False, max_tokens=3, stream=True
    ) == {"model": "m", "prompt": "x", "add_special_tokens": False}
    chat = {
        "model": "m",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "user", "content": "hello"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": False,
        "continue_final_message": True,
    }
    assert question(CHAT, **chat, temperature=1, reasoning_effort=None, tool_choice="auto") == chat


MESSAGES = [{"role": "user", "content": "x"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["one", "two"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
        (COMPLETIONS, {"prompt": [-1]}),
        (COMPLETIONS, {"prompt": 3}),
        (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 5}),
        (COMPLETIONS, {"prompt": "x", "prompt_embeds": "e"}),
        (COMPLETIONS, {"prompt": "x", "model": 3}),
        (COMPLETIONS, {"prompt": None}),
        (COMPLETIONS, {"messages": MESSAGES}),
        (CHAT, {"prompt": "x"}),
        (CHAT, {"messages": IMAGE}),
        (CHAT, {"messages": "x"}),
        (CHAT, {"messages": [3]}),
        (CHAT, {"messages": MESSAGES, "reasoning_effort": "low"}),
        (CHAT, {"messages": MESSAGES, "documents": []}),
        (CHAT, {"messages": MESSAGES, "tool_choice": "none"}),
        ("/v1/responses", {"input": "x"}),
        (COMPLETIONS, {"prompt": "x" * (4 * 2**20)}),
    ],
)
def test_what_a_tokenizer_cannot_be_asked_has_no_tokens(path: str, body: dict[str, object]) -> None:
    assert call(path, **body) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"prompt": "\xff"}'])
def test_bodies_that_nobody_understands_have_no_tokens(body: bytes) -> None:
    assert read_call(COMPLETIONS, body) is None
    assert read_call(CHAT, body) is None


# ---------------------------------------------------------------- who holds what


def record(replica: str) -> Record:
    return Record("r", "POST", COMPLETIONS, "cost", is_own_id=True, replica=replica)


def test_what_is_being_computed_counts_until_the_first_byte() -> None:
    underway = PrefixesUnderway()
    first, second, moved, gone = (record("a") for _ in range(4))
    underway.note(first, "xyz")
    underway.note(second, "xy")
    underway.note(moved, "xyzw")
    underway.note(gone, "xyzw")
    assert underway.num_held("a", "xyzw") == 4
    assert underway.num_held("b", "xyzw") == 0
    moved.replica, gone.ended_ns = "b", 5
    assert underway.num_held("a", "xyzw") == 3
    assert underway.num_held("a", "xq") == 1
    first.first_byte_ns = 5
    assert underway.num_held("a", "xyzw") == 2
    underway.forget("a")
    assert underway.num_held("a", "xyzw") == 0


def test_what_was_computed_is_not_kept() -> None:
    underway = PrefixesUnderway()
    for _ in range(100):
        ended = record("a")
        underway.note(ended, "xyz")
        ended.first_byte_ns = 5
    assert len(underway._underway["a"]) == 1


def holdings(*events: str, identity: Identity = Identity.AUTO) -> tuple[Holdings, Replicas]:
    """Return what is known of replicas a, b and so on, of which some publish at ``events``."""
    replicas = Replicas()
    for name, address in zip("abc", events, strict=False):
        replicas.add(name, f"http://{name}:1{address}").state = State.READY
    return Holdings(replicas, identity, local_tokens=10_000, pool_tokens=10_000), replicas


def named(num_tokens: int) -> Prompt:
    return Prompt().named(TokenNames(range(num_tokens)))


def test_lengths_are_those_of_blocks_and_holders_those_with_the_most() -> None:
    found, _ = holdings("", "")
    for name, num_tokens in (("a", 1000), ("b", 700)):
        found.note(named(num_tokens), record(name))
    located = found.locate(named(900))
    assert located.identity == "tokens"
    assert located.local_tokens == {"a": 3 * TOKEN_BLOCK, "b": 2 * TOKEN_BLOCK}
    assert located.pooled_tokens == 3 * TOKEN_BLOCK
    assert located.holder("b") == "a"
    assert found.locate(named(600)).holder("b") == "b", "among equals the one that serves"
    assert found.locate(named(100)).holder("b") is None
    found.forget("a")
    found.forget_pool()
    located = found.locate(named(900))
    assert (located.local_tokens, located.pooled_tokens) == ({"b": 512}, 0)


def test_a_burst_of_one_prompt_is_underway_where_it_was_sent_to() -> None:
    async def scenario() -> None:
        found, replicas = holdings(",events=ipc:///nowhere", "")
        async with aiohttp.ClientSession() as session:
            found.start(session)
            try:
                found._events._feeds["a"].end_again()  # known to hold nothing
                prompt, first = named(1000), record("a")
                found.note(prompt, first)
                assert found.locate(prompt).local_tokens == {"a": 768}
                assert found.locate(prompt).identity == "tokens", "b does not say what it holds"
                replicas["b"].state = State.DOWN
                assert found.locate(prompt).identity == "events"
                first.first_byte_ns = 5
                assert found.locate(prompt).local_tokens == {"a": 0}, "it did not keep it"
            finally:
                await found.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("identity", "events", "by_tokens"),
    [
        (Identity.AUTO, "", False),
        (Identity.AUTO, ",events=ipc:///nowhere", True),
        (Identity.TEXT, ",events=ipc:///nowhere", False),
        (Identity.TOKENS, "", True),
    ],
)
def test_tokens_are_asked_for_where_a_cache_tells_or_the_user_says_so(
    identity: Identity, events: str, by_tokens: bool
) -> None:
    async def scenario() -> None:
        found, _ = holdings("", events, identity=identity)
        body = json.dumps({"prompt": list(range(1000))}).encode()
        assert (await found.read(COMPLETIONS, body, None, None)).names is None, "not started"
        async with aiohttp.ClientSession() as session:
            found.start(session)
            try:
                prompt = await found.read(COMPLETIONS, body, None, None)
                assert (prompt.names is not None) == by_tokens
                assert prompt.num_tokens == 1000
                assert (await found.read("/tokenize", body, None, None)).names is None
            finally:
                await found.stop()

    asyncio.run(scenario())
