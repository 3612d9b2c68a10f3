"""A replica's command line and environment: the user's word has precedence."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from millpond.launch.replica import ReplicaSpec, engine_argv, engine_environ


def spec(**changes: object) -> ReplicaSpec:
    fields: dict[str, object] = {"name": "a", "model": "m", "port": 1, "cores": (3, 4)}
    return ReplicaSpec(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def value_after(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


def test_the_connector_gets_name_and_socket() -> None:
    argv = engine_argv(spec(socket=Path("/s"), connector={"store": False}))
    config = json.loads(value_after(argv, "--kv-transfer-config"))
    assert config["kv_connector"] == "MillpondConnector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"replica": "a", "socket": "/s", "store": False}


def test_without_a_pool_the_engine_is_a_plain_one() -> None:
    assert "--kv-transfer-config" not in engine_argv(spec())


def test_engine_arguments_come_last_and_replace_defaults() -> None:
    argv = engine_argv(spec(engine_args=("--no-enable-prefix-caching", "--dtype=half")))
    assert argv[-2:] == ("--no-enable-prefix-caching", "--dtype=half")
    assert "--enable-prefix-caching" not in argv
    assert "--enable-prefix-caching" in engine_argv(spec())


@pytest.mark.parametrize("written", ["--no_enable_prefix_caching", "--no-enable-prefix"])
def test_defaults_are_replaced_however_vllm_lets_them_be_written(written: str) -> None:
    assert "--enable-prefix-caching" not in engine_argv(spec(engine_args=(written,)))


def test_only_cpus_run_eagerly() -> None:
    assert "--enforce-eager" in engine_argv(spec())
    assert "--enforce-eager" not in engine_argv(spec(cores=None, gpus=("0",)))
    assert "--enforce-eager" not in engine_argv(spec(engine_args=("--no-enforce-eager",)))


def test_gpus_are_shown_to_the_replica_that_got_them() -> None:
    environ = engine_environ(spec(cores=None, gpus=("2", "3")), {"A": "1"})
    assert environ == {"A": "1", "CUDA_VISIBLE_DEVICES": "2,3"}


def test_threads_follow_the_cores_unless_the_user_says_otherwise() -> None:
    assert engine_environ(spec(), {})["OMP_NUM_THREADS"] == "2"
    assert engine_environ(spec(), {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


@pytest.mark.parametrize("is_installed", [True, False])
def test_torchvision_is_stood_in_for_only_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda _name: object() if is_installed else None
    )
    path = engine_environ(spec(), {"PYTHONPATH": "/mine"})["PYTHONPATH"]
    assert path.startswith("/mine")
    assert ("stubs" in path) is not is_installed


def test_another_interpreter_runs_another_engine() -> None:
    assert engine_argv(spec(python=Path("/other/bin/python")))[0] == "/other/bin/python"
    assert engine_argv(spec())[0] == sys.executable
