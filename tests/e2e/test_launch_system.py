"""Starting and stopping as one system, with a real pool and engines that only seem to be."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.config import PoolConfig
from millpond.launch import system as system_module
from millpond.launch.front import FrontOptions
from millpond.launch.replica import ReplicaSpec
from millpond.launch.resources import pick_ports
from millpond.launch.rivals import Lmcache, RivalName, RivalOptions, VllmFs
from millpond.launch.system import ProcessState, System, SystemOptions
from millpond.model.errors import SetupError
from millpond.model.limits import MIB
from millpond.service.client import AdminClient, MemoryState
from tests.waiting import eventually

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


@pytest.fixture(autouse=True)
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def argv(spec: ReplicaSpec) -> tuple[str, ...]:
        return (sys.executable, str(FAKE_ENGINE), str(spec.port), *spec.engine_args)

    monkeypatch.setattr(system_module, "engine_argv", argv)


@pytest.fixture
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for all temporary files, so that what is left behind can be seen."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def options(temp_dir: Path, **changes: object) -> SystemOptions:
    fields: dict[str, object] = {
        "model": "none",
        "num_replicas": 2,
        "device": "cpu",
        "environ": {**os.environ, "TMPDIR": str(temp_dir)},
        "pool": PoolConfig(temp_dir / "p.sock", 16 * MIB, None),
        "start_timeout_s": 30.0,
        "stop_grace_s": 5.0,
    }
    return SystemOptions(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def with_front(temp_dir: Path, **changes: object) -> SystemOptions:
    front = FrontOptions(policy="round-robin", admin_socket=temp_dir / "r.sock", stop_grace_s=5.0)
    return options(temp_dir, front=front, **changes)


def served_by(system: System) -> str:
    """Return who answers a request to the router."""
    answer = httpx.get(f"{system.front.api_url}/models", trust_env=False, timeout=10)
    assert answer.is_success
    return answer.headers["x-millpond-replica"]


def all_pids(system: System) -> list[int]:
    processes = [system.pool_process, *(replica.process for replica in system.replicas)]
    return [pid for process in processes for pid in process.pids()]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def note_stops(system: System, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets who is asked to stop, and out of how many that still run."""
    stopped: list[str] = []
    honest = system_module.GuardedProcess.ask_to_stop

    def noted(process: system_module.GuardedProcess) -> None:
        others = [name for name, other in system._processes().items() if other.status is None]
        if process.spec.name in others:  # waiting for its end asks once more
            stopped.append(f"{process.spec.name} of {len(others)}")
        honest(process)

    monkeypatch.setattr(system_module.GuardedProcess, "ask_to_stop", noted)
    return stopped


def test_a_system_is_ready_when_it_is_started_and_gone_when_it_is_stopped(temp_dir: Path) -> None:
    seen: list[Sequence[ProcessState]] = []
    with System(options(temp_dir), on_progress=seen.append) as system:
        pids = all_pids(system)
        assert len(pids) == 1 + 2 * 2
        assert [replica.name for replica in system.replicas] == ["a", "b"]
        assert all(replica.is_healthy() for replica in system.replicas)
        with AdminClient.connect(str(system.socket)) as admin:
            admin.check()
        assert system.wait_for_death(0.0) is None
        assert any(temp_dir.iterdir())
    assert not any(map(exists, pids))
    assert list(temp_dir.iterdir()) == []
    assert [state.name for state in seen[-1]] == ["pool", "a", "b"]
    assert all(state.is_ready for state in seen[-1])


def test_logs_stay_where_they_were_asked_for(temp_dir: Path, tmp_path: Path) -> None:
    with System(options(temp_dir, run_dir=tmp_path / "logs")):
        pass
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert names == ["pool.log", "replica-a.log", "replica-b.log"]


def test_a_replica_that_ends_at_start_stops_all_and_shows_its_log(temp_dir: Path) -> None:
    system = System(options(temp_dir, replica_args={"b": ("ends-at-once",)}))
    with pytest.raises(SetupError, match=r"(?s)b ended with status 1.*nowhere to be found"):
        system.start()
    assert all_pids(system) == []
    assert list(temp_dir.iterdir()) == [system.run_dir], "only the logs are left, to be read"


def test_a_replica_that_does_not_get_ready_stops_all_after_the_time(temp_dir: Path) -> None:
    system = System(options(temp_dir, replica_args={"b": ("never-healthy",)}, start_timeout_s=5.0))
    with pytest.raises(SetupError, match=r"not ready after 5 s: b\..*--start-timeout"):
        system.start()
    assert all_pids(system) == []


def test_a_pool_that_cannot_start_is_named(temp_dir: Path) -> None:
    pool = PoolConfig(temp_dir / "p.sock", 2**50, None)
    with pytest.raises(SetupError, match=r"(?s)pool ended with status 3.*does not fit"):
        System(options(temp_dir, pool=pool)).start()


