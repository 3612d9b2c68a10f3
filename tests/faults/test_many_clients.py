"""64 engines at once: every answer comes, and every count adds up."""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from millpond.model.leases import NO_SLOT
from millpond.service import client as client_module
from millpond.service.protocol import Report
from tests.faults.engine import HYBRID, PLAIN, Engine, Kind, pieces_to_read, pieces_to_write
from tests.faults.world import WAIT_S, Daemon

NUM_ENGINES = 64
NUM_TURNS = 25
NUM_PREFIXES = 24
LENGTH_MAX = 12
REPORT = {"prompt_tokens": 30, "computed_tokens": 10, "local_tokens": 5, "loaded_tokens": 15}


class Busy(threading.Thread):
    """One engine in a thread; counts what it was told, for comparison with the daemon's."""

    def __init__(self, path: str, number: int, start: threading.Barrier, seed: int) -> None:
        super().__init__(name=f"engine-{number}")
        self.kind: Kind = (PLAIN, HYBRID)[number % 2]
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._path = path
        self._start = start
        self._rng = random.Random(f"{seed}/{number}")

    def run(self) -> None:
        """Connect together with the others and do mixed work."""
        try:
            self._start.wait(WAIT_S)
            with Engine(self._path, self.name, self.kind) as engine:
                for turn in range(NUM_TURNS):
                    verb = self._rng.choice([self.look_up, self.store, self.store, self.load])
                    prefix = f"p-{self._rng.randrange(NUM_PREFIXES)}"
                    verb(engine, prefix, self._rng.randint(1, LENGTH_MAX))
                    if not turn % 5:
                        engine.scheduler.report(
                            Report(request_id=f"{turn}", writers={"w": 15}, **REPORT)
                        )
                # What was finished is taken in before this is answered, or at the end at least.
                engine.lookup("none", 1)
                self.counts["miss"] += 1
        except BaseException as error:
            self.error = error
            raise

    def look_up(self, engine: Engine, prefix: str, num_blocks: int) -> None:
        """Look up and count the outcome."""
        self.counts[engine.lookup(prefix, num_blocks).outcome] += 1

    def store(self, engine: Engine, prefix: str, num_blocks: int) -> None:
        """Write what is missing, and give every fourth up."""
        lease = engine.reserve(prefix, num_blocks)
        if lease.lease_id is None:
            self.counts[f"reserve {lease.reason}"] += 1
            return
        self.counts["reserve granted"] += 1
        for piece in pieces_to_write(self.kind, lease, prefix):
            engine.write(piece)
        ok = self._rng.random() < 0.75
        engine.finish(lease.lease_id, ok=ok)
        num_blocks = sum(offset != NO_SLOT for offset in lease.offsets[0])
        self.counts["blocks reserved"] += num_blocks
        self.counts["aborted"] += not ok

    def load(self, engine: Engine, prefix: str, num_blocks: int) -> None:
        """Read what is there, byte by byte."""
        lease = engine.pin(prefix, num_blocks)
        if lease.lease_id is None:
            self.counts[f"pin {lease.reason}"] += 1
            return
        self.counts["pin granted"] += 1
        for piece in pieces_to_read(self.kind, lease, prefix):
            assert engine.holds(piece), f"{self.name}: other bytes of {prefix}"
        engine.finish(lease.lease_id)
        self.counts["blocks read"] += sum(count for _, count in lease.writers)


def every_slot_is_accounted_for(pool: dict[str, Any]) -> None:
    """Check that states and extents add up to the arena."""
    assert pool["num_slots"]["committed"] > 0
    num_extents = pool["num_extents_unassigned"]
    for size in pool["slot_sizes"]:
        num_extents += size["num_extents"]
        slots_per_extent = pool["extent_bytes"] // size["slot_bytes"]
        assert sum(size["num_slots"].values()) == size["num_extents"] * slots_per_extent
    assert num_extents == pool["num_extents"]


def total(engines: Sequence[Busy], name: str) -> int:
    """Return how often something happened to all engines together."""
    return sum(engine.counts[name] for engine in engines)


def test_64_engines_at_once(daemon: Daemon, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # 64 threads take turns in this one process; how long is not the question.
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT_S", WAIT_S)
    start = threading.Barrier(NUM_ENGINES)
    engines = [Busy(daemon.socket_path, i, start, seed) for i in range(NUM_ENGINES)]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join(3 * WAIT_S)
        assert not engine.is_alive()
    assert [engine.error for engine in engines if engine.error] == []
    daemon.settle()
    status = daemon.status()
    pool = status["pool"]
    for outcome, count in pool["lookups"].items():
        assert count == total(engines, outcome), outcome
    for reason, count in pool["reserves"].items():
        assert count == total(engines, f"reserve {reason}"), reason
    for reason, count in pool["pins"].items():
        assert count == total(engines, f"pin {reason}"), reason
    replicas = pool["replicas"].values()
    assert len(replicas) == NUM_ENGINES
    aborted = sum(replica["num_write_leases_aborted"] for replica in replicas)
    assert aborted == total(engines, "aborted")
    read = sum(replica["num_blocks_read"] for replica in replicas)
    assert read == total(engines, "blocks read") > 0
    every_slot_is_accounted_for(pool)
    reports = sum(tokens["num_requests"] for tokens in status["tokens"].values())
    assert reports == NUM_ENGINES * NUM_TURNS / 5
    loaded = sum(tokens["loaded_tokens"] for tokens in status["tokens"].values())
    assert loaded == 15 * reports
