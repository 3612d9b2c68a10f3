"""The router passes everything through: bytes, headers, statuses, errors, in both directions."""

import asyncio
import gzip
import json
import socket

import pytest

from millpond.router.options import Limits
from millpond.router.server import listen
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
    until,
)

BODY = {"model": "m", "prompt": "once upon a time", "stream": True}


def test_a_stream_arrives_byte_for_byte_and_piece_by_piece() -> None:
    seen = asyncio.Event()
    pieces = [EVENT, b"data: half an ev", b"ent\n\n", bytes(range(256)), b"x" * 100_000, DONE]

    async def script(call: Call) -> None:
        call.write(STREAM_HEAD)
        for piece in pieces:
            call.write(chunk(piece))
            await seen.wait()  # until the client has what was sent
            seen.clear()
        call.write(b"0\r\n\r\n")

    async def scenario() -> None:
        async with front(ScriptedReplica("a", script)) as router, router.post(BODY) as reply:
            assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
            got = b""
            for i in range(len(pieces)):
                wanted = b"".join(pieces[: i + 1])
                got += await reply.content.readexactly(len(wanted) - len(got))
                assert got == wanted
                seen.set()
            assert await reply.content.read() == b""

    run(scenario)


def test_requests_arrive_as_they_were_sent() -> None:
    body = b'{"prompt" : "\\u00e9",  "model":"m" }'

    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"{}"))
        async with front(replica) as router:
            lines = [
                b"POST /v1/completions?x=%2Fy&z=%C3%a9 HTTP/1.1",
                b"Host: front:1",
                b"Authorization: Bearer of-the-client",
                b"X-Twice: one",
                b"X-Twice: two",
                b"X-Hop: ends here",
                b"TE: trailers",
                b"Connection: x-hop, close",
                b"Content-Length: %d" % len(body),
            ]
            request = b"\r\n".join(lines) + b"\r\n\r\n" + body
            async with router.raw(request) as (reader, _):
                assert (await reader.read()).startswith(b"HTTP/1.1 200")
        (call,) = replica.calls
        assert call.body == body
        assert call.target == "/v1/completions?x=%2Fy&z=%C3%a9"
        assert call.header("authorization") == ["Bearer of-the-client"]
        assert call.header("x-twice") == ["one", "two"]
        assert call.header("host") == [f"127.0.0.1:{replica.port}"]
        for gone in ("x-hop", "te", "user-agent", "accept-encoding", "accept", "content-type"):
            assert call.header(gone) == [], gone

    run(scenario)


@pytest.mark.parametrize("names", [(), (b"",), (b"one", b"two"), (b"one",), ("\u00e9".encode(),)])
def test_a_replica_gets_exactly_one_request_id(names: tuple[bytes, ...]) -> None:
    lines = b"".join(b"X-Request-Id: %s\r\n" % each for each in names)
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n"

    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"{}"))
        async with front(replica) as router, router.raw(request) as (reader, _):
            head = (await reader.read()).lower()
            (line,) = await router.logged(1)
        (found,) = replica.calls[0].header("x-request-id")
        assert found, "an empty one names nothing"
        sent = found.encode("latin-1")
        assert line["request_id"] == found, "as the replica reads it, and reports it"
        if len(names) == 1 and names[0]:
            assert sent == names[0]
        elif not names:
            assert b"x-millpond-request-id: %s\r\n" % sent in head

    run(scenario)


