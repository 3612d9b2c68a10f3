"""Frames in any order, cut anywhere, sent in any pieces: the daemon answers as a model says."""

import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.service import protocol
from millpond.service.protocol import Hello, frame
from tests.faults.raw import RawClient, scheduler_hello
from tests.faults.world import KEY_BYTES, Daemon, keys, short_folder

PREFIX = {"keys": keys("p", 2), "key_bytes": KEY_BYTES}
REPORT = {"prompt_tokens": 3, "computed_tokens": 3, "local_tokens": 0, "loaded_tokens": 0}

SCHEDULER = scheduler_hello()
ADMIN = Hello(role="admin")
WORKER = scheduler_hello(role="worker")
OTHER_VERSION = Hello(role="admin", protocol_version=2)
HELLOS = [SCHEDULER, ADMIN, WORKER, OTHER_VERSION]

ENGINES = [
    protocol.Lookup(id=11, **PREFIX),
    protocol.Pin(id=12, first_block=0, **PREFIX),
    protocol.Reserve(id=13, first_block=0, parts=(b"",), **PREFIX),
    protocol.Finish(leases=(1,), ok=True),
    protocol.Finish(leases=(1,), ok=False, rank=0),
    protocol.Report(request_id="r", writers={}, **REPORT),
    protocol.Link(h2d_gb_s=55.0),
]
OPERATORS = [
    protocol.Status(id=21),
    protocol.Switch(id=22, enabled=True),
    protocol.Flush(id=23),
    protocol.Requests(id=24, last=1),
    protocol.Blocks(id=25, num_max=3),
    protocol.Check(id=26),
]
GARBAGE = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode({"type": "lookup"}),
    msgspec.msgpack.encode(protocol.Status(id=1)) + b"\xc0",
    msgspec.msgpack.encode(protocol.Done(id=1)),
]
REPLIES: dict[type, type] = {
    protocol.Lookup: protocol.LookupReply,
    protocol.Pin: protocol.Pinned,
    protocol.Reserve: protocol.Reserved,
    protocol.Status: protocol.StatusReply,
    protocol.Switch: protocol.Done,
    protocol.Flush: protocol.Done,
    protocol.Requests: protocol.RequestsReply,
    protocol.Blocks: protocol.BlocksReply,
    protocol.Check: protocol.Done,
}
WELCOME = ("Welcome", None)

Message = msgspec.Struct | bytes


def expected_replies(messages: Sequence[Message]) -> Iterator[tuple[str, int | str | None]]:
    """Yield type and id (or code) of each reply, up to where the daemon hangs up."""
    role: str | None = None
    for message in messages:
        if isinstance(message, bytes):
            return
        if isinstance(message, Hello):
            if role is None and message in {SCHEDULER, ADMIN}:
                role = message.role
                yield WELCOME
                continue
            if role is None:
                yield "Refused", "no-session" if message is WORKER else "version"
            return
        if role is None or (role == "admin" and message in ENGINES):
            return
        if isinstance(message, protocol.Link):
            return  # a worker's, and here no worker is ever let in
        if isinstance(message, protocol.Finish | protocol.Report):
            if isinstance(message, protocol.Finish) and message.rank is not None:
                return
            continue
        number: int = message.id  # type: ignore[attr-defined]
        is_refused = role == "scheduler" and message in OPERATORS[1:]
        yield (protocol.Failed if is_refused else REPLIES[type(message)]).__name__, number


def described(reply: Any) -> tuple[str, int | str | None]:  # noqa: ANN401
    """Return what of a reply the model predicts."""
    if isinstance(reply, protocol.Refused):
        return "Refused", reply.code
    if isinstance(reply, protocol.Failed):
        assert reply.code == "role"
    return type(reply).__name__, getattr(reply, "id", None)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for all: it must stand what every one of these tests does."""
    with short_folder() as folder, Daemon(f"{folder}/pool.sock") as started:
        yield started.wait_ready()
        started.settle()
        started.stop()


def sequences() -> st.SearchStrategy[list[Message]]:
    """Return any order of frames, most of them with a hello in front."""
    frames: st.SearchStrategy[Message] = st.one_of(
        st.sampled_from(ENGINES),
        st.sampled_from(OPERATORS),
        st.sampled_from(ENGINES + OPERATORS),
        st.sampled_from([*HELLOS, *GARBAGE]),
    )
    first: st.SearchStrategy[list[Message]] = st.sampled_from([[SCHEDULER], [ADMIN], []])
    return st.tuples(first, st.lists(frames, max_size=12)).map(lambda both: both[0] + both[1])


def encoded(message: Message) -> bytes:
    """Return a message as it travels."""
    return frame(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))


def converse(daemon: Daemon, data: bytes, pieces: Sequence[int]) -> list[Any]:
    """Send ``data`` cut at ``pieces``, hang up, and return all replies."""
    cuts = sorted({1 + cut % (len(data) - 1) for cut in pieces} if len(data) > 1 else ())
    starts, stops = [0, *cuts], [*cuts, len(data)]
    pidfd = os.pidfd_open(os.getpid())
    with RawClient(daemon.socket_path) as raw:
        try:
            starts[0] = socket.send_fds(raw.socket, [data[: stops[0]]], [pidfd])
            for start, stop in zip(starts, stops, strict=True):
                raw.socket.sendall(data[start:stop])
            raw.socket.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass  # it has hung up; what it said before is there to be read
        finally:
            os.close(pidfd)
        replies: list[Any] = []
        while (reply := raw.reply()) is not None:
            replies.append(reply)
    return replies


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=sequences(), num_cut=st.integers(0, 40), pieces=st.lists(st.integers(0), max_size=5)
)
def test_frames_in_any_order_and_pieces(
    daemon: Daemon, messages: list[Message], num_cut: int, pieces: list[int]
) -> None:
    data = b"".join(map(encoded, messages))
    data = data[: max(0, len(data) - num_cut)]
    whole: list[Message] = []
    size = 0
    for message in messages:
        size += len(encoded(message))
        if size <= len(data):
            whole.append(message)
    replies = converse(daemon, data, pieces) if data else []
    assert list(map(described, replies)) == list(expected_replies(whole))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.binary(min_size=1, max_size=5000), greeted=st.booleans())
def test_any_bytes(daemon: Daemon, data: bytes, greeted: bool) -> None:
    converse(daemon, encoded(SCHEDULER) * greeted + data, [])
    assert daemon.status()["service"]["internal_errors"] == 0
