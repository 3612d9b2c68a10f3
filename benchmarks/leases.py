"""Leases of 64 blocks: reserve and commit, pin and release, beside a bare echo.

    python benchmarks/leases.py [--clients 1 8] [--seconds 0.5] [--rounds 9]

Each client is a process with a scheduler's and a worker's connection. In turns, all clients
at once exchange messages of a lease's size with a process that only echoes, reserve and
commit new blocks (the pool is full: each reserve evicts), and pin and release stored ones.
Prints one line of JSON: rates of all clients together, and medians over the rounds of their
ratio to the echo's.
"""

import argparse
import json
import multiprocessing
import os
import selectors
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

from figures import rates
from lookup import FIRST_S, KEY_BYTES, replica, run_daemon

from millpond.model.limits import MIB
from millpond.service import client as client_module
from millpond.service.client import AdminClient, SchedulerClient, WorkerClient

LEASE_BLOCKS = 64
KEYS_BYTES = LEASE_BLOCKS * KEY_BYTES
ECHO_REQUEST_BYTES = KEYS_BYTES + 96
"""A pin's frame and the frame of the finish after it."""
ECHO_REPLY_BYTES = LEASE_BLOCKS * 16 + 64
POOL_BYTES = 64 * MIB
CASES = ("echo", "reserve_commit", "pin_release")


def run_echo(path: str, ready: Event) -> None:
    """Answer each request of any client with a reply, as barely as Python can."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    missing: dict[int, int] = {}
    buffer, reply = bytearray(256 * 1024), bytes(ECHO_REPLY_BYTES)
    ready.set()
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                connected, _ = listener.accept()
                selector.register(connected, selectors.EVENT_READ)
                missing[connected.fileno()] = ECHO_REQUEST_BYTES
                continue
            peer = key.fileobj
            assert isinstance(peer, socket.socket)
            num_bytes = peer.recv_into(buffer)
            if not num_bytes:
                selector.unregister(peer)
                peer.close()
                continue
            missing[key.fd] -= num_bytes
            if not missing[key.fd]:
                peer.sendall(reply)
                missing[key.fd] = ECHO_REQUEST_BYTES


class Client:
    """One replica's connections, and one operation of each case."""

    def __init__(self, path: str, echo_path: str, name: str) -> None:
        identity = replica(name)
        self._scheduler = SchedulerClient.connect(path, identity, timeout_s=FIRST_S)
        self._worker = WorkerClient.connect(path, identity, rank=0)
        self._echo = socket.socket(socket.AF_UNIX)
        self._echo.connect(echo_path)
        self._message = bytes(ECHO_REQUEST_BYTES)
        self._stored = b""
        self.operations: dict[str, Callable[[], None]] = {
            "echo": self._exchange,
            "reserve_commit": self._reserve_commit,
            "pin_release": self._pin_release,
        }

    def settle(self) -> None:
        """Wait until the last lease is committed."""
        deadline = time.monotonic() + FIRST_S
        while self._stored and self._num_found() < LEASE_BLOCKS:
            if time.monotonic() > deadline:
                raise RuntimeError("a lease was not committed")

    def close(self) -> None:
        """End all connections."""
        self._echo.close()
        self._scheduler.close()
        self._worker.close()
        self._worker.arena.close()

    def prepare(self) -> None:
        """Have stored blocks to pin: others may have evicted the last ones."""
        self._reserve_commit()
        self.settle()

    def _num_found(self) -> int:
        return self._scheduler.lookup(self._stored, KEY_BYTES).num_blocks

    def _exchange(self) -> None:
        self._echo.sendall(self._message)
        missing = ECHO_REPLY_BYTES
        while missing:
            missing -= len(self._echo.recv(missing))

    def _reserve_commit(self) -> None:
        keys = os.urandom(KEYS_BYTES)
        lease = self._scheduler.reserve(keys, KEY_BYTES, first_block=0, parts=[()])
        if lease.lease_id is None:
            raise RuntimeError(f"not reserved: {lease.reason}")
        self._worker.finish([lease.lease_id], ok=True)
        self._stored = keys

    def _pin_release(self) -> None:
        lease = self._scheduler.pin(self._stored, KEY_BYTES, first_block=0)
        if lease.lease_id is None or lease.num_blocks != LEASE_BLOCKS:
            raise RuntimeError(f"not pinned: {lease.outcome} {lease.reason}")
        self._worker.finish([lease.lease_id], ok=True)


def run_client(
    paths: tuple[str, str], number: int, barrier: Barrier, results: Queue, timing: tuple[int, float]
) -> None:
    """Take part in all rounds; put the rates of each case into ``results``."""
    client_module.REQUEST_TIMEOUT_S = FIRST_S  # a slow answer is a figure here, not a miss
    num_rounds, seconds = timing
    client = Client(*paths, f"client-{number}")
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for i in range(num_rounds + 1):
        for case in CASES:
            if case == "pin_release":
                client.prepare()
            barrier.wait(FIRST_S)
            operation, num_done = client.operations[case], 0
            start = time.perf_counter()
            while time.perf_counter() - start < seconds:
                operation()
                num_done += 1
            if case == "reserve_commit":
                client.settle()
            elapsed = time.perf_counter() - start
            barrier.wait(FIRST_S)
            if i:  # the first round fills the pool and warms up
                found[case].append(num_done / elapsed)
    client.close()
    results.put(found)


def measure(num_clients: int, num_rounds: int, seconds: float) -> dict[str, float]:
    """Start a daemon, an echo and the clients; return the figures."""
    context = multiprocessing.get_context("spawn")
    ready, echo_ready = context.Event(), context.Event()
    barrier, results = context.Barrier(num_clients), context.Queue()
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        paths = (str(Path(folder) / "pool.sock"), str(Path(folder) / "echo.sock"))
        servers = [
            context.Process(target=run_daemon, args=(paths[0], POOL_BYTES, ready), daemon=True),
            context.Process(target=run_echo, args=(paths[1], echo_ready), daemon=True),
        ]
        clients = [
            context.Process(
                target=run_client,
                args=(paths, i, barrier, results, (num_rounds, seconds)),
                daemon=True,
            )
            for i in range(num_clients)
        ]
        try:
            for process in servers:
                process.start()
            if not (ready.wait(FIRST_S) and echo_ready.wait(FIRST_S)):
                raise RuntimeError("the daemon did not start")
            for process in clients:
                process.start()
            limit_s = FIRST_S + 6 * len(CASES) * (num_rounds + 1) * seconds
            found = [results.get(timeout=limit_s) for _ in clients]
            check_released(paths[0])
        finally:
            for process in [*clients, *servers]:
                if process.pid is not None:
                    process.terminate()
                    process.join(10)
    periods = {
        case: [sum(each) for each in zip(*(one[case] for one in found), strict=True)]
        for case in CASES
    }
    return rates(periods, "1_client" if num_clients == 1 else f"{num_clients}_clients")


def check_released(path: str) -> None:
    """Fail unless all leases have ended: what was counted was served."""
    with AdminClient.connect(path, timeout_s=FIRST_S) as admin:
        admin.check()
        pool = admin.status()["pool"]
        assert isinstance(pool, dict)
        if pool["num_leases"]:
            raise RuntimeError(f"{pool['num_leases']} leases are left")


def main() -> None:
    """Measure with each number of clients, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case in a round")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    for num_clients in options.clients:
        figures |= measure(num_clients, options.rounds, options.seconds)
    print(json.dumps({f"lease_64_{name}": value for name, value in figures.items()}))


if __name__ == "__main__":
    main()