def test_answers_arrive_as_they_were_sent() -> None:
    packed = gzip.compress(b'{"x": 1}')
    headers = (
        b"Content-Encoding: gzip",
        b"Set-Cookie: a=1",
        b"Set-Cookie: b=2",
        b"Keep-Alive: timeout=5",
        b"Connection: keep-alive, x-hop",
        b"X-Hop: ends here",
    )

    async def scenario() -> None:
        async with front(
            ScriptedReplica("a", answer(packed, status="206 Some", headers=headers))
        ) as router:
            request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            async with router.raw(request) as (reader, _):
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert body == packed
        lines = head.lower().split(b"\r\n")
        assert lines[0].startswith(b"http/1.1 206")
        assert [x for x in lines if x.startswith(b"set-cookie")] == [
            b"set-cookie: a=1",
            b"set-cookie: b=2",
        ]
        assert b"content-encoding: gzip" in lines
        assert b"content-length: %d" % len(packed) in lines
        assert b"x-millpond-replica: a" in lines
        assert not [x for x in lines if x.startswith((b"keep-alive", b"x-hop"))]

    run(scenario)


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
def test_errors_of_a_replica_are_its_own(status: int) -> None:
    body = json.dumps({"error": {"message": "of the replica", "code": status}}).encode()

    async def scenario() -> None:
        replicas = [ScriptedReplica(name, answer(body, status=f"{status} X")) for name in "ab"]
        async with front(*replicas) as router, router.post(BODY) as reply:
            assert reply.status == status
            assert await reply.read() == body
        assert sum(len(each.calls) for each in replicas) == 1, "an answer is no reason to repeat"

    run(scenario)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": 3}',
        b"[" * 100_000,
        b'{"user": 1e999}',
    ],
)
def test_malformed_bodies_are_for_the_replica_to_judge(body: bytes) -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"no", status="400 Bad"))
        async with (
            front(replica) as router,
            router.post(body, path="/v1/chat/completions") as reply,
        ):
            assert reply.status == 400
            assert await reply.read() == b"no"
        assert replica.calls[0].body == body

    run(scenario)


def test_a_bug_of_the_router_is_no_complete_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    async def scenario() -> None:
        async with front(ScriptedReplica("a")) as router:
            monkeypatch.setattr(router.router, "place", fail)
            async with router.post(BODY) as reply:
                assert reply.status == 500
            (line,) = await router.logged(1)
            assert line["ended"] == "router-failed"

    run(scenario)


def test_every_method_and_path_passes() -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"ok"))
        async with front(replica) as router:
            for method in ("GET", "DELETE", "PUT", "PATCH", "OPTIONS", "POST"):
                url = f"{router.url}/some/{method}"
                async with router.session.request(method, url) as reply:
                    assert await reply.read() == b"ok"
            async with router.session.head(f"{router.url}/millpond-else") as reply:
                assert reply.headers["content-length"] == "2"
        assert [call.method for call in replica.calls][-2:] == ["POST", "HEAD"]

    run(scenario)


# ---------------------------------------------------------------- limits


async def status_of(router: Front, data: bytes) -> bytes:
    async with router.raw(data) as (reader, _):
        return (await reader.read()).partition(b"\r\n")[0]


def test_what_is_too_large_or_no_http_never_reaches_a_replica() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"x" * 2000)
    cases = {
        b"nonsense\r\n\r\n": b"HTTP/1.1 400",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n": b"HTTP/1.1 400",
        head + b"Content-Length: 1001\r\n\r\n": b"HTTP/1.1 413",
        chunked: b"HTTP/1.1 413",
        head + b"X: \xff\r\nConnection: close\r\nContent-Length: 0\r\n\r\n": b"HTTP/1.1 400",
        head + b"Connection: x-request-id, close\r\nX-Request-Id: \xff\r\n\r\n": b"HTTP/1.1 400",
        head + b"X: " + b"y" * 4000: b"HTTP/1.1 431",
        head + b"A: b\r\n" * 600: b"HTTP/1.1 431",
        head + b"Content-Length: 10\r\n\r\nhalf": b"HTTP/1.1 408",
    }

    async def scenario() -> None:
        replica = ScriptedReplica("a")
        limits = Limits(body_bytes_max=1000, head_bytes_max=2000, client_s=0.3)
        async with front(replica, limits=limits) as router:
            for data, wanted in cases.items():
                got = await status_of(router, data)
                assert got.startswith(wanted), (data[:80], got)
        assert replica.calls == []

    run(scenario)


