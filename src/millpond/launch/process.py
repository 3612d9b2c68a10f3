"""One guarded process as its starter sees it: a log, a lifeline, an end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millpond.launch.guard import GuardSpec, descendants, shell_status

_GUARD_S_MAX: Final = 20.0
"""Beyond the grace: how long a guard may take to kill its processes and exit."""
_LEFTOVERS_S_MAX: Final = 300.0
"""How long it may take to remove leftovers besides: the kernel frees some GB a second of files in
memory, and a guard that is killed meanwhile leaves the rest there."""
_TAIL_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start. ``temp_dir`` is created, becomes TMPDIR, and is removed at the end.

    So are ``leftovers``, files and folders that the command makes elsewhere; their names, not
    their folders, may be patterns.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    log_file: Path
    grace_s: float
    temp_dir: Path | None = None
    leftovers: tuple[Path, ...] = ()
    cores: tuple[int, ...] | None = None


class GuardedProcess:
    """A running command below its guard. Its output is appended to ``spec.log_file``."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        environ = dict(spec.environ)
        if spec.temp_dir is not None:
            spec.temp_dir.mkdir(parents=True, exist_ok=True)
            environ["TMPDIR"] = str(spec.temp_dir)
        lifeline_fd, own_fd = os.pipe()
        self._lifeline_fd: int | None = own_fd
        guard = GuardSpec(
            argv=spec.argv,
            lifeline_fd=lifeline_fd,
            grace_s=spec.grace_s,
            temp_dir=None if spec.temp_dir is None else str(spec.temp_dir),
            leftovers=tuple(map(str, spec.leftovers)),
            cores=spec.cores,
        )
        with spec.log_file.open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "millpond.launch.guard", guard.encode()],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(lifeline_fd,),
                start_new_session=True,
            )
        os.close(lifeline_fd)
        self.started_at = time.monotonic()

    @property
    def status(self) -> int | None:
        """Exit status as a shell would report it; None while it runs."""
        code = self._guard.poll()
        return None if code is None else shell_status(code)

    def pids(self) -> list[int]:
        """Return the command's process and all that came of it, the command first."""
        return descendants(self._guard.pid)

    def kill(self) -> None:
        """Kill the command and all that came of it at once, as a crash would; wait for the end.

        Raises ``TimeoutError`` when the guard does not exit.
        """
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_stopped()

    def ask_to_stop(self) -> None:
        """Let go of the lifeline: the guard ends everything, after at most the grace."""
        if self._lifeline_fd is not None:
            os.close(self._lifeline_fd)
            self._lifeline_fd = None

    def wait_stopped(self) -> int:
        """Wait for the guard's end and return the status; bounded by the grace and a margin."""
        margin_s = _GUARD_S_MAX + (_LEFTOVERS_S_MAX if self.spec.leftovers else 0.0)
        try:
            code = self._guard.wait(self.spec.grace_s + margin_s)
        except subprocess.TimeoutExpired:
            self._guard.kill()  # the kernel kills the command then
            self._guard.wait()
            raise TimeoutError(f"{self.spec.name} did not end; its guard was killed") from None
        finally:
            self.ask_to_stop()
        return shell_status(code)

    def log_tail(self, num_lines: int) -> str:
        """Return the last lines of the log."""
        with self.spec.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-num_lines:])
