"""Starting and stopping as one system, with a real pool and engines that only seem to be."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from millpond.config import PoolConfig
from millpond.launch import system as system_module
from millpond.launch.replica import ReplicaSpec
from millpond.launch.system import ProcessState, System, SystemOptions
from millpond.model.errors import SetupError
from millpond.model.limits import MIB
from millpond.service.client import AdminClient
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


def all_pids(system: System) -> list[int]:
    processes = [system.pool_process, *(replica.process for replica in system.replicas)]
    return [pid for process in processes for pid in process.pids()]


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


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
    system = System(options(temp_dir, replica_args={"b": ("never-healthy",)}, start_timeout_s=2.0))
    with pytest.raises(SetupError, match=r"not ready after 2 s: b\..*--start-timeout"):
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
