"""``gate pool`` on real daemons: it sees what is planted, touches nobody's blocks, leaves nothing.

Faults are planted where the check cannot know of them: in the daemon's allocator, or in the
arena by a process that maps it behind everybody's back.
"""

import json
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.gate.pool import DEFAULT_SLOT_SIZES, PoolCheck, PoolCheckOptions, PoolReport
from millpond.gate.pool_device import CheckedDevice, Mover, open_device
from millpond.gate.pool_errors import NotRegistered, PoolInUse
from millpond.model.errors import ConfigError, ExpectedError, SetupError
from millpond.model.limits import ARENA_HEADER_BYTES, KIB, MIB
from millpond.pool.allocator import SlotTable
from millpond.service.server import ServeOptions, serve
from millpond.transfer.cpu import CpuDevice
from millpond.transfer.device import CopyFailed
from tests.faults.engine import Engine
from tests.faults.world import ARENA_NAME, SIZE_BYTES, WAIT_S, Daemon, eventually

pytestmark = pytest.mark.timeout(300)

SIZES = (256 * KIB, 100 * KIB)
Steps = Callable[[str], None]


def check(
    socket_path: str,
    on_step: Steps = lambda _: None,
    *,
    sizes: tuple[int, ...] = SIZES,
    device: Callable[[str], CheckedDevice] = open_device,
) -> PoolReport:
    """Run the check; ``on_step`` is called once at the start of each step."""
    seen: list[str] = []

    def step(_text: str, stage: str) -> None:
        if stage not in seen[-1:]:
            seen.append(stage)
            on_step(stage)

    options = PoolCheckOptions(socket=socket_path, slot_sizes=sizes, seed=3)
    return PoolCheck(options, on_step=step, open_device=device).run()


def at(stage: str, do: Callable[[], None]) -> Steps:
    """Return what does something when a step begins."""
    return lambda seen: do() if seen == stage else None


def test_every_slot_of_a_pool_three_times(daemon: Daemon) -> None:
    report = check(daemon.socket_path)
    assert report.fault is None
    assert [filling.name for filling in report.fillings] == ["first", "again", "shared"]
    extent_bytes = report.extent_bytes
    for filling in report.fillings:
        # What is not in a slot is less than one slot an extent.
        num_extents = SIZE_BYTES // extent_bytes
        assert SIZE_BYTES - num_extents * max(SIZES) < filling.num_bytes <= SIZE_BYTES
        assert filling.num_bytes_compared == filling.num_bytes
        assert sum(size * n for size, n in filling.num_slots_by_size.items()) == filling.num_bytes
        assert filling.store_gb_per_s > 0
        assert filling.load_gb_per_s > 0
    assert daemon.status()["pool"]["num_blocks"] == 0


def test_slots_of_one_size_fill_a_pool_by_the_byte(daemon: Daemon) -> None:
    report = check(daemon.socket_path, sizes=(64 * KIB,))
    assert [filling.num_slots for filling in report.fillings] == [SIZE_BYTES // (64 * KIB)] * 3


def test_a_pool_is_filled_once_it_grows_no_more(socket_path: str, tmp_path: Path) -> None:
    gate = tmp_path / "go"
    options = {"step_bytes": SIZE_BYTES, "memory_waits_for": (SIZE_BYTES, str(gate))}
    with Daemon(socket_path, size_bytes=2 * SIZE_BYTES, **options) as daemon:
        daemon.wait_ready()
        usable_bytes: list[int] = []

        def step(stage: str) -> None:
            if stage == "memory":
                gate.touch()
            elif stage == "first: filling":
                usable_bytes.append(daemon.status()["service"]["memory"]["usable_bytes"])
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            check(socket_path, step)
        assert usable_bytes == [2 * SIZE_BYTES]


def test_a_pool_without_all_of_its_memory_is_not_checked(socket_path: str) -> None:
    options = {"step_bytes": SIZE_BYTES, "memory_ends_at": SIZE_BYTES}
    with Daemon(socket_path, size_bytes=2 * SIZE_BYTES, **options) as daemon:
        daemon.wait_ready()
        with pytest.raises(SetupError, match="gave 16 MiB of 32 MiB"):
            check(socket_path)


# ---------------------------------------------------------------- planted faults


def run_daemon_that_gives_a_slot_twice(socket_path: str) -> None:
    """Serve with two slots of each extent at one place: a bug in the allocator."""
    open_extent = SlotTable.open_extent

    def plant(self: SlotTable, number: int, extent_bytes: int) -> None:
        open_extent(self, number, extent_bytes)
        first = self.extents[-1].first_slot
        self.offset[first + 1] = self.offset[first]

    SlotTable.open_extent = plant
    serve(ServeOptions(socket_path=socket_path, size_bytes=SIZE_BYTES))


@contextmanager
def twice(socket_path: str) -> Generator[None]:
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=run_daemon_that_gives_a_slot_twice, args=(socket_path,), daemon=True
    )
    process.start()
    try:
        eventually(Path(socket_path).exists, "the daemon serves", timeout_s=3 * WAIT_S)
        yield
    finally:
        process.terminate()
        process.join(WAIT_S)
        process.kill()


