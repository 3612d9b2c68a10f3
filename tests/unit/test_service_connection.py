"""A client's connection against a daemon that a test plays, one step at a time."""

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from millpond.model.errors import DaemonGone, HandshakeRefused, InvariantBroken, RequestTimedOut
from millpond.service.client import AdminClient, ReplicaIdentity, SchedulerClient, WorkerClient
from millpond.service.connection import Connection
from millpond.service.protocol import (
    Done,
    Failed,
    Hello,
    LookupReply,
    Refused,
    Reply,
    Status,
    StatusReply,
    Welcome,
    frame,
)

ME = ReplicaIdentity(replica="a", session_key="k", num_ranks=1)
KEYS = bytes(64)
HIT = LookupReply(id=1, num_blocks=2, outcome="hit")


def welcome(session: int | None = None) -> Welcome:
    return Welcome(session=session, epoch=1, arena_bytes=1, enabled=True, daemon_version="0")


class PlayedDaemon:
    """A listening socket; says what it is told to, before anybody asks."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.connected: socket.socket | None = None

    def connect(self) -> Connection:
        connection = Connection(self.path, 1.0)
        self.connected, _ = self.listener.accept()
        return connection

    def say(self, *messages: Reply) -> None:
        assert self.connected is not None
        for message in messages:
            self.connected.sendall(frame(msgspec.msgpack.encode(message)))

    def hang_up(self) -> None:
        assert self.connected is not None
        self.connected.close()


@pytest.fixture
def daemon() -> Iterator[PlayedDaemon]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        played = PlayedDaemon(str(Path(folder) / "pool.sock"))
        with played.listener:
            yield played
        if played.connected is not None:
            played.connected.close()


@contextmanager
def scheduler(daemon: PlayedDaemon, *replies: Reply) -> Iterator[SchedulerClient]:
    connection = daemon.connect()
    daemon.say(welcome(7))
    greeting = connection.greet(Hello(role="scheduler"), pidfd=None, timeout_s=1.0)
    daemon.say(*replies)
    with SchedulerClient(connection, greeting.welcome) as client:
        yield client


def test_a_reply_is_returned(daemon: PlayedDaemon) -> None:
    with scheduler(daemon, HIT) as client:
        assert client.session == 7
        assert client.lookup(KEYS, 32).num_blocks == 2
        assert not client.poll_closed()


def test_a_refusal_is_read_although_the_daemon_has_hung_up(daemon: PlayedDaemon) -> None:
    connection = daemon.connect()
    daemon.say(Refused(code="full", field="clients", message="too many"))
    daemon.hang_up()
    with pytest.raises(HandshakeRefused, match="too many") as caught:
        connection.greet(Hello(role="admin"), pidfd=None, timeout_s=1.0)
    assert (caught.value.code, caught.value.field) == ("full", "clients")
    assert connection.poll_closed()


def test_hanging_up_in_the_handshake_is_gone(daemon: PlayedDaemon) -> None:
    connection = daemon.connect()
    daemon.hang_up()
    with pytest.raises(DaemonGone, match="handshake"):
        connection.greet(Hello(role="admin"), pidfd=None, timeout_s=1.0)


def test_silence_in_the_handshake_times_out(daemon: PlayedDaemon) -> None:
    connection = daemon.connect()
    with pytest.raises(RequestTimedOut):
        connection.greet(Hello(role="admin"), pidfd=None, timeout_s=0.05)


def test_more_replies_than_requests(daemon: PlayedDaemon) -> None:
    with scheduler(daemon, HIT, HIT) as client, pytest.raises(DaemonGone, match="more replies"):
        client.lookup(KEYS, 32)


@pytest.mark.parametrize(
    "reply",
    [
        LookupReply(id=9, num_blocks=2, outcome="hit"),
        Done(id=1),
        StatusReply(id=1, statistics={}),
        welcome(),
    ],
    ids=["other id", "other kind", "status", "welcome"],
)
def test_a_reply_out_of_step_is_not_believed(daemon: PlayedDaemon, reply: Reply) -> None:
    with scheduler(daemon, reply) as client:
        for _ in range(2):
            with pytest.raises(DaemonGone):
                client.lookup(KEYS, 32)
        assert client.poll_closed()


def test_garbage_for_a_reply(daemon: PlayedDaemon) -> None:
    with scheduler(daemon) as client:
        assert daemon.connected is not None
        daemon.connected.sendall(frame(b"\xc1"))
        with pytest.raises(DaemonGone):
            client.lookup(KEYS, 32)


def test_a_reply_in_pieces_has_one_deadline(daemon: PlayedDaemon) -> None:
    connection = daemon.connect()
    assert daemon.connected is not None
    daemon.connected.sendall(frame(msgspec.msgpack.encode(HIT))[:-1])
    started = time.monotonic()
    with pytest.raises(RequestTimedOut):
        connection.call(Status(id=1), StatusReply, 0.1)
    assert time.monotonic() - started < 1.0


def test_a_late_reply_is_never_taken_for_the_next(daemon: PlayedDaemon) -> None:
    connection = daemon.connect()
    with pytest.raises(RequestTimedOut):
        connection.call(Status(id=1), StatusReply, 0.01)
    with pytest.raises(DaemonGone, match="is closed"):
        connection.call(Status(id=2), StatusReply, 1.0)


def test_failures_are_told_apart(daemon: PlayedDaemon) -> None:
    invalid = Failed(id=1, code="invalid", message="no such length")
    broken = Failed(id=2, code="broken", message="two owners")
    with scheduler(daemon, invalid) as client:
        with pytest.raises(ValueError, match="no such length"):
            client.lookup(KEYS, 32)
        daemon.say(broken)
        with pytest.raises(InvariantBroken, match="two owners"):
            client.lookup(KEYS, 32)


def test_a_request_too_large_for_a_frame_is_not_sent(daemon: PlayedDaemon) -> None:
    with scheduler(daemon) as client:
        with pytest.raises(ValueError, match="at most"):
            client.lookup(bytes(8 << 20), 32)
        assert not client.poll_closed()


def test_polling_is_quick_and_sees_the_end(daemon: PlayedDaemon) -> None:
    with scheduler(daemon) as client:
        started = time.monotonic()
        assert not any(client.poll_closed() for _ in range(100))
        assert time.monotonic() - started < 0.5
        daemon.hang_up()
        assert client.poll_closed()
        assert client.poll_closed()


def test_polling_then_calling_has_its_deadline_again(daemon: PlayedDaemon) -> None:
    with scheduler(daemon) as client:
        assert not client.poll_closed()
        started = time.monotonic()
        with pytest.raises(RequestTimedOut):
            client.lookup(KEYS, 32)
        assert time.monotonic() - started > 0.1


def test_a_frame_that_nobody_asked_for_ends_the_connection(daemon: PlayedDaemon) -> None:
    with scheduler(daemon, HIT) as client:
        assert client.poll_closed()


def test_a_worker_needs_the_memory(daemon: PlayedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.service.client.Connection", lambda *_: daemon.connect())
    real_connect = daemon.connect

    def connect_and_welcome() -> Connection:
        connection = real_connect()
        daemon.say(welcome(7))
        return connection

    monkeypatch.setattr(daemon, "connect", connect_and_welcome)
    with pytest.raises(DaemonGone, match="no memory"):
        WorkerClient.connect(daemon.path, ME, rank=0)


def test_no_daemon_leaves_no_descriptor(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    for path in (str(tmp_path / "none.sock"), str(tmp_path), "/" + "x" * 200):
        with pytest.raises(DaemonGone):
            AdminClient.connect(path)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208
