"""The official client against the router, in front of two real replicas and their pool."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.engines import BLOCK, NUM_TOKENS, Replicas, full_blocks, prompt
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)

WAIT_S = 60.0
TIMEOUT_S = 120.0


class Front:
    """A running router, and how to reach it."""

    def __init__(self, url: str, model: str, log_file: Path) -> None:
        self.url = url
        self.model = model
        self.log_file = log_file
        # An environment with a proxy must not lead elsewhere.
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=TIMEOUT_S)
        self.openai = openai.OpenAI(
            base_url=f"{url}/v1",
            api_key="of the client",
            max_retries=0,
            http_client=httpx.Client(trust_env=False, timeout=TIMEOUT_S),
        )

    def close(self) -> None:
        self.http.close()
        self.openai.close()

    def complete(self, ids: list[int], **fields: object) -> tuple[Any, httpx.Headers]:
        """Return a completion of token ids, and the headers of the answer."""
        raw = self.openai.completions.with_raw_response.create(
            model=self.model,
            prompt=ids,
            max_tokens=NUM_TOKENS,
            temperature=0,
            **fields,  # pyright: ignore[reportArgumentType]
        )
        return raw.parse(), raw.headers

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_file.read_text().splitlines()]

    def logged(self, request_id: str) -> dict[str, Any]:
        """Wait for the line of the access log about a request."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines() if line["request_id"] == request_id]

        eventually(lambda: bool(found()), f"a line about {request_id}", timeout_s=WAIT_S)
        return found()[0]


@contextmanager
def router(
    replicas: Replicas, policy: str, addresses: Mapping[str, str] | None = None
) -> Iterator[Front]:
    """Run a router before ``a`` and ``b``, or replicas whose addresses say more."""
    places = addresses or {
        name: replicas.system.replica(name).url for name in (replicas.a, replicas.b)
    }
    argv = [sys.executable, "-m", "millpond.cli", "router", "--policy", policy, "--port", "0"]
    argv += ["--pool-socket", str(replicas.system.socket)]
    for name, address in places.items():
        argv += ["--replica", f"{name}={address}"]
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        log_file = Path(folder) / "access.jsonl"
        argv += ["--admin-socket", f"{folder}/router.sock", "--access-log", str(log_file)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        assert process.stdout is not None
        watchdog = threading.Timer(WAIT_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline().strip()
            watchdog.cancel()
            assert line.startswith("serving at http://"), line
            front = Front(
                line.removeprefix("serving at "),
                replicas.system.replica(replicas.a).model,
                log_file,
            )
            eventually(
                lambda: front.http.get("/health").is_success, "a ready replica", timeout_s=WAIT_S
            )
            yield front
            front.close()
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT_S) == 0
        finally:
            watchdog.cancel()
            process.kill()
            process.communicate(timeout=WAIT_S)


@pytest.fixture
def front(hybrid: Replicas) -> Iterator[Front]:
    with router(hybrid, "round-robin") as made:
        yield made


def test_the_client_gets_what_the_replica_answers(front: Front, hybrid: Replicas) -> None:
    ids = prompt(300, 9001)
    direct, _ = hybrid.ask(hybrid.a, ids)
    answers = [front.complete(ids, logprobs=1)[0] for _ in range(2)]
    for answer in answers:
        assert answer.usage.completion_tokens == NUM_TOKENS
        assert answer.choices[0].logprobs.token_logprobs == pytest.approx(direct.logprobs, abs=0.1)
    assert [model.id for model in front.openai.models.list()] == [front.model]


def test_streams_of_the_client_say_the_same_as_an_answer(front: Front) -> None:
    ids = prompt(100, 9002)
    whole = front.complete(ids)[0].choices[0].text
    stream = front.openai.completions.create(
        model=front.model, prompt=ids, max_tokens=NUM_TOKENS, temperature=0, stream=True
    )
    assert "".join(event.choices[0].text for event in stream) == whole
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    fields: dict[str, Any] = {"model": front.model, "messages": messages, "temperature": 0}
    fields |= {"max_tokens": NUM_TOKENS}
    chat = front.openai.chat.completions.create(**fields).choices[0].message.content
    events = front.openai.chat.completions.create(**fields, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == chat


def test_the_asynchronous_client_works_side_by_side(front: Front) -> None:
    async def ask_all() -> None:
        http = httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S)
        async with openai.AsyncOpenAI(
            base_url=f"{front.url}/v1", api_key="any", max_retries=0, http_client=http
        ) as client:

            async def one(seed: int) -> None:
                fields: dict[str, Any] = {"model": front.model, "prompt": prompt(50, seed)}
                fields |= {"max_tokens": NUM_TOKENS, "temperature": 0}
                whole = await client.completions.create(**fields)
                stream = await client.completions.create(**fields, stream=True)
                parts = [event.choices[0].text async for event in stream]
                assert "".join(parts) == whole.choices[0].text

            await asyncio.gather(*(one(9100 + i) for i in range(6)))

    asyncio.run(ask_all())


def test_errors_and_other_paths_are_the_replicas(front: Front) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        front.openai.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError):
        front.openai.completions.create(model=front.model, prompt=prompt(5000, 9003))
    assert front.http.post("/v1/completions", content=b"{").status_code == 400
    answer = front.http.post("/tokenize", json={"model": front.model, "prompt": "hello"})
    assert answer.json()["count"] > 0