def test_a_slot_handed_out_twice_is_found(socket_path: str) -> None:
    with twice(socket_path):
        report = check(socket_path)
    assert report.fault is not None
    assert "was handed out twice" in report.fault
    assert report.fillings == []


def test_bytes_alone_tell_of_a_slot_handed_out_twice(
    socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same fault, seen by the comparison where nobody looks at the offsets."""
    monkeypatch.setattr(PoolCheck, "_check_slots", lambda *_: None)
    with twice(socket_path):
        report = check(socket_path)
    assert report.fault is not None
    assert "differs from byte 0 on: expected" in report.fault


def flip(daemon: Daemon, offset: int) -> None:
    """Change one bit of the arena, as a bug in some process would."""
    folder = Path(f"/proc/{daemon.pid}/fd")
    path = next(p for p in folder.iterdir() if ARENA_NAME in str(p.readlink()))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[ARENA_HEADER_BYTES + offset] ^= 1


@pytest.mark.parametrize("filling", ["first", "again", "shared"])
def test_one_flipped_bit_is_found(daemon: Daemon, filling: str) -> None:
    offset = 3 * MIB + 17  # of an extent that is filled from its start
    report = check(
        daemon.socket_path,
        at(f"{filling}: reading back", lambda: flip(daemon, offset)),
        sizes=(64 * KIB,),
    )
    assert report.fault is not None
    assert f"the slot at offset {3 * MIB} differs from byte 16 on: expected" in report.fault
    assert filling not in [done.name for done in report.fillings]
    assert daemon.status()["pool"]["num_blocks"] == 0


def test_a_copy_that_fails_is_a_fault(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise CopyFailed("a load failed: error 700")

    def break_off() -> None:
        monkeypatch.setattr(Mover, "move", fail)

    report = check(daemon.socket_path, at("first: reading back", break_off))
    assert report.fault == "a load failed: error 700"
    assert daemon.status()["pool"]["num_blocks"] == 0


# ---------------------------------------------------------------- what it must not touch


def test_a_pool_with_blocks_is_left_alone(daemon: Daemon) -> None:
    with Engine(daemon.socket_path, "somebody") as engine:
        engine.store("theirs", 3)
        with pytest.raises(PoolInUse, match="1 replicas, 3 blocks"):
            check(daemon.socket_path)
        engine.verify("theirs", 3)
    eventually(lambda: daemon.status()["pool"]["num_sessions"] == 0, "the engine has left")
    # Without its replica too, and from the command line.
    assert run(["gate", "pool", "--socket", daemon.socket_path], dict(os.environ)) == Exit.IN_USE
    assert daemon.status()["pool"]["num_blocks"] == 3


def test_a_replica_that_joins_meanwhile_ends_the_check_and_keeps_its_blocks(
    daemon: Daemon,
) -> None:
    joined: list[tuple[Engine, int]] = []

    def join() -> None:
        engine = Engine(daemon.socket_path, "latecomer")
        engine.store("theirs", 1)
        # Held, or filling the pool would evict it, as any replica's filling would.
        lease_id = engine.pin("theirs", 1).lease_id
        assert lease_id is not None
        joined.append((engine, lease_id))

    with pytest.raises(PoolInUse, match="has joined the pool"):
        check(daemon.socket_path, at("first: filling", join))
    engine, lease_id = joined[0]
    with engine:
        engine.verify("theirs", 1)
        engine.finish(lease_id)


def test_a_pool_that_is_off_is_named(daemon: Daemon) -> None:
    with daemon.admin() as admin:
        admin.switch(enabled=False)
    with pytest.raises(SetupError, match="millpond pool on"):
        check(daemon.socket_path)


def test_a_size_that_never_got_a_slot_is_named(daemon: Daemon) -> None:
    sizes = tuple(num * 128 * KIB for num in range(1, 6))
    assert len(sizes) > daemon.status()["pool"]["num_extents"]
    with pytest.raises(SetupError, match=r"no slot of \d+ bytes .* larger pool"):
        check(daemon.socket_path, sizes=sizes)


def test_slots_that_fit_into_no_extent_are_named(daemon: Daemon) -> None:
    with pytest.raises(ConfigError, match="choose a smaller --slot-size"):
        check(daemon.socket_path, sizes=(8 * MIB,))


class NeverReady(CpuDevice):
    """A GPU that cannot register the arena."""

    def is_ready(self, end_offset: int) -> bool:
        return end_offset < 0


def test_a_failed_registration_is_an_error(daemon: Daemon) -> None:
    def device(_: str) -> CheckedDevice:
        return CheckedDevice(torch.device("cpu"), NeverReady(), lambda: "out of locked memory")

    with pytest.raises(NotRegistered, match="out of locked memory"):
        check(daemon.socket_path, device=device)


# ---------------------------------------------------------------- ends


def test_a_second_client_that_dies_is_named(daemon: Daemon) -> None:
    def kill() -> None:
        (process,) = multiprocessing.active_children()
        process.kill()
        process.join(WAIT_S)

    with pytest.raises(ExpectedError, match="second client has ended"):
        check(daemon.socket_path, at("shared: filling", kill))


def test_a_daemon_that_dies_is_named(socket_path: str) -> None:
    with Daemon(socket_path) as daemon:
        daemon.wait_ready()
        with pytest.raises(ExpectedError):
            check(socket_path, at("again: filling", daemon.kill))


def test_the_command_starts_a_pool_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        argv = ["gate", "pool", "--size", "16MiB", "--json"]
        assert run(argv, {**os.environ, "TMPDIR": folder}) == Exit.OK
        assert list(Path(folder).iterdir()) == []
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["fault"] is None
    assert len(data["fillings"]) == 3
    assert all(f["num_bytes"] == f["num_bytes_compared"] > 0 for f in data["fillings"])
    assert set(data["fillings"][0]["num_slots_by_size"]) == set(map(str, DEFAULT_SLOT_SIZES))


def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "millpond.cli", "gate", "pool", "--size", "64MiB"],
            env={**os.environ, "TMPDIR": folder},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        with process:
            assert process.stderr is not None
            for line in process.stderr:
                if "shared: filling" in line:
                    break
            children = pids_with(folder)
            assert len(children) >= 3, "a guard, its daemon, a second client"
            process.send_signal(signal.SIGINT)
            process.stderr.read()
            assert process.wait(3 * WAIT_S) == Exit.INTERRUPTED
        eventually(lambda: not pids_with(folder), "every process has ended")
        assert list(Path(folder).iterdir()) == []


def pids_with(folder: str) -> list[int]:
    """Return the processes whose temporary files would go to ``folder``."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "16MiB", "--socket", "x"], "give one"),
        (["--size", "16MiB", "--slot-size", "1000B"], "1000"),
        (["--size", "16MiB", "--slot-size", "many"], "many"),
        (["--size", "16MiB", "--slot-size", "1MiB", "--slot-size", "1MiB"], "each once"),
    ],
)
def test_wrong_usage_is_named(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["gate", "pool", *options], dict(os.environ)) == Exit.USAGE
    assert words in capsys.readouterr().err
