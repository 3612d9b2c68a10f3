"""Commands against a running daemon."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.config import PoolConfig
from millpond.launch.system import System, SystemOptions
from millpond.model.limits import MIB

WAIT_S = 20.0
LEFT_ALTERNATE_SCREEN = b"\x1b[?1049l"
CURSOR_SHOWN = b"\x1b[?25h"


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """A daemon that runs, without replicas."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        pool = PoolConfig(Path(folder, "p.sock"), 16 * MIB, None)
        options = SystemOptions(
            model="", num_replicas=0, device="cpu", environ=os.environ, pool=pool
        )
        with System(options) as running:
            yield running


@pytest.fixture
def environ(system: System) -> dict[str, str]:
    """The environment of commands: it names the daemon's socket."""
    return {"MILLPOND_SOCKET": str(system.socket)}


@dataclass
class Terminal:
    """A command whose output goes to ``fd``, and all that it has written so far."""

    process: subprocess.Popen[bytes]
    fd: int | None
    written: bytes = b""
    seen: int = 0

    def wait_for(self, text: str) -> None:
        """Read until ``text`` appears after what was waited for before."""
        deadline = time.monotonic() + WAIT_S
        while (found := self.written.find(text.encode(), self.seen)) < 0:
            assert time.monotonic() < deadline, (text, self.written[self.seen :])
            self._read()
        self.seen = found + len(text)

    def close(self) -> None:
        """Read no more. Idempotent."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def end(self) -> int:
        """Interrupt the command as Ctrl-C does and return its status."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(WAIT_S)
        with contextlib.suppress(OSError):  # a terminal without a writer is an error on Linux
            while self._read():
                continue
        return code

    def _read(self) -> bytes:
        assert self.fd is not None
        ready, _, _ = select.select([self.fd], [], [], 0.1)
        data = os.read(self.fd, 65_536) if ready else b""
        self.written += data
        return data


@contextlib.contextmanager
def started(
    argv: Sequence[str], environ: dict[str, str], fds: tuple[int, int]
) -> Iterator[Terminal]:
    ours, theirs = fds  # of a pipe the second is written to; of a terminal either
    process = subprocess.Popen(
        [sys.executable, "-m", "millpond.cli", *argv],
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "60", **environ},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs)
    terminal = Terminal(process, ours)
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        terminal.close()


def status(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run(["status", "--json"], environ) == Exit.OK
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "millpond status --json"
    return document["data"]["pool"]


def test_status_is_a_table_or_json(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["status"], environ) == Exit.OK
    assert "Pool is on" in capsys.readouterr().out
    assert status(environ, capsys)["num_blocks"] == 0


def test_a_pool_is_switched_off_and_on(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pool", "off"], environ) == Exit.OK
    assert capsys.readouterr().out == "pool is off\n"
    assert status(environ, capsys)["enabled"] is False
    assert run(["pool", "on"], environ) == Exit.OK
    assert capsys.readouterr().out == "pool is on\n"
    assert status(environ, capsys)["enabled"] is True


def test_a_pool_is_flushed_and_checked(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pool", "flush"], environ) == Exit.OK
    assert run(["check"], environ) == Exit.OK
    assert "invariants hold" in capsys.readouterr().out


def test_requests_that_nobody_made_are_not_found(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["requests", "--json"], environ) == Exit.OK
    assert json.loads(capsys.readouterr().out)["data"] == {"requests": []}
    assert run(["requests", "mine"], environ) == Exit.NO
    assert "'mine'" in capsys.readouterr().err


def test_a_served_socket_is_not_served_twice(
    environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pool", "--size", "16MiB"], environ) == Exit.SETUP
    assert environ["MILLPOND_SOCKET"] in capsys.readouterr().err


def test_the_pool_is_inspected(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", "--json"], environ) == Exit.OK
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["invariants"], data["num_blocks"], data["prefixes"]) == ("hold", 0, [])
    assert run(["inspect", "--key", "00"], environ) == Exit.NO
    assert "pool's 0 blocks" in capsys.readouterr().err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_watch_outlives_the_daemon_and_leaves_the_terminal_clean(
    system: System, environ: dict[str, str], *, is_terminal: bool
) -> None:
    fds = pty.openpty() if is_terminal else os.pipe()
    with started(["status", "--watch", "0.1"], environ, fds) as terminal:
        terminal.wait_for("Pool is on" if is_terminal else "pool=on")
        system.kill_pool()
        terminal.wait_for("aemon is away for")
        system.restart_pool()
        terminal.wait_for("a new daemon")
        terminal.wait_for("Pool is on" if is_terminal else "pool=on")
        assert terminal.end() == Exit.INTERRUPTED
    if is_terminal:
        assert LEFT_ALTERNATE_SCREEN in terminal.written
        assert CURSOR_SHOWN in terminal.written[terminal.written.rindex(b"Pool is on") :]
    else:
        assert b"\x1b" not in terminal.written
        assert terminal.written.endswith(b"\n")


def test_a_watch_ends_quietly_when_its_reader_does(environ: dict[str, str]) -> None:
    with started(["status", "--watch", "0.1"], environ, os.pipe()) as terminal:
        terminal.wait_for("pool=on")
        terminal.close()
        assert terminal.process.wait(WAIT_S) == Exit.OK