def test_a_moved_request_is_told_in_headers_log_and_metrics(front: Front, hybrid: Replicas) -> None:
    ids = prompt(3 * BLOCK + 10, 9004)
    _, first = front.complete(ids)
    hybrid.settle()
    _, second = front.complete(ids)
    assert (first["x-millpond-prefix-holder"], first["x-millpond-moved"]) == ("none", "no")
    assert second["x-millpond-prefix-holder"] == first["x-millpond-replica"]
    assert second["x-millpond-moved"] == "yes"
    lines = [front.logged(each["x-millpond-request-id"]) for each in (first, second)]
    for line, headers in zip(lines, (first, second), strict=True):
        found = line["attribution"]
        report = hybrid.report(headers["x-millpond-request-id"])
        assert found["source"] == "pool"
        assert found["prompt_tokens"] == report.prompt_tokens == len(ids)
        assert found["computed_tokens"] == report.computed_tokens
        assert found["writers"] == report.writers
        assert line["prompt_tokens_guessed"] == len(ids), "token ids are counted"
    cold, moved = (line["attribution"] for line in lines)
    assert cold["computed_tokens"] == len(ids)
    assert moved["pool_other_tokens"] == full_blocks(len(ids))
    reader, writer = second["x-millpond-replica"], first["x-millpond-replica"]
    labels = f'reader="{reader}",writer="{writer}"'
    wanted = f"millpond_router_loaded_tokens_total{{{labels}}} {full_blocks(len(ids))}.0"
    assert wanted in front.http.get("/millpond/metrics").text


def test_the_sum_over_requests_is_what_the_pool_was_told(front: Front, hybrid: Replicas) -> None:
    def totals() -> dict[str, dict[str, Any]]:
        with hybrid.admin() as admin:
            tokens: Any = admin.status()["tokens"]
        return {name: dict(tokens.get(name, {})) for name in (hybrid.a, hybrid.b)}

    names = ("prompt_tokens", "computed_tokens", "local_tokens", "loaded_tokens")
    before = totals()
    asked = [prompt(BLOCK * (1 + i % 3) + 5, 9200 + i % 4) for i in range(10)]
    headers = [front.complete(ids)[1] for ids in asked]
    lines = [front.logged(each["x-millpond-request-id"]) for each in headers]
    after = totals()
    for replica in (hybrid.a, hybrid.b):
        mine = [line["attribution"] for line in lines if line["replica"] == replica]
        for name in names:
            told = after[replica][name] - before[replica].get(name, 0)
            assert sum(each[name] for each in mine) == told, (replica, name)


def test_a_client_that_goes_frees_the_engine(front: Front, hybrid: Replicas) -> None:
    stream = front.openai.completions.create(
        model=front.model,
        prompt=prompt(50, 9005),
        max_tokens=3500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))

    def num_running() -> float:
        replicas = (hybrid.a, hybrid.b)
        return sum(hybrid.metric(name, "vllm:num_requests_running") for name in replicas)

    eventually(lambda: num_running() == 1, "the engine runs the request", timeout_s=WAIT_S)
    stream.close()
    eventually(lambda: num_running() == 0, "the engine has aborted it", timeout_s=WAIT_S)

    def completions() -> list[dict[str, Any]]:
        return [line for line in front.lines() if line["path"] == "/v1/completions"]

    eventually(lambda: bool(completions()), "a line of the log", timeout_s=WAIT_S)
    (line,) = completions()
    assert line["ended"] == "client-gone"
    assert line["response_bytes"] < 3000 * 100, "it was not answered to its end"


def test_cost_keeps_a_conversation_where_its_prefix_is(hybrid: Replicas) -> None:
    with router(hybrid, "cost") as front:
        ids = prompt(2 * BLOCK, 9006)
        served = [
            front.complete(ids + prompt(20 * i, 9007))[1]["x-millpond-replica"] for i in range(4)
        ]
        assert len(set(served)) == 1
