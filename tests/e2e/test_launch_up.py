"""``millpond up`` with a real engine: it serves, and nothing is left however it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from millpond.cli.exits import Exit
from millpond.launch.guard import descendants
from millpond.launch.resources import pick_ports
from millpond.launch.tiny import make_attention, make_hybrid
from millpond.service.client import AdminClient
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)


@contextmanager
def up(
    model: str, folder: Path, *options: str, num_replicas: int = 1
) -> Iterator[subprocess.Popen[str]]:
    (folder / "temp").mkdir()
    argv = [sys.executable, "-m", "millpond.cli", "up", "--model", model]
    argv += ["--replicas", str(num_replicas), *options]
    argv += ["--pool", "16MiB", "--socket", str(folder / "up.sock"), "--run-dir", str(folder)]
    argv += ["--port", str(pick_ports(2, None)[0])]
    argv += ["--", "--max-model-len", "2048"]
    process = subprocess.Popen(
        argv,
        env={**os.environ, "TMPDIR": str(folder / "temp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_attention(tmp_path_factory.mktemp("model"), seed=1).path)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, for a socket's path has a limit."""
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        yield Path(name)


def shared_memory(pids: list[int]) -> set[Path]:
    """Return the files of /dev/shm that these processes have mapped."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(word) for word in maps.split() if word.startswith("/dev/shm/")}


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """Return what was printed up to the line with ``word``."""
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if word in line:
            return text
    raise AssertionError(f"{word!r} was not printed, only {text!r}")


def test_ctrl_c_stops_a_system_that_serves(model: str, folder: Path) -> None:
    with up(model, folder) as process:
        text = read_until(process, "ready after")
        url = next(word for word in text.split() if word.startswith("http://"))
        assert url.endswith("/v1"), "the router's address comes first"
        assert str(folder / "up.sock") in text
        body = {"model": model, "prompt": list(range(20, 60)), "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/completions", json=body, trust_env=False, timeout=60)
        assert answer.is_success, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert answer.headers["x-millpond-replica"] == "a"
        pids = descendants(process.pid)
        assert len(pids) > 6, "guards, daemon, router, engine and its processes"
        shared = shared_memory(pids)
        assert shared, "the engine has some"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == Exit.INTERRUPTED
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(path.exists() for path in shared)
    assert list((folder / "temp").iterdir()) == []
    logs = ["pool.log", "replica-a.log", "router.jsonl", "router.log"]
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == logs
    lines = [json.loads(line) for line in (folder / "router.jsonl").read_text().splitlines()]
    (attribution,) = (each["attribution"] for each in lines if each["path"] == "/v1/completions")
    assert attribution["source"] == "pool", "reported by the replica"
    assert attribution["computed_tokens"] == 40


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, Exit.TERMINATED), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_system_that_is_still_starting_can_be_ended(
    model: str, folder: Path, number: int, code: int
) -> None:
    with up(model, folder) as process:
        log = folder / "replica-a.log"
        eventually(
            lambda: log.exists() and "vllm" in log.read_text().lower(),
            "the engine logs something",
            timeout_s=120,
        )
        pids = descendants(process.pid)
        os.kill(process.pid, number)
        process.communicate(timeout=60)
        assert process.returncode == code
    eventually(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids),
        "all processes have ended",
        timeout_s=60,
    )
    assert list((folder / "temp").iterdir()) == []


@pytest.mark.engines
def test_a_hybrid_shares_without_being_told_anything(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Left alone, vLLM keeps no state of a prompt that it sees for the first time."""
    hybrid = str(make_hybrid(tmp_path_factory.mktemp("hybrid"), seed=1).path)
    ids = [20 + i * i % 1999 for i in range(3 * 256 + 40)]
    body = {"model": hybrid, "prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with up(hybrid, folder, "--policy", "round-robin", num_replicas=2) as process:
        text = read_until(process, "ready after")
        url = next(word for word in text.split() if word.startswith("http://"))

        def ask() -> httpx.Response:
            answer = httpx.post(f"{url}/completions", json=body, trust_env=False, timeout=120)
            return answer.raise_for_status()

        with AdminClient.connect(str(folder / "up.sock"), timeout_s=30) as admin:
            eventually(
                lambda: (
                    {(c["replica"], c["role"]) for c in admin.status()["service"]["clients"]}
                    >= {(name, role) for name in "ab" for role in ("scheduler", "worker")}
                ),
                "both replicas have joined",
                timeout_s=30,
            )
            cold = ask()
            eventually(
                lambda: admin.status()["pool"]["num_write_leases"] == 0, "stored", timeout_s=30
            )
        moved = ask()
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    assert "--block-size 256  (a state needs 256 tokens of pages" in printed
    replicas = {answer.headers["x-millpond-replica"] for answer in (cold, moved)}
    assert replicas == {"a", "b"}
    assert moved.json()["choices"][0]["text"] == cold.json()["choices"][0]["text"]
    lines = [json.loads(line) for line in (folder / "router.jsonl").read_text().splitlines()]
    loaded = [
        each["attribution"]["loaded_tokens"] for each in lines if each["path"] == "/v1/completions"
    ]
    assert loaded == [0, 3 * 256]
