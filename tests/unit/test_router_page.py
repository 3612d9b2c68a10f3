"""The live page: what it remembers, what it shows, and what browsers are told with it."""

import base64
import hashlib
import json
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.router.errors import Ended
from millpond.router.page import serving
from millpond.router.page.serving import STATE_PATH, LivePage
from millpond.router.page.state import About, page_state
from millpond.router.page.window import Window
from millpond.router.records import Attribution, Record
from millpond.router.replicas import Replicas, State

ABOUT = About(policy="cost", identity="text", started_at=100.0, now=160.0, has_pool=True)


def record(number: int = 0, **changes: object) -> Record:
    """Return a request that ``b`` served and reported, a second after it came."""
    fields: dict[str, object] = {
        "request_id": f"r{number}",
        "method": "POST",
        "path": "/v1/completions",
        "policy": "cost",
        "is_own_id": True,
        "arrived_at": 1000.0 + number,
        "arrived_ns": 0,
        "first_byte_ns": 10**9,
        "replica": "b",
        "holder": "a",
        "status": 200,
        "is_stream": True,
        "attribution": tokens(a=50),
    }
    return Record(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def tokens(
    source: str = "pool", computed: int = 10, local: int = 20, num_reports: int = 1, **writers: int
) -> Attribution:
    loaded = sum(writers.values())
    num_prompt = computed + local + loaded
    return Attribution(source, "b", num_prompt, computed, local, loaded, writers, num_reports)


def state_of(*records: Record, replicas: Replicas | None = None) -> dict[str, Any]:
    window = Window()
    for each in records:
        window.note(each)
    return json.loads(json.dumps(page_state(ABOUT, replicas or Replicas(), window)))


def test_only_the_last_requests_are_remembered() -> None:
    window = Window(shown_max=3, samples_max=5)
    for number in range(10):
        window.note(record(number))
    assert [each.request_id for each in window.shown] == ["r7", "r8", "r9"]
    assert [each.arrived_at for each in window.samples] == [1005.0 + i for i in range(5)]
    window.note(record(10, request_id="x" * 60_000))
    assert len(window.shown[-1].request_id) == 100


def test_only_what_is_surely_attributed_counts() -> None:
    window = Window()
    for source in ("guessed", "pool-ambiguous", "pool"):
        window.note(record(attribution=tokens(source)))
    window.note(record(attribution=None, status=503, ended=Ended.NO_REPLICA))
    window.note(record(path="/tokenize", attribution=None))
    assert [each.tokens.source for each in window.samples] == ["pool"]
    assert window.num_unreported == 2
    assert len(window.shown) == 4, "all that were to generate"


def test_only_a_stream_of_one_prompt_has_a_time() -> None:
    window = Window()
    window.note(record())
    window.note(record(is_stream=False))
    window.note(record(attribution=tokens(num_reports=2)))
    assert [each.ttft_s for each in window.samples] == [1.0, None, None]


def test_the_state_has_who_read_what_whom_had_written() -> None:
    state = state_of(
        record(attribution=tokens(a=50, b=7)),
        record(attribution=tokens(a=50, c=1)),
        record(attribution=tokens("guessed", a=10**6)),
    )
    assert state["num_reported"] == 2
    assert state["reported_since"] == 1000.0
    assert state["prompt_tokens"] == {
        "b": {"computed": 20, "local": 40, "writers": {"a": 100, "b": 7, "c": 1}}
    }


def test_the_state_has_times_by_where_most_tokens_came_from() -> None:
    cold = [
        record(i, first_byte_ns=(i + 1) * 10**9, attribution=tokens(computed=100 + i))
        for i in range(10)
    ]
    state = state_of(*cold, record(attribution=tokens(a=50)))
    computed, other = state["ttft"]["groups"]
    assert computed == {
        "source": "computed",
        "num_requests": 10,
        "prompt_tokens_median": 124,
        "ttft_ms_median": 5500.0,
        "ttft_ms_p90": 9000.0,
    }
    assert (other["source"], other["num_requests"]) == ("pool-other", 1)
    assert other["ttft_ms_p90"] is None, "of one time there is none"
    assert state["ttft"]["dots"][0] == ["computed", 120, 1000.0]
    assert len(state["ttft"]["dots"]) == 11


def test_dots_are_the_last_ones_and_not_too_many() -> None:
    state = state_of(*(record(i, first_byte_ns=(i + 1) * 10**6) for i in range(400)))
    assert [state["ttft"]["dots"][i][2] for i in (0, -1)] == [101.0, 400.0]


def test_the_last_requests_come_first_and_say_how_they_are_known() -> None:
    state = state_of(
        record(0),
        record(1, attribution=tokens("guessed"), holder="b"),
        record(2, attribution=None, status=None, ended=Ended.CLIENT_GONE, replica=None),
    )
    gone, guessed, told = state["requests"]
    assert told == {
        "arrived_at": 1000.0,
        "request_id": "r0",
        "replica": "b",
        "prefix_holder": "a",
        "is_moved": True,
        "status": 200,
        "ended": "complete",
        "ttft_ms": 1000.0,
        "attribution": "pool",
        "tokens": {"computed": 10, "local": 20, "pool-own": 0, "pool-other": 50},
    }
    assert (guessed["attribution"], guessed["is_moved"]) == ("guessed", False)
    assert (gone["tokens"], gone["ended"], gone["replica"]) == (None, "client-gone", None)


def test_the_state_has_load_but_no_addresses() -> None:
    replicas = Replicas()
    replicas.add("a", "http://10.1.2.3:8001").state = State.READY
    replicas["a"].num_running = 3
    replicas["a"].queued_tokens = 4096
    state = state_of(replicas=replicas)
    (found,) = state["replicas"]
    assert (found["state"], found["num_running"], found["queued_tokens"]) == ("ready", 3, 4096)
    assert "10.1.2.3" not in json.dumps(state)


def page() -> LivePage:
    return LivePage(Replicas(), "cost", identity=lambda: "text", has_pool=lambda: False)


def test_the_page_may_run_what_is_in_it_and_nothing_else() -> None:
    answer = page().answer("/millpond")
    policy = dict(answer.headers)[b"content-security-policy"].decode()
    text = answer.body.decode()
    for directive, tag in (("style-src", "style"), ("script-src", "script")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert len(inside) > 1000, "the file is in it"
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_the_page_asks_nobody_else_for_anything() -> None:
    text = page().answer("/millpond").body.decode()
    outside = set(re.findall(r"https?://[^\s'\"]+", text))
    assert outside == {"http://www.w3.org/2000/svg"}, "a name, not an address"
    assert "innerHTML" not in text
    assert not re.search(r"\son\w+=", text), "no handlers in markup"


def test_however_many_look_the_state_is_put_together_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [50.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], time=time.time)
    monkeypatch.setattr(serving, "time", clock)
    live = page()

    def num_shown() -> int:
        return len(json.loads(live.answer(STATE_PATH).body)["requests"])

    assert num_shown() == 0
    live.window.note(record())
    now_s[0] += 0.9
    assert num_shown() == 0
    now_s[0] += 0.2
    assert num_shown() == 1