def test_trailers_never_become_headers() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    request = head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk(b"{}") + b"0\r\n"
    trailers = b"X-Late: \xff\r\nAuthorization: late\r\n\r\n"

    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"ok"))
        async with front(replica) as router:
            assert (await status_of(router, request + trailers)).startswith(b"HTTP/1.1 200")
        (call,) = replica.calls
        assert call.body == b"{}"
        assert call.header("x-late") == call.header("authorization") == []

    run(scenario)


@pytest.mark.parametrize("line", [b"X: y\r\n", b"y"], ids=["many", "one"])
def test_trailers_are_bounded_as_heads_are(line: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def scenario() -> None:
        replica = ScriptedReplica("a")
        async with (
            front(replica, limits=Limits(head_bytes_max=2000)) as router,
            router.raw(head + chunk(b"{}")) as (reader, writer),
        ):
            await until(lambda: bool(router.router._serving), "the body has begun")
            writer.write(b"0\r\nX: " + line * 3000)
            # Should the rest share a read with the body, the next one is over the bound.
            await writer.drain()
            async with asyncio.timeout(10):
                assert (await reader.readline()).startswith(b"HTTP/1.1 431")
        assert replica.calls == []

    run(scenario)


def test_a_large_body_within_the_limit_passes() -> None:
    body = json.dumps({"prompt": "x" * 3_000_000}).encode()

    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"ok"))
        async with front(replica) as router, router.post(body) as reply:
            assert reply.status == 200
        assert replica.calls[0].body == body

    run(scenario)


def test_the_routers_own_key_is_asked_for_where_there_is_one() -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"ok"))
        async with front(replica, api_key="secret") as router:
            for path in ("/v1/models", "/millpond/metrics"):
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    url = router.url + path
                    async with router.session.get(url, headers=headers) as reply:
                        assert reply.status == 401
                        assert (await reply.json())["error"]["code"] == 401
            assert replica.calls == []
            async with router.session.get(f"{router.url}/health") as reply:
                assert reply.status == 200
            right = {"Authorization": "Bearer secret"}
            async with router.session.get(f"{router.url}/v1/models", headers=right) as reply:
                assert reply.status == 200
        assert replica.calls[0].header("authorization") == ["Bearer secret"]

    run(scenario)


def test_own_paths_never_reach_a_replica() -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"ok"))
        async with front(replica) as router:
            async with router.session.get(f"{router.url}/millpond/metrics") as reply:
                text = await reply.text()
            assert 'millpond_router_replica_ready{replica="a"} 1.0' in text
            async with router.session.get(f"{router.url}/millpond/else") as reply:
                assert reply.status == 404
        assert replica.calls == []

    run(scenario)


def test_nothing_of_a_body_or_a_query_is_logged() -> None:
    async def scenario() -> None:
        async with front(ScriptedReplica("a", answer(b"an answer"))) as router:
            async with router.post({"prompt": "a secret"}, path="/v1/completions?key=hidden"):
                pass
            (line,) = await router.logged(1)
        text = json.dumps(line)
        assert line["path"] == "/v1/completions"
        for word in ("secret", "hidden", "an answer"):
            assert word not in text

    run(scenario)


def test_a_connection_serves_many_requests() -> None:
    async def scenario() -> None:
        replica = ScriptedReplica("a", answer(b"ok"))
        async with front(replica) as router:
            get = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
            # The second comes before the first's answer.
            async with router.raw(get + get) as (reader, _):
                await until(lambda: len(replica.calls) == 2, "both arrive")
                for _ in range(2):
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert b" 200 " in head
                    assert await reader.readexactly(2) == b"ok"

    run(scenario)


def test_the_first_event_does_not_wait_for_an_acknowledgement() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
