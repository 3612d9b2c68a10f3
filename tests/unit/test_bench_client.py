"""What counts as a token: events as servers send them, with times that the test decides."""

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from millpond.bench.client import Answer, request_body, take_event

MS = 1_000_000


def completion(text: str, counted: int | None = None, reason: str | None = None) -> object:
    event: dict[str, object] = {"choices": [{"index": 0, "text": text, "finish_reason": reason}]}
    return event if counted is None else event | {"usage": {"completion_tokens": counted}}


def chat(delta: Mapping[str, object], counted: int | None = None) -> object:
    event: dict[str, object] = {"choices": [{"index": 0, "delta": delta}]}
    return event if counted is None else event | {"usage": {"completion_tokens": counted}}


def usage(counted: int, cached: int | None = None) -> object:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"completion_tokens": counted, **details}}


def answer_to(events: Sequence[tuple[int, object]]) -> Answer:
    answer = Answer(started_ns=0)
    for at_ms, event in events:
        take_event(answer, msgspec.convert(event, dict[str, object]), at_ms * MS)
    return answer


def test_the_first_token_is_the_first_event_with_content() -> None:
    answer = answer_to([(5, completion("a")), (9, completion("b")), (20, completion("c"))])
    assert answer.ttft_ms == 5
    assert answer.itl_ms == [4, 11]
    assert answer.num_tokens == 3


@pytest.mark.parametrize(
    "early",
    [
        chat({"role": "assistant", "content": ""}),
        chat({"role": "assistant", "content": ""}, counted=0),
        chat({"role": "assistant"}),
        completion(""),
        completion("", counted=0),
        usage(0),
    ],
)
def test_an_event_without_content_is_no_first_token(early: object) -> None:
    answer = answer_to([(1, early), (50, chat({"content": "x"}))])
    assert answer.ttft_ms == 50
    assert answer.itl_ms == []


@pytest.mark.parametrize("name", ["content", "reasoning_content", "reasoning"])
def test_thinking_is_content_too(name: str) -> None:
    assert answer_to([(7, chat({name: "hm"}))]).ttft_ms == 7


def test_a_token_without_text_counts_where_the_server_counts() -> None:
    events = [
        (5, completion("", counted=1)),
        (6, completion("é", counted=2)),
        (9, completion("", counted=2, reason="length")),
        (9, usage(2, cached=768)),
    ]
    answer = answer_to(events)
    assert answer.ttft_ms == 5
    assert answer.itl_ms == [1], "the reason to stop is no token"
    assert answer.num_tokens == 2
    assert answer.cached_tokens == 768


def test_several_tokens_in_one_event_are_counted_by_the_server() -> None:
    answer = answer_to([(5, completion("abc", counted=3)), (9, completion("de", counted=5))])
    assert answer.num_tokens == 5
    assert answer.itl_ms == [4]


def test_text_that_was_held_back_is_no_new_token() -> None:
    answer = answer_to([(5, completion("a", counted=1)), (9, completion("b", counted=1))])
    assert answer.itl_ms == []
    assert answer.num_tokens == 1


def test_usage_at_the_end_is_no_token() -> None:
    answer = answer_to([(5, completion("a")), (30, usage(1))])
    assert (answer.itl_ms, answer.num_tokens) == ([], 1)


def test_an_error_in_the_stream_is_kept() -> None:
    answer = answer_to([(5, completion("a")), (6, {"error": {"message": "gone"}})])
    assert "gone" in str(answer.error)


def test_a_body_asks_for_exactly_so_many_tokens_and_for_their_count() -> None:
    body = msgspec.json.decode(request_body("m", [3, 4], 7))
    assert body["prompt"] == [3, 4]
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (7, True, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
