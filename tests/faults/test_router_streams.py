"""What becomes of streams: slow clients, clients that go, replicas that die or fall silent."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from millpond.router import exchange
from millpond.router.http_protocol import BoundedHttp
from millpond.router.options import Limits
from tests.faults.router_world import (
    DONE,
    EVENT,
    STREAM_HEAD,
    Call,
    Front,
    ScriptedReplica,
    answer,
    chunk,
    front,
    run,
    stream,
    until,
)

BODY = {"model": "m", "prompt": "once upon a time", "stream": True}
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
)
PIECE = 64 * 1024
NUM_PIECES = 512
"""32 MiB: more than the buffers of four sockets and two processes hold."""


class Flood:
    """A script that sends NUM_PIECES pieces as fast as they are taken."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def __call__(self, call: Call) -> None:
        call.write(STREAM_HEAD)
        for _ in range(NUM_PIECES):
            call.write(chunk(b"x" * PIECE))
            await call.drain()
            self.num_sent += 1
        call.write(b"0\r\n\r\n")

    async def stalled(self) -> None:
        """Wait until nothing more is taken for half a second."""
        before = -1
        while self.num_sent != before:
            before = self.num_sent
            await asyncio.sleep(0.5)


class Held:
    """A script that sends one event and then does what the test says."""

    def __init__(self, first: bytes = EVENT, head: bytes = STREAM_HEAD) -> None:
        self.first, self.head = first, head
        self.go_on = asyncio.Event()
        self.closed = asyncio.Event()
        self.calls: list[Call] = []

    async def __call__(self, call: Call) -> None:
        self.calls.append(call)
        call.write(self.head)
        if self.first:
            call.write(chunk(self.first))
        closed = asyncio.create_task(call.closed_by_router())
        go_on = asyncio.create_task(self.go_on.wait())
        await asyncio.wait({closed, go_on}, return_when=asyncio.FIRST_COMPLETED)
        if closed.done():
            self.closed.set()
        closed.cancel()
        go_on.cancel()
        await asyncio.gather(closed, go_on, return_exceptions=True)
        if self.go_on.is_set():
            call.write(chunk(DONE) + b"0\r\n\r\n")


def test_a_client_that_reads_slowly_slows_the_replica_down() -> None:
    async def scenario() -> None:
        flood = Flood()
        async with (
            front(ScriptedReplica("a", flood)) as router,
            router.raw(REQUEST) as (reader, _),
        ):
            await flood.stalled()
            assert 0 < flood.num_sent < NUM_PIECES / 2, "nobody may buffer the whole answer"
            num_bytes = 0
            while data := await reader.read(2**20):
                num_bytes += len(data)
            assert num_bytes > PIECE * NUM_PIECES
            assert flood.num_sent == NUM_PIECES
            (line,) = await router.logged(1)
            assert line["ended"] == "complete"
            assert line["response_bytes"] == PIECE * NUM_PIECES

    run(scenario)


def test_a_client_that_stops_reading_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        closed = asyncio.Event()
        lost = BoundedHttp.connection_lost

        def connection_lost(self: BoundedHttp, exc: Exception | None) -> None:
            lost(self, exc)
            closed.set()

        monkeypatch.setattr(BoundedHttp, "connection_lost", connection_lost)
        flood = Flood()
        limits = Limits(client_s=0.5)
        async with front(ScriptedReplica("a", flood), limits=limits) as router:
            async with router.raw(REQUEST):
                (line,) = await router.logged(1)
                assert line["ended"] == "client-stalled"
                async with asyncio.timeout(10):
                    await closed.wait()  # though the client takes nothing of what is unsent
            assert flood.num_sent < NUM_PIECES
            assert router.loads() == {"a": 0}

    run(scenario)


@pytest.mark.parametrize("first", [EVENT, b""], ids=["mid-stream", "before the first byte"])
def test_a_client_that_goes_ends_its_request_upstream(first: bytes) -> None:
    async def scenario() -> None:
        held = Held(first, head=STREAM_HEAD if first else b"")
        async with front(ScriptedReplica("a", held)) as router:
            async with router.raw(REQUEST) as (reader, _):
                await until(lambda: bool(held.calls), "the replica has the request")
                if first:
                    await reader.readuntil(first)
                assert router.loads() == {"a": 1}
            async with asyncio.timeout(10):
                await held.closed.wait()
            (line,) = await router.logged(1)
            assert line["ended"] == "client-gone"
            assert router.loads() == {"a": 0}

    run(scenario)


def test_a_client_that_goes_after_the_last_event_has_had_it_all() -> None:
    """OpenAI's own client does, before the stream's end has come."""

    async def scenario() -> None:
        held = Held(EVENT + DONE)
        async with front(ScriptedReplica("a", held)) as router:
            async with router.raw(REQUEST) as (reader, _):
                await reader.readuntil(DONE)
            async with asyncio.timeout(10):
                await held.closed.wait()
            (line,) = await router.logged(1)
            assert line["ended"] == "complete"

    run(scenario)


