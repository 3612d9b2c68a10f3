"""A guard ends all that came of its command, however the end comes about."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.launch import process as process_module
from millpond.launch.process import GuardedProcess, ProcessSpec
from tests.waiting import eventually

PAUSE = "import signal; signal.pause()"
WITH_CHILD = f"""
import subprocess, sys, tempfile, signal
tempfile.mkdtemp()
subprocess.Popen([sys.executable, "-c", {PAUSE!r}], start_new_session=True)
"""
STUBBORN = (
    f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('x', flush=True); {PAUSE}"
)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that is dead and not yet collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


class Starter:
    """Starts guarded processes, and stops them at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[GuardedProcess] = []
        self.temp_dir = folder / "temp"

    def start(
        self, code: str, *, grace_s: float = 5.0, leftovers: tuple[Path, ...] = ()
    ) -> GuardedProcess:
        process = GuardedProcess(
            ProcessSpec(
                name="it",
                argv=(sys.executable, "-c", code),
                environ=os.environ,
                log_file=self._folder / "log",
                grace_s=grace_s,
                temp_dir=self.temp_dir,
                leftovers=leftovers,
            )
        )
        self._started.append(process)
        return process

    def start_family(self, code: str = WITH_CHILD + PAUSE) -> tuple[GuardedProcess, list[int]]:
        process = self.start(code)
        eventually(lambda: len(process.pids()) == 2, "command and child run", timeout_s=10)
        return process, process.pids()

    def stop(self) -> None:
        for process in self._started:
            process.ask_to_stop()
            process.wait_stopped()


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.stop()


def test_a_stop_ends_children_in_other_sessions_and_removes_temporary_files(
    starter: Starter,
) -> None:
    process, pids = starter.start_family()
    assert any(starter.temp_dir.iterdir()), "TMPDIR is the process's own folder"
    process.ask_to_stop()
    assert process.wait_stopped() == 128 + signal.SIGTERM
    assert gone(pids)
    assert not starter.temp_dir.exists()


def test_the_end_of_the_command_ends_what_it_started_and_keeps_its_status(
    starter: Starter,
) -> None:
    process = starter.start(WITH_CHILD + "sys.exit(7)")
    eventually(lambda: process.status is not None, "the guard exits", timeout_s=10)
    assert process.status == 7
    assert process.pids() == []
    assert not starter.temp_dir.exists()


def test_files_and_folders_that_a_killed_command_leaves_elsewhere_are_removed(
    starter: Starter, tmp_path: Path
) -> None:
    file, folder, never_made = (tmp_path / name for name in ("file", "folder", "never-made"))
    code = f"import pathlib; pathlib.Path({str(file)!r}).touch(); "
    code += f"pathlib.Path({str(folder)!r}, 'deep').mkdir(parents=True); print('x', flush=True); "
    process = starter.start(code + PAUSE, leftovers=(file, folder, never_made))
    eventually(lambda: process.log_tail(1) == "x", "they are made", timeout_s=10)
    assert file.exists()
    assert folder.exists()
    process.kill()
    assert not file.exists()
    assert not folder.exists()


def test_leftovers_may_be_given_as_patterns(starter: Starter, tmp_path: Path) -> None:
    folder = tmp_path / "[it]"  # is meant literally
    folder.mkdir()
    made = [folder / name for name in ("tier_dp0.mmap", "tier_dp1.mmap", "other.mmap")]
    for path in made:
        path.touch()
    process = starter.start(PAUSE, leftovers=(folder / "tier_dp*.mmap",))
    process.ask_to_stop()
    process.wait_stopped()
    assert [path.exists() for path in made] == [False, False, True]


def test_the_removal_of_leftovers_has_time_of_its_own(
    starter: Starter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_GUARD_S_MAX", 0.0)
    folder = tmp_path / "folder"
    folder.mkdir()
    process = starter.start(PAUSE, grace_s=0.0, leftovers=(folder,))
    process.ask_to_stop()
    process.wait_stopped()
    assert not folder.exists()


def test_a_command_that_will_not_stop_is_killed_after_the_grace(starter: Starter) -> None:
    process = starter.start(STUBBORN, grace_s=0.2)
    eventually(lambda: process.log_tail(1) == "x", "it ignores SIGTERM", timeout_s=10)
    process.ask_to_stop()
    assert process.wait_stopped() == 128 + signal.SIGKILL


def test_a_kill_looks_like_a_crash_and_leaves_nothing(starter: Starter) -> None:
    process, pids = starter.start_family()
    process.kill()
    assert process.status == 128 + signal.SIGKILL
    assert gone(pids)
    assert not starter.temp_dir.exists()


def test_a_command_that_cannot_be_run_leaves_nothing(starter: Starter) -> None:
    process = GuardedProcess(
        ProcessSpec(
            name="it",
            argv=("/no/such/program",),
            environ=os.environ,
            log_file=starter.temp_dir.parent / "log",
            grace_s=1.0,
            temp_dir=starter.temp_dir,
        )
    )
    assert process.wait_stopped() != 0
    assert "/no/such/program" in process.log_tail(3)
    assert not starter.temp_dir.exists()


def test_kill_9_of_the_starter_ends_everything(tmp_path: Path) -> None:
    code = f"""
import os, signal, sys
from pathlib import Path
from tests.e2e.test_launch_guard import Starter
starter = Starter(Path({str(tmp_path)!r}))
process, pids = starter.start_family()
print(*pids, flush=True)
signal.pause()
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as other:
        assert other.stdout is not None
        pids = [int(pid) for pid in other.stdout.readline().split()]
        assert len(pids) == 2
        assert not gone(pids)
        other.kill()
    eventually(lambda: gone(pids), "the guard has ended them", timeout_s=20)
    eventually(lambda: not (tmp_path / "temp").exists(), "and removed their files", timeout_s=20)


def test_kill_9_of_the_guard_ends_the_command(starter: Starter) -> None:
    process = starter.start(PAUSE)
    eventually(lambda: len(process.pids()) == 1, "the command runs", timeout_s=10)
    pids = process.pids()
    os.kill(int(Path(f"/proc/{pids[0]}/stat").read_text().split()[3]), signal.SIGKILL)
    eventually(lambda: gone(pids), "the kernel has ended it", timeout_s=10)
    assert process.wait_stopped() == 128 + signal.SIGKILL
