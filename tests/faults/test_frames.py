"""What a client may not say: it ends that client, is counted, and touches no other."""

import itertools
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millpond.model.errors import HandshakeRefused
from millpond.model.limits import (
    BLOCKS_SHOWN_MAX,
    FRAME_BYTES_MAX,
    LEASES_PER_SESSION_MAX,
    NAME_LENGTH_MAX,
    OUTPUT_BYTES_MAX,
    RANKS_MAX,
    REPLICAS_SHOWN_MAX,
    STRING_LENGTH_MAX,
)
from millpond.model.names import Coverage
from millpond.model.namespace import PartSpec
from millpond.service import protocol
from millpond.service.client import SchedulerClient
from millpond.service.protocol import Hello, frame
from tests.faults.raw import RawClient, scheduler_hello
from tests.faults.world import (
    KEY_BYTES,
    ROOT,
    SIZE_BYTES,
    ClientProcess,
    Daemon,
    eventually,
    identity,
    keys,
    namespace,
    short_folder,
)

Maker = Callable[[], ClientProcess]
ADMIN = Hello(role="admin")
LOOKUP = protocol.Lookup(id=1, keys=keys("p", 2), key_bytes=KEY_BYTES)


@contextmanager
def bystander(daemon: Daemon) -> Iterator[None]:
    """An engine that must be served before and after."""
    with RawClient(daemon.socket_path) as engine:
        engine.greet(scheduler_hello(replica="bystander", session_key="by"))
        yield
        engine.send(LOOKUP)
        assert isinstance(engine.reply(), protocol.LookupReply)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for all: it must stand what every one of these tests does."""
    with short_folder() as folder, Daemon(f"{folder}/pool.sock") as started:
        yield started.wait_ready()
        started.settle()
        started.stop()


@contextmanager
def counted(daemon: Daemon, name: str, expected: int) -> Iterator[None]:
    """Check that the daemon counts ``expected`` more of something."""
    before = daemon.status()["service"][name]
    yield
    assert daemon.status()["service"][name] == before + expected


BAD_BYTES = {
    "garbage": b"GET / HTTP/1.1\r\nHost: millpond\r\n\r\n",
    "oversized": struct.pack("<I", FRAME_BYTES_MAX + 1),
    "empty frame": frame(b""),
    "no map": frame(b"\x01"),
    "unknown type": frame(msgspec.msgpack.encode({"type": "please"})),
    "trailing bytes": frame(msgspec.msgpack.encode(protocol.Status(id=1)) + b"\0"),
    "missing fields": frame(msgspec.msgpack.encode({"type": "lookup", "id": 1})),
    "reply as request": frame(msgspec.msgpack.encode(protocol.Done(id=1))),
    "nested deeply": frame(b"\x82\xa2id" + b"\x91" * 100_000 + b"\x01\xa4type\xa6status"),
    "nested deeply in a hello": frame(
        b"\x83\xa4type\xa5hello\xb0protocol_version\x01\xa1x" + b"\x91" * 100_000 + b"\x01"
    ),
}


@pytest.mark.parametrize("data", BAD_BYTES.values(), ids=BAD_BYTES)
@pytest.mark.parametrize("greeted", [False, True], ids=["first", "greeted"])
def test_bad_bytes_end_only_their_sender(daemon: Daemon, data: bytes, greeted: bool) -> None:
    with (
        bystander(daemon),
        counted(daemon, "bad_frames", 1),
        RawClient(daemon.socket_path) as raw,
    ):
        if greeted:
            assert isinstance(raw.greet(scheduler_hello()), protocol.Welcome)
        raw.socket.sendall(data)
        assert raw.is_hung_up()


def test_truncated_frame_ends_with_its_sender(daemon: Daemon) -> None:
    with bystander(daemon), counted(daemon, "bad_frames", 0):
        with RawClient(daemon.socket_path) as raw:
            raw.greet(scheduler_hello())
            raw.socket.sendall(frame(msgspec.msgpack.encode(LOOKUP))[:-5])
        assert len(daemon.status()["service"]["clients"]) == 2  # the bystander and we


def test_frames_may_come_in_pieces_and_in_bulk(daemon: Daemon) -> None:
    with RawClient(daemon.socket_path) as raw:
        raw.greet(scheduler_hello())
        data = frame(msgspec.msgpack.encode(LOOKUP))
        for i in range(len(data)):
            raw.socket.sendall(data[i : i + 1])
        assert raw.reply() == protocol.LookupReply(id=1, num_blocks=0, outcome="miss")
        raw.socket.sendall(data * 500)
        assert {raw.reply() for _ in range(500)} == {
            protocol.LookupReply(id=1, num_blocks=0, outcome="miss")
        }


OUT_OF_ORDER = {
    "request before the hello": (None, LOOKUP),
    "second hello": (scheduler_hello(), scheduler_hello()),
    "admin looks up": (ADMIN, LOOKUP),
    "admin reports": (ADMIN, protocol.Finish(leases=(1,), ok=True)),
    "scheduler speaks for a rank": (
        scheduler_hello(),
        protocol.Finish(leases=(1,), ok=True, rank=0),
    ),
    "more leases than can be": (
        scheduler_hello(),
        protocol.Finish(leases=tuple(range(LEASES_PER_SESSION_MAX + 1)), ok=True),
    ),
}


@pytest.mark.parametrize(("hello", "message"), OUT_OF_ORDER.values(), ids=OUT_OF_ORDER)
def test_out_of_order_messages_hang_up(
    daemon: Daemon, hello: Hello | None, message: msgspec.Struct
) -> None:
    with (
        bystander(daemon),
        counted(daemon, "bad_frames", 1),
        RawClient(daemon.socket_path) as raw,
    ):
        if hello is not None:
            assert isinstance(raw.greet(hello), protocol.Welcome)
        raw.send(message)
        assert raw.is_hung_up()


def test_worker_may_not_ask_nor_speak_for_others(daemon: Daemon) -> None:
    for message in (
        LOOKUP,
        protocol.Finish(leases=(1,), ok=True),
        protocol.Finish(leases=(1,), ok=True, rank=1),
    ):
        with RawClient(daemon.socket_path) as scheduler, RawClient(daemon.socket_path) as worker:
            scheduler.greet(scheduler_hello(num_ranks=2))
            joined = worker.greet(scheduler_hello(role="worker", rank=0, num_ranks=2))
            assert isinstance(joined, protocol.Welcome)
            worker.send(message)
            assert worker.is_hung_up()
            assert scheduler.is_hung_up()  # the session has ended


WRONG_REQUESTS = {
    "keys of no length": protocol.Lookup(id=5, keys=b"", key_bytes=0),
    "keys cut off": protocol.Lookup(id=5, keys=b"k" * 33, key_bytes=32),
    "key length": protocol.Lookup(id=5, keys=b"k" * 24, key_bytes=24),
    "too many keys": protocol.Lookup(id=5, keys=bytes(16 * 65_537), key_bytes=16),
    "block before the first": protocol.Pin(
        id=5, keys=keys("p", 2), key_bytes=KEY_BYTES, first_block=-1
    ),
    "half a block number": protocol.Reserve(
        id=5, keys=keys("p", 2), key_bytes=KEY_BYTES, first_block=0, parts=(b"1234567",)
    ),
    "block out of range": protocol.Reserve(
        id=5, keys=keys("p", 2), key_bytes=KEY_BYTES, first_block=0, parts=(b"\xff" * 8,)
    ),
    "a part too many": protocol.Reserve(
        id=5, keys=keys("p", 2), key_bytes=KEY_BYTES, first_block=0, parts=(b"", b"")
    ),
}


@pytest.mark.parametrize("request_", WRONG_REQUESTS.values(), ids=WRONG_REQUESTS)
def test_wrong_values_fail_and_the_connection_stays(
    daemon: Daemon, request_: msgspec.Struct
) -> None:
    with RawClient(daemon.socket_path) as raw, RawClient(daemon.socket_path) as worker:
        raw.greet(scheduler_hello())
        worker.greet(scheduler_hello(role="worker"))
        raw.send(request_)
        failed = raw.reply()
        assert isinstance(failed, protocol.Failed)
        assert (failed.id, failed.code) == (5, "invalid")
        raw.send(LOOKUP)
        assert isinstance(raw.reply(), protocol.LookupReply)


def test_an_operators_wrong_values_fail_too(daemon: Daemon) -> None:
    with daemon.admin() as admin:
        for num_max in (0, -1, BLOCKS_SHOWN_MAX + 1):
            with pytest.raises(ValueError, match=str(num_max)):
                admin.blocks(num_max)
        assert admin.blocks(BLOCKS_SHOWN_MAX) == ()
        assert admin.latest_requests(-5) == ()


def test_a_reply_that_no_frame_carries_is_refused_beforehand(daemon: Daemon) -> None:
    parts = tuple(PartSpec(f"p{i}", Coverage.EVERY, 4096) for i in range(8))
    with RawClient(daemon.socket_path) as raw:
        raw.greet(scheduler_hello(namespace=namespace(parts=parts)))
        for num_keys, reply_type in ((60_000, protocol.Failed), (30_000, protocol.Pinned)):
            raw.send(protocol.Pin(id=1, keys=bytes(16 * num_keys), key_bytes=16, first_block=0))
            assert isinstance(raw.reply(), reply_type)


def test_engines_may_not_switch_the_pool(daemon: Daemon) -> None:
    with RawClient(daemon.socket_path) as raw:
        raw.greet(scheduler_hello())
        for message in (
            protocol.Switch(id=1, enabled=False),
            protocol.Flush(id=1),
            protocol.Requests(id=1, last=1),
            protocol.Check(id=1),
        ):
            raw.send(message)
            assert raw.reply().code == "role"
        raw.send(protocol.Status(id=2))
        assert raw.reply().statistics["pool"]["enabled"] is True


def test_reports_cannot_spoil_the_totals(daemon: Daemon) -> None:
    """Numbers that add up, but to more than a frame can carry."""
    tokens = 2**63
    report = protocol.Report(
        request_id="r",
        prompt_tokens=tokens,
        computed_tokens=0,
        local_tokens=0,
        loaded_tokens=tokens,
        writers={"w": tokens},
    )
    with counted(daemon, "bad_reports", 2), RawClient(daemon.socket_path) as raw:
        raw.greet(scheduler_hello())
        raw.send(report)
        raw.send(report)
        raw.send(protocol.Status(id=1))
        assert isinstance(raw.reply(), protocol.StatusReply)


def test_a_status_has_room_for_many_names(socket_path: str) -> None:
    """Names of all lengths, each of which has read from all others, as far as is known."""
    with Daemon(socket_path) as daemon:
        daemon.wait_ready()
        names = [chr(0x4E00 + number) * NAME_LENGTH_MAX for number in range(200)]
        for number, name in enumerate(names):
            writers = dict.fromkeys(names, 1)
            report = protocol.Report(
                request_id="r",
                prompt_tokens=len(writers),
                computed_tokens=0,
                local_tokens=0,
                loaded_tokens=len(writers),
                writers=writers,
            )
            with RawClient(socket_path) as raw:
                raw.greet(scheduler_hello(replica=name, session_key=f"{number}"))
                raw.send(report)
        status = daemon.status()
        assert list(status["pool"]["replicas"]) == names[-REPLICAS_SHOWN_MAX:]
        assert status["pool"]["num_replicas"] == len(names)
        assert list(status["tokens"]) == names[-REPLICAS_SHOWN_MAX:]
        assert len(status["tokens"][names[-1]]["loaded_tokens_by_writer"]) == REPLICAS_SHOWN_MAX


def test_what_a_client_said_fits_into_a_line_of_the_log(daemon: Daemon) -> None:
    start = len(daemon.errors())
    with RawClient(daemon.socket_path) as raw:
        raw.send({"type": "forged\nline " + "x" * 100_000})
        assert raw.is_hung_up()
    with RawClient(daemon.socket_path) as raw:
        raw.greet(scheduler_hello(role="forged\nline " + "x" * 100_000))
    lines = daemon.errors()[start:].splitlines()
    assert any("forged" in line for line in lines)
    assert not any(line.startswith("line") for line in lines)
    assert max(map(len, lines)) < 2048


HUGE = PartSpec("huge", Coverage.EVERY, SIZE_BYTES * 2)
LOPSIDED = PartSpec("odd", Coverage.EVERY, 4097)
LONG_NAMED = PartSpec("p" * (STRING_LENGTH_MAX + 1), Coverage.EVERY, 4096)
REFUSALS = {
    "no replica": ({"replica": ""}, "invalid", "replica"),
    "long replica": ({"replica": "r" * 129}, "invalid", "replica"),
    "control characters": ({"replica": "a\nb"}, "invalid", "replica"),
    "no key": ({"session_key": ""}, "invalid", "session_key"),
    "rank": ({"rank": 1}, "invalid", "rank"),
    "negative rank": ({"rank": -1}, "invalid", "rank"),
    "ranks": ({"num_ranks": RANKS_MAX + 1}, "invalid", "parts"),
    "no namespace": ({"namespace": None}, "invalid", "namespace"),
    "long field": (
        {"namespace": namespace(model="m" * (STRING_LENGTH_MAX + 1))},
        "invalid",
        "model",
    ),
    "no parts": ({"namespace": namespace(parts=())}, "invalid", "parts"),
    "lopsided": ({"namespace": namespace(parts=(LOPSIDED,)), "num_ranks": 2}, "invalid", "parts"),
    "slot too large": ({"namespace": namespace(parts=(HUGE,))}, "too-large", "parts"),
    "long name of a part": (
        {"namespace": namespace(parts=(LONG_NAMED,))},
        "invalid",
        "parts",
    ),
    "role": ({"role": "spectator"}, "invalid", "role"),
    "long role": ({"role": "\0" * (FRAME_BYTES_MAX - 4096)}, "invalid", "role"),
    "version": ({"protocol_version": 999}, "version", "protocol_version"),
    "worker first": ({"role": "worker"}, "no-session", "session_key"),
    "drained": ({"role": "worker", "drained": tuple(range(1025))}, "invalid", "drained"),
}


@pytest.mark.parametrize(("changes", "code", "field"), REFUSALS.values(), ids=REFUSALS)
def test_handshake_refused_by_name(
    daemon: Daemon, changes: dict[str, object], code: str, field: str
) -> None:
    with counted(daemon, "refused", 1), RawClient(daemon.socket_path) as raw:
        refused = raw.greet(scheduler_hello(**changes))
        assert isinstance(refused, protocol.Refused)
        assert (refused.code, refused.field) == (code, field)
        assert raw.is_hung_up()


def test_a_hello_of_another_version_may_have_other_fields(daemon: Daemon) -> None:
    with RawClient(daemon.socket_path) as raw:
        raw.send({"type": "hello", "protocol_version": 2, "shape": ["of", "the", "future"]})
        refused = raw.reply()
        assert isinstance(refused, protocol.Refused)
        assert (refused.code, refused.field) == ("version", "protocol_version")
        assert "2" in refused.message


JOIN_REFUSALS = {
    "other replica": ({"replica": "other"}, "invalid", "replica"),
    "other ranks": ({"num_ranks": 3}, "invalid", "num_ranks"),
    "other dtype": ({"namespace": namespace(dtype="float16")}, "invalid", "dtype"),
    "long dtype": (
        {"namespace": namespace(dtype="f" * (FRAME_BYTES_MAX // 2))},
        "invalid",
        "dtype",
    ),
    "rank taken": ({"rank": 0}, "taken", "rank"),
    "other session": ({"session_key": "raw-2"}, "no-session", "session_key"),
}


@pytest.mark.parametrize(("changes", "code", "field"), JOIN_REFUSALS.values(), ids=JOIN_REFUSALS)
def test_worker_refused_by_name(
    daemon: Daemon, changes: dict[str, object], code: str, field: str
) -> None:
    worker_hello = {"role": "worker", "rank": 1, "num_ranks": 2}
    with (
        RawClient(daemon.socket_path) as scheduler,
        RawClient(daemon.socket_path) as first,
        RawClient(daemon.socket_path) as second,
    ):
        scheduler.greet(scheduler_hello(num_ranks=2))
        first.greet(scheduler_hello(**(worker_hello | {"rank": 0})))
        refused = second.greet(scheduler_hello(**(worker_hello | changes)))
        assert (refused.code, refused.field) == (code, field)
        with RawClient(daemon.socket_path) as proper:
            assert isinstance(proper.greet(scheduler_hello(**worker_hello)), protocol.Welcome)


def test_welcome_names_what_differs(daemon: Daemon) -> None:
    def engine(replica: str, **changes: object) -> SchedulerClient:
        return SchedulerClient.connect(daemon.socket_path, identity(replica, replica, **changes))

    with (
        engine("a") as first,
        engine("same") as same,
        engine("half", dtype="float16", engine_block_tokens=32) as half,
        engine("stranger", model="other") as stranger,
    ):
        assert first.welcome.differences == same.welcome.differences == {}
        assert stranger.welcome.differences == {}
        assert set(half.welcome.differences) == {"a", "same"}
        found = [(d.field, d.mine, d.theirs) for d in half.welcome.differences["a"]]
        assert found == [("dtype", "float16", "bfloat16"), ("engine_block_tokens", "32", "16")]


def test_a_welcome_has_room_for_many_differences(daemon: Daemon) -> None:
    def engine(number: int) -> RawClient:
        text = chr(0x10000 + number) * STRING_LENGTH_MAX
        fields = ("revision", "weights", "dtype", "layout", "engine", "hash_seed", "engine_version")
        changes = dict.fromkeys(fields, text)
        raw = stack.enter_context(RawClient(daemon.socket_path))
        welcome = raw.greet(
            scheduler_hello(
                replica=f"r{number}", session_key=f"{number}", namespace=namespace(**changes)
            )
        )
        assert len(welcome.differences) == min(number, 32)
        return raw

    with ExitStack() as stack:
        for number in range(40):
            engine(number)


def wrong_descriptors() -> dict[str, list[int]]:
    return {
        "none": [],
        "of another process": [os.pidfd_open(os.getppid())],
        "no pidfd": [os.memfd_create("x")],
        "two": [os.pidfd_open(os.getpid()), os.pidfd_open(os.getpid())],
    }


def close_all(descriptors: dict[str, list[int]]) -> None:
    for fd in itertools.chain.from_iterable(descriptors.values()):
        os.close(fd)


@pytest.mark.parametrize("kind", ["none", "of another process", "no pidfd", "two"])
def test_a_pidfd_that_is_not_the_senders_is_refused(daemon: Daemon, kind: str) -> None:
    everything = wrong_descriptors()
    with bystander(daemon), RawClient(daemon.socket_path) as raw:
        raw.send_with(scheduler_hello(), everything[kind])
        reply = raw.reply()
        if kind == "two":  # more than a handshake has: not even read
            assert reply is None
        else:
            assert (reply.code, reply.field) == ("invalid", "pidfd")
    close_all(everything)


def test_refused_clients_leave_no_descriptor(daemon: Daemon) -> None:
    def num_open() -> int:
        return len(os.listdir(f"/proc/{daemon.pid}/fd"))  # noqa: PTH208

    with daemon.admin() as admin:
        admin.status()
        before = num_open()
        for kind in wrong_descriptors() | {"fine": []}:
            everything = wrong_descriptors()
            with RawClient(daemon.socket_path) as raw:
                raw.send_with(scheduler_hello(), everything.get(kind, everything["none"]))
                raw.reply()
            close_all(everything)
            with RawClient(daemon.socket_path) as raw:
                raw.greet(scheduler_hello(rank=7))
            with RawClient(daemon.socket_path) as raw:
                raw.greet(scheduler_hello())
        eventually(lambda: len(admin.status()["service"]["clients"]) == 1, "all are gone")  # type: ignore[call-overload,index,arg-type]
        # What remains are schedulers' sessions without workers: nothing to wait for.
        assert num_open() == before


def test_no_hello_in_time(socket_path: str) -> None:
    with Daemon(socket_path, handshake_s=0.3) as daemon:
        daemon.wait_ready()
        with bystander(daemon), RawClient(socket_path) as silent, RawClient(socket_path) as slow:
            slow.socket.sendall(frame(msgspec.msgpack.encode(scheduler_hello()))[:50])
            assert silent.is_hung_up()
            assert slow.is_hung_up()


def test_a_reader_that_does_not_read_is_dropped(daemon: Daemon) -> None:
    with (
        bystander(daemon),
        counted(daemon, "slow_peers_dropped", 1),
        RawClient(daemon.socket_path) as raw,
    ):
        raw.greet(ADMIN)
        request = frame(msgspec.msgpack.encode(protocol.Status(id=1)))
        # Each reply is larger than its request.
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            raw.socket.sendall(request * (OUTPUT_BYTES_MAX // len(request)))


def test_another_user_is_refused(daemon: Daemon) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    path = daemon.socket_path
    os.chmod(os.path.dirname(path), 0o755)  # noqa: PTH101, PTH120
    os.chmod(path, 0o666)  # noqa: PTH101
    script = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); "
        "s.settimeout(5); s.connect(sys.argv[1]); sys.stdout.buffer.write(s.recv(4096)[4:])"
    )
    said = subprocess.run(
        [sys.executable, "-c", script, path],
        cwd=ROOT,
        capture_output=True,
        check=True,
        timeout=10,
    ).stdout
    refused = msgspec.msgpack.decode(said, type=protocol.Refused)
    assert (refused.code, refused.field) == ("invalid", "uid")


def test_a_daemon_of_another_user_is_refused(
    socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(socket_path)
        listener.listen()
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(HandshakeRefused, match="uid") as caught:
            SchedulerClient.connect(socket_path, identity("a", "k"))
        assert caught.value.field == "uid"


MESSAGES = [
    scheduler_hello(),
    LOOKUP,
    protocol.Pin(id=2, keys=keys("p", 2), key_bytes=KEY_BYTES, first_block=0),
    protocol.Reserve(id=3, keys=keys("p", 2), key_bytes=KEY_BYTES, first_block=0, parts=(b"",)),
    protocol.Finish(leases=(1,), ok=True),
    protocol.Status(id=4),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    greeted=st.booleans(),
    message=st.sampled_from(MESSAGES),
    num_flips=st.integers(1, 6),
)
def test_flipped_bytes_never_end_the_daemon(
    daemon: Daemon,
    data: st.DataObject,
    greeted: bool,
    message: msgspec.Struct,
    num_flips: int,
) -> None:
    encoded = bytearray(frame(msgspec.msgpack.encode(message)))
    for _ in range(num_flips):
        place = data.draw(st.integers(0, len(encoded) - 1))
        encoded[place] ^= data.draw(st.integers(1, 255))
    with RawClient(daemon.socket_path) as raw:
        if greeted:
            raw.greet(scheduler_hello())
        raw.socket.sendall(encoded)
        raw.socket.shutdown(socket.SHUT_WR)
        while raw.reply() is not None:
            pass
    daemon.check()
