"""A client that stops at a named point of a store or a load, and says so.

    python -m tests.faults.stopping_client OPTIONS-AS-JSON

Prints ``{"at": NAME}`` and waits: to be killed, or for a line, upon which it goes on to the
end and prints ``{"done": true}`` or ``{"error": TYPE}``. What is sent or received stops it half
way, before the reply is read, and after it, so that each state of both ends can be met.
"""

import json
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millpond.model.errors import ExpectedError
from tests.faults.engine import PLAIN, TWO_RANKS, Engine, Piece, pieces_to_read, pieces_to_write

NUM_BLOCKS = 6


@dataclass(frozen=True)
class Point:
    """Where a client stops, and what the daemon holds for it then.

    ``committed`` says whether the prefix is there, then and after the client's death.
    """

    name: str
    scenario: str
    num_reserved: int = 0
    num_leases: int = 0
    committed: bool = False


def _points(scenario: str, names: str, **state: Any) -> list[Point]:  # noqa: ANN401
    return [Point(name, scenario, **state) for name in names.split(", ")]


WRITING = {"num_reserved": NUM_BLOCKS, "num_leases": 1}
POINTS = (
    *_points("store", "open half sent, open sent, open replied, join half sent, join sent"),
    *_points("store", "join replied, reserve half sent"),
    *_points("store", "reserve sent, reserve replied, store half copied, store copied", **WRITING),
    *_points("store", "commit half sent", **WRITING),
    *_points("store", "commit sent", committed=True),
    *_points("abort", "abort half sent", **WRITING),
    *_points("abort", "abort sent"),
    *_points("two ranks", "commit of rank 0 sent, commit of rank 1 half sent", **WRITING),
    *_points("load", "pin half sent", committed=True),
    *_points("load", "pin sent, pin replied, load half copied", num_leases=1, committed=True),
    *_points("load", "load copied, release half sent", num_leases=1, committed=True),
    *_points("load", "release sent", committed=True),
)


class Stops:
    """Where the client is, and where it has to stop."""

    def __init__(self, stop_at: str) -> None:
        self.verb = ""
        """What the socket is being used for."""
        self._stop_at = stop_at

    def reach(self, name: str) -> None:
        """Stop if this is the point."""
        if name == self._stop_at:
            say(at=name)
            sys.stdin.readline()


def say(**line: object) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def stopping_socket(stops: Stops) -> type[socket.socket]:
    """Return a class of sockets that stop within what is sent, and before and after replies."""

    class StoppingSocket(socket.socket):
        def sendall(self, data: Any, _flags: int = 0) -> None:  # noqa: ANN401
            super().sendall(data[: len(data) // 2])
            stops.reach(f"{stops.verb} half sent")
            super().sendall(data[len(data) // 2 :])
            stops.reach(f"{stops.verb} sent")

        def sendmsg(self, buffers: Iterable[Any], *ancillary: Any) -> int:  # noqa: ANN401
            (data,) = buffers
            super().sendmsg([data[: len(data) // 2]], *ancillary)
            stops.reach(f"{stops.verb} half sent")
            super().sendall(data[len(data) // 2 :])
            stops.reach(f"{stops.verb} sent")
            return len(data)

        def recv(self, num_bytes: int, flags: int = 0) -> bytes:
            data = super().recv(num_bytes, flags)
            stops.reach(f"{stops.verb} replied")
            return data

        def recvmsg(self, *arguments: Any) -> Any:  # noqa: ANN401
            received = super().recvmsg(*arguments)
            stops.reach(f"{stops.verb} replied")
            return received

    return StoppingSocket


def copy(pieces: list[Piece], engine: Engine, stops: Stops, verb: str) -> None:
    """Write or verify all pieces; half way means in the middle of one."""
    half = len(pieces) // 2
    for number, piece in enumerate(pieces):
        if number == half:
            middle = len(piece.content) // 2
            if verb == "store":
                engine.write(piece._replace(content=piece.content[:middle]))
            stops.reach(f"{verb} half copied")
        if verb == "store":
            engine.write(piece)
        elif not engine.holds(piece):
            raise SystemExit(f"other bytes at offset {piece.offset_bytes}")
    stops.reach(f"{verb} copied")


def connect(options: dict[str, Any], stops: Stops) -> Engine:
    """Connect as an engine, stopping within both handshakes."""
    real_scheduler = Engine.connect_scheduler

    def connect_scheduler(self: Engine) -> None:
        stops.verb = "open"
        real_scheduler(self)
        stops.verb = "join"

    Engine.connect_scheduler = connect_scheduler  # type: ignore[method-assign]
    kind = TWO_RANKS if options["scenario"] == "two ranks" else PLAIN
    engine = Engine(options["socket_path"], options["replica"], kind)
    stops.verb = ""
    return engine


def store(engine: Engine, prefix: str, stops: Stops, *, verb: str) -> None:
    """Reserve, copy, and commit or abort."""
    stops.verb = "reserve"
    lease = engine.reserve(prefix, NUM_BLOCKS)
    assert lease.lease_id is not None, lease
    stops.verb = ""
    copy(list(pieces_to_write(engine.kind, lease, prefix)), engine, stops, "store")
    for worker in engine.workers:
        stops.verb = verb if len(engine.workers) == 1 else f"{verb} of rank {worker.rank}"
        worker.finish([lease.lease_id], ok=verb == "commit")


def load(engine: Engine, prefix: str, stops: Stops) -> None:
    """Pin, copy and release."""
    stops.verb = "pin"
    lease = engine.pin(prefix, NUM_BLOCKS)
    assert lease.lease_id is not None, lease
    stops.verb = ""
    copy(list(pieces_to_read(engine.kind, lease, prefix)), engine, stops, "load")
    stops.verb = "release"
    engine.finish(lease.lease_id)


def main() -> None:
    """Do what the first argument says."""
    options = json.loads(sys.argv[1])
    stops = Stops(options["point"])
    socket.socket = stopping_socket(stops)  # type: ignore[misc]
    try:
        engine = connect(options, stops)
        if options["scenario"] == "load":
            load(engine, options["prefix"], stops)
        else:
            verb = "abort" if options["scenario"] == "abort" else "commit"
            store(engine, options["prefix"], stops, verb=verb)
    except ExpectedError as error:
        say(error=type(error).__name__)
    else:
        say(done=True)
    sys.stdin.read()  # stay, with all that is held, until the test has looked


if __name__ == "__main__":
    main()
