"""What fault tests are made of: daemons and clients as processes, and bounded waiting."""

import contextlib
import ctypes
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from millpond.model.limits import MIB
from millpond.model.names import Coverage
from millpond.model.namespace import Namespace, PartSpec
from millpond.service.client import AdminClient, ReplicaIdentity

ROOT = Path(__file__).resolve().parents[2]
KEY_BYTES = 32
SLOT_BYTES = 64 * 1024
SIZE_BYTES = 16 * MIB
NUM_SLOTS = SIZE_BYTES // SLOT_BYTES
WAIT_S = 20.0
ARENA_NAME = "memfd:millpond-arena"


def namespace(**changes: object) -> Namespace:
    """Return a namespace with one part a block; ``changes`` are fields that differ."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "revision": "",
        "weights": "w",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "quantization": "",
        "block_tokens": 256,
        "engine_block_tokens": 16,
        "tensor_parallel_size": 1,
        "attention_backend": "cpu",
        "layout": "l",
        "hash_algorithm": "sha256",
        "hash_seed": "00",
        "engine": "vllm",
        "engine_version": "0.32",
        "parts": (PartSpec("pages", Coverage.EVERY, SLOT_BYTES),),
    }
    return Namespace(**(fields | changes))


def identity(replica: str, session_key: str, num_ranks: int = 1, **changes: object):  # noqa: ANN201
    """Return who a test's engine is."""
    return ReplicaIdentity(
        replica=replica,
        session_key=session_key,
        num_ranks=num_ranks,
        namespace=namespace(**changes),
    )


def keys(prefix: str, num_blocks: int) -> bytes:
    """Return the keys of ``num_blocks`` blocks of a prefix."""
    return b"".join(block_key(prefix, block) for block in range(num_blocks))


def block_key(prefix: str, block: int) -> bytes:
    """Return the key of one block."""
    return hashlib.sha256(f"{prefix}/{block}".encode()).digest()


def eventually(
    condition: Callable[[], bool], what: str | Callable[[], str], timeout_s: float = WAIT_S
) -> None:
    """Wait until ``condition`` holds, asking often, and fail by name if it does not."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            what = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout_s} s: {what}")
        pause.wait(0.01)


_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _die_with_the_test() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A process of a test that speaks JSON lines; killed at the end whatever happens."""

    def __init__(self, module: str, options: str | dict[str, Any]) -> None:
        argument = options if isinstance(options, str) else json.dumps(options)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe nobody reads fills up
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            preexec_fn=_die_with_the_test,  # noqa: PLW1509 - no other thread holds a lock then
        )
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=WAIT_S)
        self._errors.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """Return the next line that the process writes."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"process {self.pid} says nothing"
            data = os.read(fd, 65536)
            assert data, f"process {self.pid} has ended: {self.errors()}"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def has_line(self) -> bool:
        """Return whether the process has written something that nobody has read."""
        assert self.process.stdout is not None
        return bool(self._unread or select.select([self.process.stdout], [], [], 0)[0])

    def kill(self) -> None:
        """Kill -9, and wait until the process is gone."""
        self.process.kill()
        self.process.wait(WAIT_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stop is waited for."""
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            stat = Path(f"/proc/{self.pid}/stat")
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stopped")

    def output(self) -> str:
        """Return what a process that has ended said and nobody has read."""
        assert self.process.stdout is not None
        return (self._unread + self.process.stdout.read()).decode()

    def exit_code(self) -> int:
        """Return how the process ended; waits for it."""
        return self.process.wait(WAIT_S)

    def errors(self) -> str:
        """Return what the process has logged."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode()


class Daemon(Child):
    """A pool daemon in a process of its own."""

    def __init__(self, socket_path: str, *, size_bytes: int = SIZE_BYTES, **faults: object) -> None:
        self.socket_path = socket_path
        self.baseline: dict[str, int] = {}
        options = {"socket_path": socket_path, "size_bytes": size_bytes, **faults}
        super().__init__("tests.faults.daemon_main", options)

    def wait_ready(self) -> Self:
        """Wait until clients may connect."""
        line = self.line()
        assert line["event"] == "ready", line
        self.baseline = self.footprint()
        return self

    def admin(self) -> AdminClient:
        """Return a new operator's connection."""
        return AdminClient.connect(self.socket_path)

    def status(self) -> dict[str, Any]:
        """Return the daemon's statistics."""
        with self.admin() as admin:
            return admin.status()

    def num_slots(self, state: str) -> int:
        """Return how many slots of the tests' size are in ``state``."""
        sizes = self.status()["pool"]["slot_sizes"]
        return sum(size["num_slots"][state] for size in sizes)

    def check(self) -> None:
        """Check the pool's invariants."""
        with self.admin() as admin:
            admin.check()

    def footprint(self) -> dict[str, int]:
        """Return all that clients can leave behind in the daemon, but for committed blocks."""
        with self.admin() as admin:
            status: dict[str, Any] = admin.status()
            num_descriptors = len(list(Path(f"/proc/{self.pid}/fd").iterdir()))
        service, pool = status["service"], status["pool"]
        return {
            "reserved": pool["num_slots"]["reserved"],
            "quarantined": pool["num_slots"]["quarantined"],
            "leases": pool["num_leases"],
            "sessions": pool["num_sessions"],
            "orphans": len(service["orphans"]),
            "clients": len(service["clients"]),
            "descriptors": num_descriptors,
            "internal_errors": service["internal_errors"],
        }

    def settle(self) -> None:
        """Wait until nothing is left of clients that came after ``baseline`` was taken."""
        eventually(
            lambda: self.footprint() == self.baseline,
            lambda: f"{self.footprint()} is {self.baseline} again",
        )
        self.check()

    def arena_inode(self) -> int:
        """Return what tells this daemon's arena from others in /proc."""
        return next(_arena_descriptors(Path(f"/proc/{self.pid}"))).stat().st_ino

    def stop(self) -> None:
        """End in an orderly way and check that neither file nor memory is left."""
        inode = self.arena_inode()
        self.signal(signal.SIGTERM)
        assert self.exit_code() == 0, self.errors()
        assert list(Path(self.socket_path).parent.iterdir()) == []
        assert arena_holders(inode) == set()


