"""Random work under random faults, from one seed.

    python -m tests.faults.random_faults [--seed N] [--seconds S] [--early-reuse]

Safety phase: engines in processes of their own work at random, and are killed, frozen and
hang up; the pool is flushed and switched, its daemon killed and started anew. Whatever happens,
what an engine reads under a lease is what belongs to the key, to the last byte.
Liveness phase: no more faults. Everybody finishes, every slot comes back.

``--early-reuse`` plants a daemon that takes slots back when a session ends, although its
process may still copy: the safety phase must find it.
"""

import argparse
import random
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any, Self

from tests.faults.engine import KINDS, Engine, pieces_to_read
from tests.faults.random_client import LENGTH_MAX, NUM_PREFIXES
from tests.faults.world import Child, Daemon, arena_holders, short_folder

NUM_CLIENTS = 6
WRITE_LEASE_S = 0.3
"""So that frozen writers meet the end of their leases."""
LIVENESS_S = 30.0
RESTARTS_MAX = 2


class Violation(AssertionError):
    """Something that must never happen has happened."""


class Client(Child):
    """A random client, and whether it is frozen."""

    def __init__(self, socket_path: str, replica: str, kind: str, seed: int) -> None:
        options = {"socket_path": socket_path, "replica": replica, "kind": kind, "seed": seed}
        super().__init__("tests.faults.random_client", options)
        self.replica = replica
        self.kind = kind
        self.is_frozen = False
        self._has_begun = False

    def has_begun(self) -> bool:
        """Return whether it has done some work: before that, faults would hit an import."""
        if self.has_line():
            line = self.line()
            if line != {"begun": True}:
                raise Violation(f"{self.replica}: {line}")
            self._has_begun = True
        return self._has_begun

    def finish(self) -> None:
        """Tell it to come to an end."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"finish\n")
        self.process.stdin.flush()


class Storm:
    """One run; ``faults`` and ``work`` say what was done to whom, and what they did."""

    def __init__(self, socket_path: str, seed: int, **planted: object) -> None:
        self._path = socket_path
        self._rng = random.Random(seed)
        self._planted = planted
        self._stack = ExitStack()
        self._daemon = self._start_daemon()
        self._baseline = self._daemon.baseline
        self._inodes = [self._daemon.arena_inode()]
        self._clients: list[Client] = []
        self._pause = threading.Event()
        self.faults: Counter[str] = Counter()
        self.work: Counter[str] = Counter()

    def __enter__(self) -> Self:
        kinds = list(KINDS)
        for number in range(NUM_CLIENTS):
            self._clients.append(self._start_client(f"r{number}", kinds[number % len(kinds)]))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def safety(self, seconds: float) -> None:
        """Let faults happen."""
        end = time.monotonic() + seconds
        verbs = [self.kill] * 4 + [self.freeze] * 6 + [self.thaw] * 5
        verbs += [self.check] * 3 + [self.flush] + [self.switch] * 2 + [self.restart]
        while time.monotonic() < end:
            self._rng.choice(verbs)()
            self._pause.wait(self._rng.uniform(0.0, 0.15))
            for client in self._clients:
                if client.process.poll() is not None:
                    raise Violation(f"{client.replica}: {client.output()} {client.errors()}")

    def liveness(self) -> None:
        """Let everybody finish, and look for what is left."""
        for client in self._clients:
            client.process.send_signal(signal.SIGCONT)
        for client in self._clients:
            client.finish()
        deadline = time.monotonic() + LIVENESS_S
        for client in self._clients:
            line = {"begun": True}
            while line == {"begun": True}:
                line = client.line(max(1.0, deadline - time.monotonic()))
            if "finished" not in line:
                raise Violation(f"{client.replica}: {line}")
            self.work.update(line["finished"])
            assert client.exit_code() == 0
        self._daemon.settle()
        self._audit()
        self._daemon.stop()
        for inode in self._inodes:
            assert arena_holders(inode) == set()

    # ------------------------------------------------------------ faults

    def kill(self) -> None:
        """Kill a client and start another in its place."""
        place = self._rng.randrange(NUM_CLIENTS)
        client = self._clients[place]
        if client.has_begun():
            self.faults["killed"] += 1
            client.kill()
            self._clients[place] = self._start_client(client.replica, client.kind)

    def freeze(self) -> None:
        """Stop a client wherever it is, but for the last two."""
        lively = [client for client in self._clients if not client.is_frozen]
        client = self._rng.choice(lively)
        if len(lively) > 2 and client.has_begun():
            self.faults["frozen"] += 1
            client.signal(signal.SIGSTOP)
            client.is_frozen = True

    def thaw(self) -> None:
        """Let a frozen client go on."""
        frozen = [client for client in self._clients if client.is_frozen]
        if frozen:
            self.faults["thawed"] += 1
            client = self._rng.choice(frozen)
            client.signal(signal.SIGCONT)
            client.is_frozen = False

    def check(self) -> None:
        """Check the pool's invariants in the middle of everything."""
        self._daemon.check()

    def flush(self) -> None:
        """Let the pool forget everything."""
        with self._daemon.admin() as admin:
            admin.flush()
        self.faults["flushed"] += 1

    def switch(self) -> None:
        """Switch the pool off, and soon on again."""
        with self._daemon.admin() as admin:
            admin.switch(enabled=False)
            self._pause.wait(self._rng.uniform(0.0, 0.05))
            admin.switch(enabled=True)
        self.faults["switched off and on"] += 1

    def restart(self) -> None:
        """Kill the daemon, or end it, and start another."""
        if len(self._inodes) > RESTARTS_MAX:
            return
        if self._rng.random() < 0.5:
            self.faults["daemon killed"] += 1
            self._daemon.kill()
        else:
            self.faults["daemon stopped"] += 1
            self._daemon.signal(signal.SIGTERM)
            assert self._daemon.exit_code() == 0
        self._daemon = self._start_daemon()
        self._daemon.baseline = self._baseline  # engines are quicker than we
        self._inodes.append(self._daemon.arena_inode())

    # ------------------------------------------------------------ what it is made of

    def _start_daemon(self) -> Daemon:
        planted = {"write_lease_s": WRITE_LEASE_S, **self._planted}
        return self._stack.enter_context(Daemon(self._path, **planted)).wait_ready()

    def _start_client(self, replica: str, kind: str) -> Client:
        client = Client(self._path, replica, kind, self._rng.getrandbits(32))
        return self._stack.enter_context(client)

    def _audit(self) -> None:
        """Read all that is in the pool."""
        for kind in KINDS.values():
            with Engine(self._path, "auditor", kind) as engine:
                for number in range(NUM_PREFIXES):
                    prefix = f"p-{number}"
                    lease = engine.pin(prefix, LENGTH_MAX)
                    if lease.lease_id is None:
                        continue
                    for piece in pieces_to_read(kind, lease, prefix):
                        if not engine.holds(piece):
                            raise Violation(f"{prefix} of {kind.name}: other bytes")
                        self.work["bytes audited"] += len(piece.content)
                    engine.finish(lease.lease_id)
        self._daemon.settle()


def run(seed: int, seconds: float, **planted: object) -> dict[str, Any]:
    """Run both phases; return what was done."""
    with short_folder() as folder, Storm(f"{folder}/pool.sock", seed, **planted) as storm:
        try:
            storm.safety(seconds)
            storm.liveness()
        finally:
            done = {"seed": seed, "faults": dict(storm.faults), "work": dict(storm.work)}
            print(done)  # noqa: T201 - what led to a failure
        return done


def main() -> int:
    """Run as told."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--early-reuse", action="store_true")
    options = parser.parse_args()
    run(options.seed, options.seconds, early_reuse=options.early_reuse)
    return 0


if __name__ == "__main__":
    sys.exit(main())
