"""A fuzzer against a real daemon, with a witness that must be served all along.

    python -m tests.faults.fuzz [--frames 1000000] [--seed N]

Connections of all roles send valid frames, damaged ones and garbage, and come back when the
daemon hangs up. In the same pool an engine stores, loads and verifies its own bytes, among them
a prefix that it holds from first to last; the pool checks its invariants; and the daemon must
neither log an error nor be late. Counts only what the daemon has cut out as frames. All
chance follows from the seed; what the daemon does with it also from how the kernel cuts streams.
"""

import argparse
import contextlib
import json
import os
import random
import secrets
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from millpond.service import client as client_module
from millpond.service import protocol
from millpond.service.framing import FrameDecoder
from millpond.service.protocol import frame
from tests.faults.engine import PLAIN, Engine, pieces_to_read, pieces_to_write
from tests.faults.mutations import Frames
from tests.faults.world import WAIT_S, Daemon, short_folder

_UNANSWERED: Final = (protocol.Finish, protocol.Report, protocol.Link)
NUM_ENGINES: Final = 12
NUM_STRANGERS: Final = 3
NUM_ADMINS: Final = 2
WAITING_MAX: Final = 8
"""Replies that one connection waits for before it sends more."""
FRAMES_PER_ROUND: Final = 2000
PROGRESS_FRAMES: Final = 100_000
DAMAGED_RATIO: Final = 0.3
"""Of what is sent in one go, so much ends with a damaged frame."""
SEND_MAX: Final = 5
"""Frames in one go; the last may be a bad one, after which the daemon looks at none."""
_REPLIES: Final = msgspec.msgpack.Decoder(protocol.Reply)


@dataclass
class Line:
    """One connection of the fuzzer's and what is known of it."""

    role: str
    replica: str = ""
    end: socket.socket | None = None
    decoder: FrameDecoder = field(default_factory=FrameDecoder)
    expected: list[int] = field(default_factory=list)
    """Ids of the replies to come, as long as nothing but valid frames was sent."""
    is_sound: bool = True
    is_welcome: bool = False
    is_shut: bool = False
    """Whether we have said that no more will come: the daemon hangs up when it has read all."""

    def is_open(self) -> bool:
        """Return whether more may be sent now."""
        return self.is_welcome and not self.is_shut and len(self.expected) <= WAITING_MAX

    def shut(self) -> None:
        """Send no more."""
        if self.end is not None and not self.is_shut:
            self.is_shut = True
            with contextlib.suppress(OSError):
                self.end.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Hang up."""
        if self.end is not None:
            self.end.close()
        self.end = None


@dataclass
class Fuzzed:
    """An engine of the fuzzer's: a scheduler's and a worker's line, which end together."""

    scheduler: Line
    worker: Line
    leases: list[int] = field(default_factory=list)
    session: int | None = None
    ended: list[int] = field(default_factory=list)
    """Sessions that no welcome has taken note of yet."""
    num_starts: int = 0

    @property
    def lines(self) -> tuple[Line, Line]:
        """Both connections, in the order in which they are made."""
        return self.scheduler, self.worker


