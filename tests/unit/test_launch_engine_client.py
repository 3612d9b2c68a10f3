"""What an engine streams becomes tokens, log-probabilities and times; nothing is guessed."""

import json
from collections.abc import Callable

import httpx
import pytest

from millpond.launch.engine_client import Completion, EngineClient


def event(*tokens: tuple[int, float]) -> str:
    logprobs = {
        "tokens": [f"token_id:{token}" for token, _ in tokens],
        "token_logprobs": [value for _, value in tokens],
    }
    return "data: " + json.dumps({"choices": [{"text": "x", "logprobs": logprobs}]}) + "\n\n"


def client(monkeypatch: pytest.MonkeyPatch, handler: Callable[..., httpx.Response]) -> EngineClient:
    real = httpx.Client

    def with_transport(**options: object) -> httpx.Client:
        return real(**options, transport=httpx.MockTransport(handler))  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(httpx, "Client", with_transport)
    return EngineClient("http://engine", "m", timeout_s=1)


def test_a_stream_becomes_one_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        empty = 'data: {"choices": [{"text": "", "logprobs": null}]}\n\n'
        done = 'data: {"choices": []}\n\ndata: [DONE]\n\n'
        return httpx.Response(200, text=empty + event((7, -0.5)) + event((9, -1.0)) + done)

    with client(monkeypatch, handler) as engine:
        answer = engine.complete(
            [1, 2], num_tokens=2, request_id="r", fields={"cache_salt": "mine"}
        )
    assert isinstance(answer, Completion)
    assert answer.token_ids == (7, 9)
    assert answer.logprobs == (-0.5, -1.0)
    assert 0 < answer.ttft_s <= answer.e2el_s
    body = json.loads(asked[0].content)
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([1, 2], 2, 0)
    assert body["cache_salt"] == "mine"
    assert asked[0].headers["X-Request-Id"] == "r"


def test_an_answer_without_tokens_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        client(
            monkeypatch, lambda _request: httpx.Response(200, text="data: [DONE]\n\n")
        ) as engine,
        pytest.raises(ValueError, match=r"request r.*without tokens"),
    ):
        engine.complete([1], num_tokens=1, request_id="r")


def test_an_error_in_the_stream_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'data: {"error": {"message": "lost"}}\n\n'
    engine = client(monkeypatch, lambda _request: httpx.Response(200, text=text))
    with engine, pytest.raises(ValueError, match="lost"):
        engine.complete([1], num_tokens=1, request_id="r")


def test_a_refusal_is_an_http_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with client(monkeypatch, lambda _request: httpx.Response(400, text="no")) as engine:
        with pytest.raises(httpx.HTTPStatusError):
            engine.complete([1], num_tokens=1, request_id="r")
        with pytest.raises(httpx.HTTPStatusError):
            engine.reset_prefix_cache()


def test_prompt_tokens_are_summed_over_engine_cores_by_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "vllm:prompt_tokens_by_source"
    lines = [f"# TYPE {name} counter"]
    for core, source, value in (
        ("0", "local_compute", "1024.0"),
        ("1", "local_compute", "6.0"),
        ("0", "external_kv_transfer", "3.84e3"),
    ):
        lines.append(f'{name}_total{{engine="{core}",source="{source}"}} {value}')
    lines += [f'{name}_created{{engine="0",source="local_compute"}} 1.7e9', "other_total 5.0", ""]
    page = "\n".join(lines)
    with client(monkeypatch, lambda _request: httpx.Response(200, text=page)) as engine:
        counted = engine.prompt_tokens_by_source()
    assert counted == {"local_compute": 1030, "external_kv_transfer": 3840}


@pytest.mark.parametrize("answer", [(-0.5, -1.0), (-0.75, -1.0), (-0.5, -1.25)])
def test_answers_differ_by_their_most_different_token(answer: tuple[float, float]) -> None:
    one, other = (
        Completion("r", (1, 2), logprobs, 0.1, 0.2) for logprobs in ((-0.5, -1.0), answer)
    )
    assert one.logprob_difference(other) == (0.0 if answer == (-0.5, -1.0) else 0.25)
    with pytest.raises(ValueError, match="zip"):
        one.logprob_difference(Completion("r", (1,), (-0.5,), 0.1, 0.2))
