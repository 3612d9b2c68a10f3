"""Runs one command and answers for every process that comes of it.

    python -m millpond.launch.guard '{"argv": [...], ...}'

An engine starts processes that start processes; when the first is killed, the others stay,
with their memory and their temporary files. So each command runs below a guard that ends them
all, removes the command's temporary folder and what else it would leave behind, and only then
exits, with the command's status:

- when the command ends by itself or is killed,
- when the guard gets SIGTERM or SIGHUP,
- when whoever started the guard is gone, however it died: the guard's *lifeline* is the read
  end of a pipe whose write end only the starter holds.

When the guard itself is killed, the kernel kills the command.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_KILL_S_MAX: Final = 10.0
"""How long killed processes may take to disappear before the guard gives up on them."""
_TRACKER_S_MAX: Final = 2.0
"""How long a resource tracker of Python may take to remove shared memory of killed processes."""
_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSpec:
    """What to run and how to end it. ``cores`` None leaves the CPU affinity as it is.

    ``leftovers`` are files and folders that the command may have made elsewhere; their names, not
    their folders, may be patterns.
    """

    argv: tuple[str, ...]
    lifeline_fd: int
    grace_s: float
    temp_dir: str | None = None
    leftovers: tuple[str, ...] = ()
    cores: tuple[int, ...] | None = None

    def encode(self) -> str:
        """Return the text that is the guard's one argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "GuardSpec":
        """Return the spec that ``encode`` wrote."""
        fields = json.loads(text)
        fields["argv"] = tuple(fields["argv"])
        fields["leftovers"] = tuple(fields["leftovers"])
        fields["cores"] = None if fields["cores"] is None else tuple(fields["cores"])
        return cls(**fields)


def main() -> int:
    """Run the guard; returns the command's status as a shell would report it."""
    spec = GuardSpec.decode(sys.argv[1])
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if spec.cores is not None:
        os.sched_setaffinity(0, spec.cores)
    wake_fd = _wake_on_signals()
    try:
        family = _Family(_spawn(spec))
        stop_asked = _wait_for_end(family, spec.lifeline_fd, wake_fd)
        family.end(spec.grace_s if stop_asked else 0.0)
    finally:
        for path in _left_behind(spec):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # a folder, which is gone, or nothing at all
                path.unlink()
    return family.status


def _left_behind(spec: GuardSpec) -> list[Path]:
    own = [] if spec.temp_dir is None else [Path(spec.temp_dir)]
    return own + [
        path for each in map(Path, spec.leftovers) for path in each.parent.glob(each.name)
    ]


def descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, parents before their children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                # "pid (name) state parent ...", where the name may hold anything.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    fresh = [pid]
    while fresh:
        fresh = [child for parent in fresh for child in children.get(parent, ())]
        found += fresh
    return found


def shell_status(exit_code: int) -> int:
    """Return Python's exit code as a shell reports it: death by signal n is 128 + n."""
    return exit_code if exit_code >= 0 else 128 - exit_code


class _Family:
    """The command and all that came of it; orphans become children of the guard."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._wait_status: int | None = None

    @property
    def status(self) -> int:
        if self._wait_status is None:
            return 1
        return shell_status(os.waitstatus_to_exitcode(self._wait_status))

    def command_ended(self) -> bool:
        self._reap()
        return self._wait_status is not None

    def end(self, grace_s: float) -> None:
        """Ask the command to end, then the rest, then kill what is left."""
        deadline = time.monotonic() + grace_s
        if not self.command_ended():
            _signal([self._pid], signal.SIGTERM)
            while not self.command_ended() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        if grace_s:
            _signal(self._left(), signal.SIGTERM)
        self._wait_gone(deadline)
        # Trackers last: they remove the shared memory that the others leave behind.
        _signal((pid for pid in self._left() if not _is_tracker(pid)), signal.SIGKILL)
        self._wait_gone(time.monotonic() + _TRACKER_S_MAX)
        deadline = time.monotonic() + _KILL_S_MAX
        while (left := self._left()) and time.monotonic() < deadline:
            _signal(left, signal.SIGKILL)
            time.sleep(_POLL_S)

    def _wait_gone(self, deadline: float) -> None:
        while self._left() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _left(self) -> list[int]:
        self._reap()
        return descendants(os.getpid())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._wait_status = status


def _spawn(spec: GuardSpec) -> int:
    # A session of its own: a Ctrl-C in the terminal goes to the starter only, which decides.
    process = subprocess.Popen(
        spec.argv,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_die_with_guard,  # noqa: PLW1509 - the guard has one thread
    )
    process.returncode = 0  # reaped by _Family; keeps Popen from waiting for it as well
    return process.pid


def _die_with_guard() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wake_on_signals() -> int:
    """Return a descriptor that gets a byte, the signal's number, for each signal."""
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return read_fd


def _wait_for_end(family: _Family, lifeline_fd: int, wake_fd: int) -> bool:
    """Wait until the command has ended (False) or should be ended (True)."""
    while not family.command_ended():
        ready, _, _ = select.select([lifeline_fd, wake_fd], [], [])
        if lifeline_fd in ready:
            return True
        signals = os.read(wake_fd, 256)
        if signal.SIGTERM in signals or signal.SIGHUP in signals:
            return True
    return False


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    sys.exit(main())