def test_an_interrupt_during_the_start_leaves_nothing(temp_dir: Path) -> None:
    def interrupt(_states: Sequence[ProcessState]) -> None:
        raise KeyboardInterrupt

    system = System(options(temp_dir), on_progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        system.start()
    assert all_pids(system) == []
    assert list(temp_dir.iterdir()) == []


def test_a_death_is_noticed_and_told(temp_dir: Path) -> None:
    with System(options(temp_dir)) as system:
        system.kill_replica("b")
        assert system.wait_for_death(10.0) == "b"
        assert "b ended with status 137" in system.obituary("b")


def test_a_killed_replica_comes_back_at_its_address(temp_dir: Path) -> None:
    with System(options(temp_dir)) as system:
        before = system.replica("b")
        system.kill_replica("b")
        assert not before.is_healthy()
        after = system.restart_replica("b")
        assert after.url == before.url
        assert after.is_healthy()
        assert system.wait_for_death(0.0) is None


def memory_is(monkeypatch: pytest.MonkeyPatch, *states: MemoryState) -> list[MemoryState]:
    """Have pools tell of their memory so, one state after the other; return what is left."""
    left = list(states)
    monkeypatch.setattr(AdminClient, "memory", lambda _: left.pop(0))
    return left


COMING = MemoryState(2, 1, None)
COMPLETE = MemoryState(2, 2, None)
RAN_OUT = MemoryState(2, 1, "the kernel has no more")


def test_a_pool_is_ready_when_it_serves_or_when_it_has_all_memory(
    temp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = memory_is(monkeypatch, COMING, COMING, COMPLETE)
    with System(options(temp_dir, num_replicas=0)):
        assert left == [COMING, COMPLETE]
    with System(options(temp_dir, num_replicas=0, needs_whole_pool=True)):
        assert left == []


def test_a_pool_that_is_needed_whole_and_gets_no_more_memory_is_an_error(
    temp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_is(monkeypatch, RAN_OUT)
    system = System(options(temp_dir, num_replicas=0, needs_whole_pool=True))
    with pytest.raises(SetupError, match="the kernel has no more"):
        system.start()
    assert system.wait_for_death(0.0) == "pool"


def test_a_killed_pool_comes_back_at_its_socket(temp_dir: Path) -> None:
    with System(options(temp_dir, num_replicas=0)) as system:
        with AdminClient.connect(str(system.socket)) as admin:
            epoch = admin.welcome.epoch
        system.kill_pool()
        assert system.wait_for_death(0.0) == "pool"
        system.restart_pool()
        with AdminClient.connect(str(system.socket)) as admin:
            assert admin.welcome.epoch != epoch


def test_engines_without_a_pool_can_be_started_too(temp_dir: Path) -> None:
    with System(options(temp_dir, pool=None, num_replicas=1)) as system:
        assert system.replica("a").is_healthy()
        with pytest.raises(ValueError, match="no pool"):
            _ = system.socket
    eventually(lambda: list(temp_dir.iterdir()) == [], "nothing is left", timeout_s=5)


# ---------------------------------------------------------------- another cache in its place


def with_rival(temp_dir: Path, name: RivalName, **changes: object) -> SystemOptions:
    rival = RivalOptions(name=name, size_bytes=16 * MIB, files_in=temp_dir)
    return options(temp_dir, pool=None, rival=rival, **changes)


def seemingly(kind: str):  # noqa: ANN201
    """Return the command of what only seems to be LMCache's server."""

    def argv(lmcache: Lmcache, python: Path) -> tuple[str, ...]:
        return (str(python), str(FAKE_ENGINE), str(lmcache.http_port), kind)

    return argv


def test_lmcaches_server_starts_with_its_replicas_and_ends_after_them(
    temp_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lmcache, "server_argv", seemingly("healthy"))
    seen: list[Sequence[ProcessState]] = []
    logs = tmp_path / "logs"
    system = System(with_rival(temp_dir, "lmcache", run_dir=logs), on_progress=seen.append)
    with system:
        assert [state.name for state in seen[-1]] == ["lmcache", "a", "b"]
        assert all(state.is_ready for state in seen[-1])
        processes = system._processes()
        pids = [pid for process in processes.values() for pid in process.pids()]
        assert len(pids) == 3 * 2
        stopped = note_stops(system, monkeypatch)
    assert stopped == ["a of 3", "b of 3", "lmcache of 1"]
    assert not any(map(exists, pids))
    assert list(temp_dir.iterdir()) == []
    assert (logs / "lmcache.log").exists()


def test_a_server_that_ends_at_start_stops_all_and_shows_its_log(
    temp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lmcache, "server_argv", seemingly("ends-at-once"))
    system = System(with_rival(temp_dir, "lmcache"))
    with pytest.raises(SetupError, match=r"(?s)lmcache ended with status 1.*nowhere to be found"):
        system.start()
    assert all(process.pids() == [] for process in system._processes().values())


def test_a_server_that_does_not_get_ready_stops_all_after_the_time(
    temp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lmcache, "server_argv", seemingly("never-healthy"))
    system = System(with_rival(temp_dir, "lmcache", start_timeout_s=3.0))
    with pytest.raises(SetupError, match=r"not ready after 3 s: lmcache\."):
        system.start()
    assert all(process.pids() == [] for process in system._processes().values())


def test_files_of_vllms_tier_are_gone_with_the_replicas(temp_dir: Path) -> None:
    with System(with_rival(temp_dir, "vllm-fs")) as system:
        assert isinstance(system.rival, VllmFs)
        folder = system.rival.files / "model_0" / "abc"
        folder.mkdir(parents=True)
        (folder / "0.bin").touch()
        system.kill_replica("a")
        (system.rival.files / "late").mkdir(parents=True)  # of the replica that is left
    assert list(temp_dir.iterdir()) == []


def test_another_cache_is_no_pool_and_needs_replicas(temp_dir: Path) -> None:
    for changes in ({"pool": PoolConfig(temp_dir / "p", MIB, None)}, {"num_replicas": 0}):
        with pytest.raises(ValueError, match="in place of a pool"):
            System(replace(with_rival(temp_dir, "vllm-fs"), **changes))


# ---------------------------------------------------------------- the router


def test_a_system_with_a_router_is_ready_when_all_replicas_get_requests(temp_dir: Path) -> None:
    seen: list[Sequence[ProcessState]] = []
    with System(with_front(temp_dir), on_progress=seen.append) as system:
        pids = [*all_pids(system), *system.front.process.pids()]
        assert [served_by(system) for _ in range(4)] in (list("abab"), list("baba"))
        assert [state.name for state in seen[-1]] == ["pool", "a", "b", "router"]
        for states in seen:
            ready = {state.name for state in states if state.is_ready}
            assert "router" not in ready or ready == {"pool", "a", "b", "router"}
        page = httpx.get(system.front.page_url, trust_env=False, timeout=10)
        assert page.headers["content-type"].startswith("text/html")
        access_log = system.front.access_log
        assert access_log.parent == system.run_dir
        eventually(lambda: access_log.read_text().count("/v1/models") == 4, "logged", timeout_s=10)
    assert not any(map(exists, pids))
    assert list(temp_dir.iterdir()) == []


def test_requests_go_on_without_a_killed_replica_and_to_it_once_it_is_back(temp_dir: Path) -> None:
    with System(with_front(temp_dir)) as system:
        system.kill_replica("b")
        assert {served_by(system) for _ in range(4)} == {"a"}
        system.restart_replica("b")
        eventually(lambda: served_by(system) == "b", "b gets requests again", timeout_s=10)


def test_the_router_stops_first_and_the_pool_last(
    temp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(with_front(temp_dir))
    system.start()
    stopped = note_stops(system, monkeypatch)
    try:
        system.stop()
    finally:
        shutil.rmtree(system.run_dir)
    # Each is asked when those before it have ended; engines side by side.
    assert stopped == ["router of 4", "a of 3", "b of 3", "pool of 1"]


def test_what_is_raised_while_the_router_stops_leaves_nothing_running(
    temp_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(with_front(temp_dir))
    system.start()
    pids = [*all_pids(system), *system.front.process.pids()]
    honest = system_module.GuardedProcess.wait_stopped

    def interrupted(process: system_module.GuardedProcess) -> int:
        status = honest(process)
        if process.spec.name == "router":
            raise KeyboardInterrupt
        return status

    try:
        with monkeypatch.context() as patched:
            patched.setattr(system_module.GuardedProcess, "wait_stopped", interrupted)
            with pytest.raises(KeyboardInterrupt):
                system.stop()
        assert not any(map(exists, pids))
    finally:
        system.stop()
        shutil.rmtree(system.run_dir)


def test_a_router_needs_something_to_stand_before(temp_dir: Path) -> None:
    for changes in ({"pool": None}, {"num_replicas": 0}):
        with pytest.raises(ValueError, match="before a pool and replicas"):
            System(with_front(temp_dir, **changes))


def test_up_ends_with_the_obituary_of_a_router_that_dies(
    temp_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = System.wait_for_death

    def kill_router_first(system: System, timeout_s: float) -> str | None:
        system.front.process.kill()
        return honest(system, timeout_s)

    monkeypatch.setattr(System, "wait_for_death", kill_router_first)
    argv = ["up", "--model", "none", "--pool", "16MiB", "--device", "cpu"]
    port = pick_ports(3, None)[0]
    argv += ["--port", str(port), "--policy", "alternate", "--socket", str(temp_dir / "p.sock")]
    assert run(argv, {**os.environ, "TMPDIR": str(temp_dir)}) == Exit.AWAY
    printed = capsys.readouterr()
    assert "router ended with status 137" in printed.err
    assert "router by alternate" in printed.err, "what the router itself has logged"
    urls = [word for word in printed.out.split() if word.startswith("http://")]
    base = "http://127.0.0.1"
    assert urls == [
        *(f"{base}:{port}/v1", f"{base}:{port}/millpond"),
        *(f"{base}:{port + 1}", f"{base}:{port + 2}"),
    ]
