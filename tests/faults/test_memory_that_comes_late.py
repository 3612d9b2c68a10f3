"""A daemon serves from the memory that it has, while the rest comes and if none comes."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

from millpond.model.limits import GIB, MIB
from tests.faults.daemon_main import SETUP_EXIT
from tests.faults.world import SLOT_BYTES, ClientProcess, Daemon, eventually

Maker = Callable[[], ClientProcess]
STEP = 16 * MIB
SIZE = 64 * MIB
PER_STEP = STEP // SLOT_BYTES


def usable_bytes(daemon: Daemon) -> int:
    return daemon.status()["service"]["memory"]["usable_bytes"]


def evictions(daemon: Daemon) -> int:
    return daemon.status()["pool"]["num_evictions"]


def test_it_serves_what_is_there_and_grows_while_it_serves(
    socket_path: str, client: Maker, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    options = {"step_bytes": STEP, "memory_waits_for": (STEP, str(gate))}
    with Daemon(socket_path, size_bytes=SIZE, **options) as daemon:
        daemon.wait_ready()
        memory = daemon.status()["service"]["memory"]
        assert memory == {"size_bytes": SIZE, "usable_bytes": STEP, "problem": None}
        engine = client()
        engine.engine("a")
        assert engine.ask("usable") == STEP  # its own mapping says so
        engine.store("early", PER_STEP)
        assert (
            max(engine.ask("pin", prefix="early", num_blocks=PER_STEP)["offsets"][0][1::2]) < STEP
        )
        assert engine.ask("reserve", prefix="more", num_blocks=1)["reason"] == "full"
        daemon.check()
        gate.touch()
        eventually(lambda: usable_bytes(daemon) == SIZE, "all memory is there")
        assert engine.ask("usable") == SIZE
        engine.store("late", 3 * PER_STEP)
        assert evictions(daemon) == 0
        assert engine.ask("lookup", prefix="early", num_blocks=PER_STEP) == [PER_STEP, "hit"]
        daemon.check()
        assert "memory complete" in daemon.errors()
        engine.kill()
        daemon.stop()


def test_memory_that_runs_out_later_is_told_of_and_served_without(
    socket_path: str, client: Maker
) -> None:
    options = {"step_bytes": STEP, "memory_ends_at": 2 * STEP + 8 * MIB}
    with Daemon(socket_path, size_bytes=SIZE, **options) as daemon:
        daemon.wait_ready()
        eventually(
            lambda: daemon.status()["service"]["memory"]["problem"] is not None, "it is told of"
        )
        memory = daemon.status()["service"]["memory"]
        assert memory["usable_bytes"] == 2 * STEP  # the rest cannot be registered
        assert "gave 40 MiB of 64 MiB" in memory["problem"]
        assert "ERROR:millpond.service.growing:memory ran out" in daemon.errors()
        engine = client()
        engine.engine("a")
        engine.store("first", 2 * PER_STEP)
        engine.store("second", 1)
        assert evictions(daemon) == 1
        daemon.check()
        engine.kill()
        daemon.stop()


def test_memory_that_is_not_there_to_begin_with_is_an_error(socket_path: str) -> None:
    options = {"step_bytes": STEP, "memory_ends_at": 0}
    with Daemon(socket_path, size_bytes=SIZE, **options) as daemon:
        line = daemon.line()
        assert daemon.exit_code() == SETUP_EXIT
    assert line["event"] == "ArenaTooLarge"
    assert "gave 0 MiB of 64 MiB" in line["message"]
    assert list(Path(socket_path).parent.iterdir()) == []


def test_steps_are_whole_extents_and_the_rest_comes_with_the_last(socket_path: str) -> None:
    size_bytes = SIZE + 6 * MIB
    with Daemon(socket_path, size_bytes=size_bytes, step_bytes=1) as daemon:
        daemon.wait_ready()
        eventually(lambda: usable_bytes(daemon) == size_bytes, "all memory is there")
        pool = daemon.status()["pool"]
        assert pool["num_extents"] == size_bytes // pool["extent_bytes"]
        daemon.stop()


def test_stop_while_it_serves_and_takes_memory(socket_path: str) -> None:
    options = {"step_bytes": STEP, "memory_is_slow": 0.1}
    with Daemon(socket_path, size_bytes=2 * GIB, **options) as daemon:
        assert daemon.line()["event"] == "ready"
        stopped = time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert daemon.exit_code() == 0
        assert time.monotonic() - stopped < 2.0
        assert "memory complete" not in daemon.errors()
    assert list(Path(socket_path).parent.iterdir()) == []