async def _two_streams(router: Front, one: Held, other: Held) -> tuple[bytes, bytes]:
    """Start a stream on each replica, kill the first one, let the other end."""
    async with router.post(BODY) as first, router.post(BODY) as second:
        await until(lambda: len(one.calls) == len(other.calls) == 1, "a stream on each")
        await first.content.readexactly(len(EVENT))
        one.calls[0].kill()
        rest = await first.content.read()
        other.go_on.set()
        return rest, await second.content.read()


def test_a_replica_that_dies_mid_stream_is_an_error_for_its_client_only() -> None:
    async def scenario() -> None:
        one, other = Held(), Held()
        async with front(ScriptedReplica("a", one), ScriptedReplica("b", other)) as router:
            rest, whole = await _two_streams(router, one, other)
            error, done, end = rest.split(b"\n\n")
            fields = json.loads(error.removeprefix(b"data: "))["error"]
            assert fields["code"] == 502
            assert fields["message"] == "replica a ended the connection"
            assert fields["type"] == "BadGatewayError"
            assert (done, end) == (b"data: [DONE]", b"")
            assert whole == EVENT + DONE
            lines = await router.logged(2)
            assert sorted(line["ended"] for line in lines) == ["complete", "replica-gone"]

    run(scenario)


@pytest.mark.parametrize(
    ("first", "head"),
    [
        (b'data: {"half an ev', STREAM_HEAD),
        (b'{"half', STREAM_HEAD.replace(b"text/event-stream", b"application/json")),
    ],
    ids=["half an event", "half a document"],
)
def test_half_of_something_is_never_made_to_look_whole(first: bytes, head: bytes) -> None:
    async def scenario() -> None:
        held = Held(first, head)
        async with (
            front(ScriptedReplica("a", held)) as router,
            router.raw(REQUEST) as (reader, _),
        ):
            got = await reader.readuntil(first)
            held.calls[0].kill()
            got += await reader.read()
            assert got.endswith(chunk(first)), "no end of the chunks, and nothing else"

    run(scenario)


def test_the_responses_api_gets_an_error_event_of_its_own_form() -> None:
    async def scenario() -> None:
        held = Held()
        async with front(ScriptedReplica("a", held)) as router:
            async with router.post(BODY, path="/v1/responses") as reply:
                await reply.content.readexactly(len(EVENT))
                held.calls[0].kill()
                event, data, *_ = (await reply.content.read()).split(b"\n")
            assert event == b"event: error"
            fields = json.loads(data.removeprefix(b"data: "))
            assert (fields["type"], fields["error"]["code"]) == ("error", 502)

    run(scenario)


async def exhaust(events: AsyncIterator[object]) -> None:
    async for _ in events:
        continue


@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
def test_the_official_client_raises_the_error(api: str) -> None:
    async def scenario() -> None:
        held = Held(first=b": a comment\n\n")
        async with front(ScriptedReplica("a", held)) as router:
            # An environment with a proxy must not lead elsewhere.
            http = httpx.AsyncClient(trust_env=False, timeout=20)
            async with openai.AsyncOpenAI(
                base_url=f"{router.url}/v1", api_key="any", max_retries=0, http_client=http
            ) as client:
                if api == "completions":
                    asking = client.completions.create(model="m", prompt="x", stream=True)
                elif api == "chat":
                    asking = client.chat.completions.create(model="m", messages=[], stream=True)
                else:
                    asking = client.responses.create(model="m", input="x", stream=True)
                events: Any = await asking
                held.calls[0].kill()
                with pytest.raises(openai.APIError, match="replica a ended the connection"):
                    await exhaust(events)

    run(scenario)


# ---------------------------------------------------------------- before the first byte


async def silence(call: Call) -> None:
    await call.closed_by_router()


async def hang_up(call: Call) -> None:
    call.kill()


def test_a_replica_that_never_answers_is_a_timeout_and_not_asked_twice() -> None:
    async def scenario() -> None:
        replicas = [ScriptedReplica(name, silence) for name in "ab"]
        async with front(*replicas, limits=Limits(first_byte_s=0.5)) as router:
            async with router.post(BODY) as reply:
                assert reply.status == 504
                assert reply.headers["x-millpond-replica"] == "a"
                fields = (await reply.json())["error"]
                assert fields["type"] == "GatewayTimeoutError"
                assert "0.5 s" in fields["message"]
            assert [len(each.calls) for each in replicas] == [1, 0]
            (line,) = await router.logged(1)
            assert line["ended"] == "replica-silent"
            assert router.loads() == {"a": 0, "b": 0}

    run(scenario)


def test_a_stream_that_falls_silent_ends_with_an_error() -> None:
    async def scenario() -> None:
        held = Held()
        limits = Limits(next_byte_s=0.5)
        async with front(ScriptedReplica("a", held), limits=limits) as router:
            async with router.post(BODY) as reply:
                data = await reply.content.read()
            assert data.startswith(EVENT + b'data: {"error"')
            async with asyncio.timeout(10):
                await held.closed.wait()

    run(scenario)