class ClientProcess(Child):
    """An engine's scheduler and worker in a process that can be killed."""

    def __init__(self, socket_path: str) -> None:
        super().__init__("tests.faults.client_main", socket_path)

    def tell(self, do: str, **arguments: object) -> None:
        """Give a command and don't wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, do: str, **arguments: object) -> Any:  # noqa: ANN401
        """Give a command and return what it returned."""
        answer = self.attempt(do, **arguments)
        assert "ok" in answer, answer
        return answer["ok"]

    def attempt(self, do: str, **arguments: object) -> dict[str, Any]:
        """Give a command and return the whole answer, errors too."""
        self.tell(do, **arguments)
        return self.line()

    def engine(self, replica: str, session_key: str = "", **arguments: object) -> int:
        """Open a session and join it; return its number."""
        session_key = session_key or f"{replica}-{self.pid}"
        self.ask("open", replica=replica, session_key=session_key)
        return self.ask("join", replica=replica, session_key=session_key, **arguments)

    def store(self, prefix: str, num_blocks: int) -> None:
        """Write and commit a prefix; returns when it can be found."""
        lease = self.ask("reserve", prefix=prefix, num_blocks=num_blocks)["lease"]
        self.ask("finish", lease=lease)
        eventually(
            lambda: self.ask("lookup", prefix=prefix, num_blocks=num_blocks) == [num_blocks, "hit"],
            f"prefix {prefix} committed",
        )


def arena_holders(inode: int) -> set[int]:
    """Return the processes that have an arena mapped or open."""
    holders: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            mapped = {
                line.split()[4]
                for line in (process / "maps").read_text().splitlines()
                if ARENA_NAME in line
            }
            opened = {fd.stat().st_ino for fd in _arena_descriptors(process)}
            if str(inode) in mapped or inode in opened:
                holders.add(int(process.name))
    return holders


def _arena_descriptors(process: Path) -> Iterator[Path]:
    for fd in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if ARENA_NAME in str(fd.readlink()):
                yield fd


def short_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder whose name leaves room for a socket's."""
    return tempfile.TemporaryDirectory(prefix="mp-")
