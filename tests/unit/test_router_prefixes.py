"""Prefixes by their text, who holds them, and what is read from a request's body."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.router.prefixes import TEXT_BLOCK_BYTES, HeldPrefixes, TextIdentity
from millpond.router.prompts import Affinity, Prompt, named_by_headers, read_prompt

CHAT = "/v1/chat/completions"


def read(body: object, path: str = CHAT) -> Prompt:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return read_prompt(path, data, None, TextIdentity())


def shared(one: Prompt, other: Prompt) -> int:
    """Return how many blocks two prompts have in common from their beginning."""
    pairs = zip(one.keys, other.keys, strict=False)
    return next(
        (i for i, (x, y) in enumerate(pairs) if x != y), min(len(one.keys), len(other.keys))
    )


def chat(*turns: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"model": "m", "messages": messages, **fields}


# ---------------------------------------------------------------- text


@given(st.binary(max_size=4000), st.binary(max_size=4000))
def test_texts_share_the_whole_blocks_of_their_common_beginning(one: bytes, other: bytes) -> None:
    common = one[: len(one) // 2]
    a, b = (TextIdentity().keys(b"", common + rest) for rest in (one, other))
    num_shared = sum(x == y for x, y in zip(a, b, strict=False))
    assert num_shared >= len(common) // TEXT_BLOCK_BYTES
    assert len(a) == (len(common) + len(one)) // TEXT_BLOCK_BYTES


def test_a_block_stands_for_all_before_it() -> None:
    one, other = b"x" * 2048, b"y" + b"x" * 2047
    assert not set(TextIdentity().keys(b"", one)) & set(TextIdentity().keys(b"", other))
    assert not set(TextIdentity().keys(b"", one)) & set(TextIdentity().keys(b"salt", one))


def test_bytes_of_a_token_are_learnt_within_reason() -> None:
    identity = TextIdentity()
    for _ in range(200):
        identity.learn(8000, 1000)
    assert identity.bytes_per_token == pytest.approx(8, rel=0.01)
    assert identity.tokens_of(800) == 100
    for odd in ((8000, 0), (10, 1000), (10**9, 1)):
        for _ in range(200):
            identity.learn(*odd)
    assert identity.bytes_per_token <= 64


# ---------------------------------------------------------------- bodies


def test_a_conversation_that_goes_on_begins_as_it_did() -> None:
    first = read(chat("hello " * 500))
    second = read(chat("hello " * 500, "yes", "go on " * 500))
    assert len(first.keys) > 4
    assert shared(first, second) == len(first.keys)
    assert first.opening == second.opening


def test_what_else_decides_a_prefix_tells_them_apart() -> None:
    first = read(chat("hello " * 500))
    for fields in ({"model": "n"}, {"cache_salt": "s"}, {"tools": [{"type": "function"}]}):
        assert shared(first, read({**chat("hello " * 500), **fields})) == 0, fields


def test_a_system_prompt_alone_makes_no_conversation() -> None:
    system = {"role": "system", "content": "be brief " * 300}
    bodies = [
        {"model": "m", "messages": [system, {"role": "user", "content": text}]} for text in "ab"
    ]
    one, other = map(read, bodies)
    assert one.opening != other.opening
    assert shared(one, other) >= 5


def test_token_ids_are_counted_and_texts_guessed() -> None:
    ids = read({"model": "m", "prompt": list(range(1000))}, "/v1/completions")
    assert (ids.num_tokens, ids.text_bytes) == (1000, 0)
    text = read({"model": "m", "prompt": "x" * 3998}, "/v1/completions")
    assert (text.num_tokens, text.text_bytes) == (1000, 4000)
    for prompt in (ids, text):
        assert prompt.tokens_of(len(prompt.keys)) <= prompt.num_tokens
        assert prompt.tokens_of(len(prompt.keys)) > 0.8 * prompt.num_tokens
        assert prompt.tokens_of(10_000) == prompt.num_tokens


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff", b"[" * 100_000),
        *(b'{"messages": 3}', b'{"messages": ["x"]}', b'{"messages": [{"role": [1]}]}'),
        *(b'{"prompt": null}', b'{"prompt": []}', b'{"user": 5}', b'{"model": {}, "input": {}}'),
    ],
)
def test_odd_bodies_are_read_without_a_complaint(body: bytes) -> None:
    prompt = read(body)
    assert prompt.conversation is None
    assert prompt.num_tokens < 20


def test_only_what_generates_has_a_prompt() -> None:
    body = chat("hello " * 500, user="me")
    assert read(body).conversation == "me"
    assert read(body, "/tokenize") == Prompt()


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({b"x-session-id": b"one", b"cookie": b"session_id=two"}, "one"),
        ({b"cookie": b"a=b; session_id=two; c=d"}, "two"),
        ({b"cookie": b"session_id="}, None),
        ({b"cookie": b"\xff;;;==\x00"}, None),
        ({b"x-session-id": b"x" * 5000}, "x" * 512),
        ({}, None),
    ],
)
def test_a_header_or_a_cookie_names_the_conversation(
    headers: dict[bytes, bytes], named: str | None
) -> None:
    assert named_by_headers(headers, Affinity()) == named


def test_a_header_stands_above_the_user() -> None:
    body = json.dumps(chat("x", user="me")).encode()
    assert read_prompt(CHAT, body, "header", TextIdentity()).conversation == "header"


# ---------------------------------------------------------------- who holds what


def held(local: int = 100, pool: int = 1000) -> HeldPrefixes:
    return HeldPrefixes(local_blocks_max=local, pool_blocks_max=pool)


def test_each_replica_holds_what_it_was_given_and_the_pool_all_of_it() -> None:
    prefixes = held()
    prefixes.note("a", "xyz")
    prefixes.note("b", "xy")
    found = prefixes.held("xyzw")
    assert found.by_replica == {"a": 3, "b": 2}
    assert found.num_pooled == 3


def test_what_is_forgotten_is_gone_from_one_place_only() -> None:
    prefixes = held()
    prefixes.note("a", "xyz")
    prefixes.forget("a")
    prefixes.forget("nobody")
    assert prefixes.held("xyz").by_replica == {}
    assert prefixes.held("xyz").num_pooled == 3
    prefixes.forget_pool()
    assert prefixes.held("xyz").num_pooled == 0


chains = st.lists(st.text("xyz", min_size=1, max_size=12), max_size=40)


@given(chains, st.integers(1, 15))
def test_memory_is_bounded_and_what_is_left_of_a_prefix_is_no_hole(
    prompts: list[str], num_max: int
) -> None:
    prefixes = held(local=num_max, pool=num_max)
    for prompt in prompts:
        keys = [prompt[: i + 1] for i in range(len(prompt))]
        prefixes.note("a", keys)
        assert prefixes.held(keys).by_replica["a"] == min(len(keys), num_max)
        statistics = prefixes.statistics()
        assert max(statistics.values()) <= num_max
        kept = prefixes._local["a"]
        for key in kept:
            assert isinstance(key, str)
            assert all(key[: i + 1] in kept for i in range(len(key)))


def test_the_least_recently_used_prefix_goes_first() -> None:
    prefixes = held(local=4)
    prefixes.note("a", ["x", "xx"])
    prefixes.note("a", ["y", "yy"])
    prefixes.note("a", ["x", "xx"])
    prefixes.note("a", ["z", "zz"])
    assert prefixes.held(["x", "xx"]).by_replica == {"a": 2}
    assert prefixes.held(["y", "yy"]).by_replica == {"a": 0}


@pytest.mark.parametrize(
    "odd", [b"1e999", b'"\xff"', b"[" * 5000 + b"]" * 5000], ids=["number", "bytes", "depth"]
)
@pytest.mark.parametrize("field", [b"user", b"messages", b"prompt", b"model"])
def test_values_that_nobody_understands_are_for_the_replica(field: bytes, odd: bytes) -> None:
    values = (odd, b"[" + odd + b"]", b'[{"role": ' + odd + b"}]")
    for value in values:
        assert read(b'{"' + field + b'": ' + value + b"}").conversation is None