def test_a_slow_prefill_is_no_silence() -> None:
    """The limits of a first byte and of a pause are different ones."""

    async def scenario() -> None:
        async def late(call: Call) -> None:
            await asyncio.sleep(1.0)
            await stream(EVENT, DONE)(call)

        limits = Limits(first_byte_s=20.0, next_byte_s=0.3)
        async with (
            front(ScriptedReplica("a", late), limits=limits) as router,
            router.post(BODY) as reply,
        ):
            assert await reply.content.read() == EVENT + DONE

    run(scenario)


@pytest.mark.parametrize(
    ("path", "num_calls", "status"),
    [("/v1/completions", 2, 200), ("/v1/chat/completions", 2, 200), ("/v1/responses", 1, 502)],
)
def test_only_what_leaves_nothing_behind_is_asked_again(
    path: str, num_calls: int, status: int
) -> None:
    async def scenario() -> None:
        replicas = [ScriptedReplica("a", hang_up), ScriptedReplica("b")]
        async with front(*replicas) as router:
            async with router.post(BODY, path=path) as reply:
                assert reply.status == status
                if status == 502:
                    assert (await reply.json())["error"]["code"] == 502
            assert sum(len(each.calls) for each in replicas) == num_calls
            (line,) = await router.logged(1)
            assert line["tried"] == ["a", "b"][:num_calls]

    run(scenario)


def test_a_request_that_no_replica_survives_ends_the_second_one_at_most() -> None:
    async def scenario() -> None:
        replicas = [ScriptedReplica(name, hang_up) for name in "abcde"]
        async with front(*replicas) as router, router.post(BODY) as reply:
            assert reply.status == 502
        assert sum(len(each.calls) for each in replicas) == 2

    run(scenario)


def test_a_request_that_a_replica_died_of_while_working_is_given_to_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "_STALE_S", 0.2)

    async def die(call: Call) -> None:
        await asyncio.sleep(0.3)
        call.kill()

    async def scenario() -> None:
        replicas = [ScriptedReplica(name, die) for name in "ab"]
        async with front(*replicas) as router, router.post(BODY) as reply:
            assert reply.status == 502
        assert sum(len(each.calls) for each in replicas) == 1

    run(scenario)


def test_what_reached_nobody_may_try_more_replicas_than_what_was_sent() -> None:
    async def scenario() -> None:
        replicas = [ScriptedReplica(name) for name in "abc"]
        async with front(*replicas) as router:
            for each in replicas[:2]:
                each.kill()
            async with router.post(BODY) as reply:
                assert reply.headers["x-millpond-replica"] == "c"

    run(scenario)


def test_a_replica_that_refuses_is_down_and_another_one_serves() -> None:
    async def scenario() -> None:
        replicas = [ScriptedReplica(name) for name in "ab"]
        async with front(*replicas) as router:
            replicas[0].kill()
            for _ in range(3):
                # Even what must not be repeated: it has reached nobody yet.
                async with router.post(BODY, path="/v1/responses") as reply:
                    assert reply.headers["x-millpond-replica"] == "b"
            await router.ready(1)
            async with replicas[0]:  # it comes back at its port
                await router.ready(2)

    run(scenario)


def test_without_a_ready_replica_requests_are_refused_at_once() -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a")
        async with front(replica) as router:
            replica.health = 503
            await router.ready(0)
            async with router.post(BODY) as reply:
                assert reply.status == 503
                assert (await reply.json())["error"]["type"] == "ServiceUnavailableError"
            assert replica.calls == []
            replica.health = 200
            await router.ready(1)

    run(scenario)


def test_five_hundred_streams_at_once() -> None:
    num_streams = 500

    async def scenario() -> None:
        go_on = asyncio.Event()

        async def script(call: Call) -> None:
            call.write(STREAM_HEAD + chunk(EVENT))
            await go_on.wait()
            for _ in range(10):
                call.write(chunk(EVENT))
                await asyncio.sleep(0.01)
            call.write(chunk(DONE) + b"0\r\n\r\n")

        replicas = [ScriptedReplica(name, script) for name in "abc"]
        async with front(*replicas) as router:

            async def one() -> bytes:
                async with router.post(BODY) as reply:
                    return await reply.content.read()

            asking = [asyncio.create_task(one()) for _ in range(num_streams)]
            await until(
                lambda: sum(len(each.calls) for each in replicas) == num_streams, "all are there"
            )
            assert max(router.loads().values()) - min(router.loads().values()) <= 1
            go_on.set()
            answers = await asyncio.gather(*asking)
            assert set(answers) == {EVENT * 11 + DONE}
            lines = await router.logged(num_streams)
            assert {line["ended"] for line in lines} == {"complete"}
            assert set(router.loads().values()) == {0}

    run(scenario)


def test_answers_in_one_piece_are_no_streams() -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a", answer(b"{}"))) as router:
            async with router.post(BODY):
                pass
            (line,) = await router.logged(1)
            assert line["is_stream"] is False
            assert line["response_bytes"] == 2

    run(scenario)
