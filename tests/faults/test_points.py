"""kill -9 at every named point of store, load, commit, abort and release.

And, in the middle of copies: clients that freeze, and daemons that end.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from millpond.model.leases import LookupResult
from millpond.model.names import Outcome
from tests.faults.engine import PLAIN, TWO_RANKS, Engine
from tests.faults.stopping_client import NUM_BLOCKS, POINTS, Point
from tests.faults.world import (
    NUM_SLOTS,
    Child,
    Daemon,
    arena_holders,
    eventually,
    short_folder,
)

COPYING = [point for point in POINTS if "half copied" in point.name]
NUMBERS = count()


class Pond(NamedTuple):
    """A daemon, and engines that live through everything that others do."""

    daemon: Daemon
    witness: Engine
    witness_of_two_ranks: Engine

    def of(self, point: Point) -> Engine:
        """Return the witness that shares with the client of ``point``."""
        return self.witness_of_two_ranks if point.scenario == "two ranks" else self.witness

    def held(self) -> tuple[int, int]:
        """Return how many slots are reserved and how many leases are live."""
        footprint = self.daemon.footprint()
        return footprint["reserved"], footprint["leases"]


@pytest.fixture(scope="module")
def pond() -> Iterator[Pond]:
    """One daemon for all points: what one leaves behind, the next would find."""
    with short_folder() as folder, Daemon(f"{folder}/pool.sock") as daemon:
        daemon.wait_ready()
        empty = daemon.baseline
        with (
            Engine(daemon.socket_path, "witness", PLAIN) as witness,
            Engine(daemon.socket_path, "witness-2", TWO_RANKS) as of_two_ranks,
        ):
            daemon.baseline = daemon.footprint()
            yield Pond(daemon, witness, of_two_ranks)
        daemon.baseline = empty
        daemon.settle()
        daemon.stop()


def client_at(socket_path: str, point: Point, prefix: str, storing: Engine) -> Child:
    """Start a client of its own name, prepared so that it gets to ``point``."""
    if point.scenario == "load":
        storing.store(prefix, NUM_BLOCKS)
    options = {
        "socket_path": socket_path,
        "replica": prefix,
        "scenario": point.scenario,
        "point": point.name,
        "prefix": prefix,
    }
    return Child("tests.faults.stopping_client", options)


def go_on(client: Child) -> dict[str, object]:
    """Let a client that has stopped go on to the end; return what it says then."""
    assert client.process.stdin is not None
    client.process.stdin.write(b"\n")
    client.process.stdin.flush()
    return client.line()


def wait_at(pond: Pond, point: Point, client: Child) -> None:
    """Wait until the client has stopped and the daemon has done what it was asked for."""
    assert client.line() == {"at": point.name}
    expected = (point.num_reserved, point.num_leases)
    eventually(lambda: pond.held() == expected, lambda: f"{pond.held()} is {expected}")


def everything_is_there_and_free(pond: Pond) -> None:
    """Check that every slot can be had: one that is lost, or held by the dead, could not."""
    pond.daemon.settle()
    lease = pond.witness.reserve(f"everything-{next(NUMBERS)}", NUM_SLOTS)
    assert lease.lease_id is not None
    assert len(lease.offsets[0]) == NUM_SLOTS == len(set(lease.offsets[0]))
    pond.witness.finish(lease.lease_id, ok=False)
    pond.daemon.settle()
    pond.witness.store(f"after-{next(NUMBERS)}", 2)


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name.replace(" ", "-"))
def test_killed_at(pond: Pond, point: Point) -> None:
    prefix = f"p-{next(NUMBERS)}"
    with client_at(pond.daemon.socket_path, point, prefix, pond.witness) as client:
        wait_at(pond, point, client)
        client.kill()
    pond.daemon.settle()
    witness = pond.of(point)
    if point.committed:
        witness.verify(prefix, NUM_BLOCKS)
    else:
        assert witness.lookup(prefix, NUM_BLOCKS) == LookupResult(0, Outcome.MISS)
        witness.store(prefix, NUM_BLOCKS)
        witness.verify(prefix, NUM_BLOCKS)
    everything_is_there_and_free(pond)


@pytest.mark.parametrize("end", [signal.SIGCONT, signal.SIGKILL], ids=["thawed", "killed"])
@pytest.mark.parametrize("point", COPYING, ids=lambda point: point.name.replace(" ", "-"))
def test_frozen_while_it_copies(pond: Pond, point: Point, end: signal.Signals) -> None:
    prefix, other = f"p-{next(NUMBERS)}", f"p-{next(NUMBERS)}"
    with client_at(pond.daemon.socket_path, point, prefix, pond.witness) as client:
        wait_at(pond, point, client)
        client.signal(signal.SIGSTOP)
        # The arena is full of what others write; what the frozen one holds is not touched.
        lease = pond.witness.reserve(other, NUM_SLOTS)
        assert lease.lease_id is not None
        assert len(lease.offsets[0]) == NUM_SLOTS - NUM_BLOCKS
        assert pond.witness.reserve("more", 1).reason == "full"
        pond.witness.finish(lease.lease_id, ok=False)
        client.process.send_signal(end)
        if end is signal.SIGCONT:
            assert go_on(client) == {"done": True}
            pond.witness.wait_found(prefix, NUM_BLOCKS)
            pond.witness.verify(prefix, NUM_BLOCKS)
            client.kill()
    everything_is_there_and_free(pond)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("point", COPYING, ids=lambda point: point.name.replace(" ", "-"))
def test_daemon_ends_while_copies_run(
    socket_path: str, point: Point, number: signal.Signals
) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(socket_path)).wait_ready()
        inode = daemon.arena_inode()
        with Engine(socket_path, "storing") as storing:
            client = stack.enter_context(client_at(socket_path, point, "p", storing))
            assert client.line() == {"at": point.name}
        daemon.signal(number)
        assert daemon.exit_code() == (0 if number is signal.SIGTERM else -signal.SIGKILL)
        if number is signal.SIGTERM:
            assert list(Path(socket_path).parent.iterdir()) == []
        # The memory is the client's own now: what it reads is right to the last byte, what it
        # writes lands where nobody will ever look, and then it learns that the daemon is gone.
        assert arena_holders(inode) == {client.pid}
        assert go_on(client) == {"error": "DaemonGone"}
        client.kill()
        assert arena_holders(inode) == set()


def test_points_are_told_apart() -> None:
    names = [point.name for point in POINTS]
    assert len(set(names)) == len(names)
    assert len(COPYING) == 2
