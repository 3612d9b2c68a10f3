"""Clients that ask for too much at once, or do not read: others are served in between."""

import signal
import socket

import msgspec

from millpond.model.limits import OUTPUT_BYTES_MAX
from millpond.service import protocol
from millpond.service.protocol import Hello, frame
from tests.faults.engine import PLAIN, Engine
from tests.faults.raw import RawClient, scheduler_hello
from tests.faults.world import KEY_BYTES, NUM_SLOTS, Daemon, eventually, keys

ADMIN = Hello(role="admin")
FLUSH = frame(msgspec.msgpack.encode(protocol.Flush(id=1)))


def test_a_flood_of_requests_delays_nobody_for_long(daemon: Daemon) -> None:
    with RawClient(daemon.socket_path) as greedy, RawClient(daemon.socket_path) as modest:
        greedy.greet(ADMIN)
        modest.greet(ADMIN)
        daemon.signal(signal.SIGSTOP)
        greedy.socket.setblocking(False)
        num_bytes = greedy.socket.send(FLUSH * (1 << 20))  # as much as the kernel takes
        modest.send(protocol.Status(id=1))
        before = daemon_frames_after_thaw(daemon, modest)
        num_flushes = num_bytes // len(FLUSH)
        assert num_flushes > 5_000
        assert before < num_flushes / 2
        greedy.socket.setblocking(True)
        greedy.socket.sendall(FLUSH[num_bytes % len(FLUSH) :])
        for _ in range(num_flushes):
            assert greedy.reply() == protocol.Done(id=1)


def daemon_frames_after_thaw(daemon: Daemon, modest: RawClient) -> int:
    """Return how many frames were answered before the one that waits."""
    daemon.signal(signal.SIGCONT)
    return modest.reply().statistics["service"]["frames"]


def test_an_engine_that_does_not_read_loses_its_session_and_no_slot(daemon: Daemon) -> None:
    with Engine(daemon.socket_path, "bystander") as bystander, RawClient(daemon.socket_path) as raw:
        bystander.store("kept", 8)
        shared = PLAIN.identity("raw", "raw-1").namespace
        session = raw.greet(scheduler_hello(namespace=shared)).session
        with RawClient(daemon.socket_path) as worker:
            worker.greet(scheduler_hello(role="worker", namespace=None))
            raw.send(reserve("unfinished", 5))
            assert raw.reply().lease is not None
            raw.send(protocol.Pin(id=2, keys=keys("kept", 8), key_bytes=KEY_BYTES, first_block=0))
            assert raw.reply().num_blocks == 8
            stop_reading(raw)
            assert worker.is_hung_up()
        bystander.verify("kept", 8)
        eventually(lambda: daemon.footprint()["quarantined"] == 5, "the session has ended")
        assert daemon.status()["service"]["slow_peers_dropped"] == 1
        # The process lives and may still copy: nobody gets what it was given.
        taken = bystander.reserve("more", NUM_SLOTS)
        assert taken.lease_id is not None
        assert len(taken.offsets[0]) == NUM_SLOTS - 5 - 8
        bystander.finish(taken.lease_id, ok=False)
        with RawClient(daemon.socket_path) as again, RawClient(daemon.socket_path) as drained:
            again.greet(scheduler_hello())
            drained.greet(scheduler_hello(role="worker", drained=(session,)))
            eventually(lambda: daemon.footprint()["quarantined"] == 0, "the slots are free")


def reserve(prefix: str, num_blocks: int) -> protocol.Reserve:
    return protocol.Reserve(
        id=1, keys=keys(prefix, num_blocks), key_bytes=KEY_BYTES, first_block=0, parts=(b"",)
    )


def stop_reading(raw: RawClient) -> None:
    """Ask on and on for a reply larger than the question, until the daemon hangs up."""
    request = frame(msgspec.msgpack.encode(protocol.Status(id=1)))
    try:
        raw.socket.sendall(request * (OUTPUT_BYTES_MAX // len(request)))
    except (BrokenPipeError, ConnectionResetError):
        return
    raise AssertionError("the daemon keeps everything")


def test_a_silent_reader_of_one_large_reply_is_left_alone(daemon: Daemon) -> None:
    """What fits into the limit waits, however long nobody reads it."""
    with Engine(daemon.socket_path, "writer") as writer, RawClient(daemon.socket_path) as raw:
        writer.store("kept", NUM_SLOTS)
        raw.greet(ADMIN)
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for number in range(20):
            raw.send(protocol.Blocks(id=number, num_max=NUM_SLOTS))
        writer.verify("kept", NUM_SLOTS)
        for number in range(20):
            reply = raw.reply()
            assert (reply.id, len(reply.blocks)) == (number, NUM_SLOTS)