class Fuzzer:
    """The fuzzer's side of all connections; ``counts`` says what it got for answers.

    It has many connections and waits only when nothing can be sent on any, so that the daemon
    always has something to do.
    """

    def __init__(self, path: str, seed: int) -> None:
        self._path = path
        self._rng = random.Random(seed)
        self._frames = Frames(self._rng)
        self._engines = [
            Fuzzed(Line("scheduler", f"f{i}"), Line("worker", f"f{i}")) for i in range(NUM_ENGINES)
        ]
        self._admins = [Line("admin") for _ in range(NUM_ADMINS)]
        self._strangers = [Line("stranger") for _ in range(NUM_STRANGERS)]
        self._pidfd = os.pidfd_open(os.getpid())
        self._number = 0
        self.counts: Counter[str] = Counter()

    def close(self) -> None:
        """Hang up everywhere, and say of every session that it has drained."""
        deadline = time.monotonic() + WAIT_S
        for engine in self._engines:
            self._end(engine)
            while engine.ended:
                assert time.monotonic() < deadline, f"sessions {engine.ended} are not forgotten"
                if engine.worker.end is None:
                    self._start(engine)
                self._attend(engine, timeout_s=0.1)
            self._end(engine)
        for line in self._lines():
            line.close()
        os.close(self._pidfd)

    def step(self) -> None:
        """Take in what has come and send what can be sent, on each connection."""
        was_sent = False
        for stranger in self._strangers:
            self._take_in(stranger, None)
            if stranger.end is None:
                self._send_as_stranger(stranger)
                was_sent = True
        for admin in self._admins:
            self._take_in(admin, None)
            if admin.end is None:
                self._open(admin, self._frames.hello("admin", "", "", ()))
            elif admin.is_open():
                self._send(admin, None, ())
                was_sent = True
        for engine in self._engines:
            was_sent = self._step_of(engine) or was_sent
        if not was_sent:
            ends = [line.end for line in self._lines() if line.end is not None]
            select.select(ends, [], [], 0.1)

    def _step_of(self, engine: Fuzzed) -> bool:
        self._attend(engine)
        if engine.worker.end is None:
            self._start(engine)
        elif engine.worker.is_open() and engine.leases and self._rng.random() < 0.6:
            self._send(engine.worker, engine, self._some_leases(engine))
        elif engine.worker.is_welcome and engine.scheduler.is_open():
            self._send(engine.scheduler, engine, ())
        else:
            return False
        return True

    def _lines(self) -> Iterator[Line]:
        yield from self._strangers
        yield from self._admins
        for engine in self._engines:
            yield from engine.lines

    # ------------------------------------------------------------ connections

    def _start(self, engine: Fuzzed) -> None:
        engine.num_starts += 1
        key = f"{engine.scheduler.replica}-{engine.num_starts}"
        for line in engine.lines:
            hello = self._frames.hello(line.role, line.replica, key, engine.ended[-1000:])
            self._open(line, hello)

    def _end(self, engine: Fuzzed) -> None:
        for line in engine.lines:
            line.close()
        engine.leases.clear()
        if engine.session is not None:
            engine.ended.append(engine.session)
            engine.session = None

    def _open(self, line: Line, hello: protocol.Hello) -> None:
        """Connect and send a hello; the answer comes when it comes."""
        self._connect(line, frame(msgspec.msgpack.encode(hello)))
        self.counts["valid"] += 1

    def _connect(self, line: Line, first: bytes) -> None:
        line.close()
        line.decoder = FrameDecoder()
        line.expected.clear()
        line.is_sound, line.is_welcome, line.is_shut = True, False, False
        line.end = socket.socket(socket.AF_UNIX)
        line.end.settimeout(WAIT_S)
        line.end.connect(self._path)
        line.end.setblocking(False)
        socket.send_fds(line.end, [first], [self._pidfd])

    def _send_as_stranger(self, line: Line) -> None:
        """Send a first frame that is no hello, or not quite."""
        role = self._rng.choice(("scheduler", "worker", "admin"))
        hello = self._frames.hello(role, "stranger", f"{self._number}", (1, 2))
        is_other = self._rng.random() < 0.2
        message = self._frames.request("scheduler", 1, ()) if is_other else hello
        self._connect(line, self._frames.damaged(message))
        line.is_sound = False
        line.shut()
        self.counts["damaged"] += 1

    def _attend(self, engine: Fuzzed, timeout_s: float = 0.0) -> None:
        """Take in what has come for an engine, waiting for something at most so long."""
        ends = [line.end for line in engine.lines if line.end is not None]
        if timeout_s:
            select.select(ends, [], [], timeout_s)
        for line in engine.lines:
            self._take_in(line, engine)
        if any(line.end is None for line in engine.lines):
            self._end(engine)

    # ------------------------------------------------------------ traffic

    def _some_leases(self, engine: Fuzzed) -> list[int]:
        self._rng.shuffle(engine.leases)
        num_leases = self._rng.randint(1, len(engine.leases))
        chosen = engine.leases[:num_leases]
        del engine.leases[:num_leases]
        return chosen

    def _send(self, line: Line, engine: Fuzzed | None, leases: Sequence[int]) -> None:
        """Send some valid frames and perhaps a damaged one, which is the last."""
        data = bytearray()
        for _ in range(self._rng.randint(0, SEND_MAX - 1) if not leases else 1):
            data += self._valid(line, leases)
        is_damaged = self._rng.random() < DAMAGED_RATIO
        if is_damaged:
            self._number += 1
            message = self._frames.request(line.role, self._number, leases or (1, 2**40))
            data += self._frames.damaged(message)
            line.is_sound = False
            self.counts["damaged"] += 1
        self._push(line, engine, bytes(data))
        # It may have been harmless: now and then, go on after it.
        if is_damaged and self._rng.random() < 0.7:
            line.shut()

    def _valid(self, line: Line, leases: Sequence[int]) -> bytes:
        self._number += 1
        message = self._frames.request(line.role, self._number, leases)
        if line.is_sound and not isinstance(message, _UNANSWERED):
            line.expected.append(self._number)
        self.counts["valid"] += 1
        return frame(msgspec.msgpack.encode(message))

    def _push(self, line: Line, engine: Fuzzed | None, data: bytes) -> None:
        """Send all of ``data``, reading meanwhile; the wait is bounded."""
        deadline = time.monotonic() + WAIT_S
        while data and line.end is not None:
            try:
                data = data[line.end.send(data) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise AssertionError(f"the daemon does not read {line}") from None
                self._take_in(line, engine)
                if line.end is not None:
                    select.select([line.end], [line.end], [], 0.1)
            except (BrokenPipeError, ConnectionResetError):
                self.counts["hung up"] += 1
                line.close()

    def _take_in(self, line: Line, engine: Fuzzed | None) -> None:
        """Read what has come; each reply must make sense."""
        try:
            while line.end is not None:
                data, fds, _, _ = socket.recv_fds(line.end, 1 << 18, 1)
                for fd in fds:
                    os.close(fd)
                if not data:
                    self.counts["hung up"] += 1
                    lines = [line] if engine is None else engine.lines
                    assert not all(each.is_sound for each in lines), f"hung up on {line}"
                    line.close()
                    return
                for encoded in line.decoder.feed(data):
                    self._note(line, engine, _REPLIES.decode(encoded))
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.counts["hung up"] += 1
            line.close()

    def _note(self, line: Line, engine: Fuzzed | None, reply: Any) -> None:  # noqa: ANN401
        name = type(reply).__name__
        if isinstance(reply, protocol.Welcome):
            line.is_welcome = True
            if engine is not None:
                engine.session = reply.session
                if line is engine.worker:
                    engine.ended.clear()
        elif isinstance(reply, protocol.Refused):
            name = f"Refused {reply.code}"
            # Our last connection's end, or our scheduler, may not have been seen yet.
            assert not line.is_sound or reply.code in {"taken", "no-session"}, reply
            line.is_sound = False
        elif line.is_sound or line.expected:
            assert line.expected, f"a {name} that nobody asked for: {line}"
            assert reply.id == line.expected.pop(0), f"a {name} out of turn: {line}"
        if isinstance(reply, protocol.Failed):
            name = f"Failed {reply.code}"
            assert reply.code != "broken", reply.message
        if isinstance(reply, protocol.Pinned | protocol.Reserved):
            name = f"{name} {reply.reason or 'granted'}"
            if reply.lease is not None and engine is not None:
                engine.leases.append(reply.lease)
        self.counts[name] += 1


class Witness:
    """An engine that minds its own business and must not notice anything."""

    def __init__(self, daemon: Daemon, seed: int) -> None:
        self._daemon = daemon
        self._rng = random.Random(seed)
        self._engine = Engine(daemon.socket_path, "witness", PLAIN)
        self._admin = daemon.admin()
        self._engine.store("kept", 8)
        self._kept = self._engine.pin("kept", 8)
        assert self._kept.lease_id is not None
        self._held = list(pieces_to_read(PLAIN, self._kept, "kept"))
        assert len(self._held) == 8
        self._num_rounds = 0
        self.counts: Counter[str] = Counter()
        self.slowest_s = 0.0

    def close(self) -> None:
        """Leave."""
        if self._kept.lease_id is not None:
            self._engine.finish(self._kept.lease_id)
        self._engine.__exit__()
        self._admin.close()

    def round(self) -> int:
        """Work and check; return how many frames the daemon has seen."""
        started = time.monotonic()
        assert all(self._engine.holds(piece) for piece in self._held), "bytes under lease changed"
        self._store(f"w-{self._rng.randrange(12)}", self._rng.randint(1, 10))
        self._load(f"w-{self._rng.randrange(12)}", 10)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        self._num_rounds += 1
        if not self._num_rounds % 5:
            self._admin.check()
        status: dict[str, Any] = self._admin.status()
        assert status["service"]["internal_errors"] == 0, self._daemon.errors()
        assert status["pool"]["num_leases"] <= NUM_ENGINES * 10_000
        return status["service"]["frames"]

    def _store(self, prefix: str, num_blocks: int) -> None:
        lease = self._engine.reserve(prefix, num_blocks)
        self.counts[f"reserve {lease.reason or 'granted'}"] += 1
        if lease.lease_id is not None:
            for piece in pieces_to_write(PLAIN, lease, prefix):
                self._engine.write(piece)
            self._engine.finish(lease.lease_id)

    def _load(self, prefix: str, num_blocks: int) -> None:
        lease = self._engine.pin(prefix, num_blocks)
        self.counts[f"pin {lease.reason or 'granted'}"] += 1
        if lease.lease_id is not None:
            for piece in pieces_to_read(PLAIN, lease, prefix):
                assert self._engine.holds(piece), f"{prefix}: other bytes"
            self._engine.finish(lease.lease_id)


def run(num_frames: int, seed: int) -> dict[str, Any]:
    """Fuzz until the daemon has seen ``num_frames``; raises ``AssertionError`` if it errs."""
    started = time.monotonic()
    with ExitStack() as stack:
        folder = stack.enter_context(short_folder())
        daemon = stack.enter_context(Daemon(f"{folder}/pool.sock", log_level="ERROR"))
        daemon.wait_ready()
        witness, fuzzer = Witness(daemon, seed), Fuzzer(daemon.socket_path, seed)
        num_seen = 0
        while num_seen < num_frames:
            sent = fuzzer.counts.total() + FRAMES_PER_ROUND
            while fuzzer.counts.total() < sent:
                fuzzer.step()
            num_seen, num_before = witness.round(), num_seen
            if num_seen // PROGRESS_FRAMES > num_before // PROGRESS_FRAMES:
                print(num_seen, "frames", file=sys.stderr, flush=True)  # noqa: T201
        status = daemon.status()["service"]
        fuzzer.close()
        witness.close()
        daemon.settle()
        assert daemon.errors() == ""
        daemon.stop()
    return {
        "seed": seed,
        "frames": num_seen,
        "bad_frames": status["bad_frames"],
        "refused": status["refused"],
        "seconds": round(time.monotonic() - started, 1),
        "witness": dict(witness.counts),
        "witness_slowest_s": round(witness.slowest_s, 3),
        "fuzzer": dict(sorted(fuzzer.counts.items())),
    }


def main() -> int:
    """Fuzz as told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    print(f"MILLPOND_SEED={options.seed}", flush=True)  # noqa: T201
    # How long an answer takes is told at the end; a busy machine is no finding.
    client_module.REQUEST_TIMEOUT_S = WAIT_S
    print(json.dumps(run(options.frames, options.seed), indent=1))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
