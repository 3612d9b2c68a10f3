"""What `millpond up` makes of its flags: a router in front, and what each vLLM is told."""

import json
import shlex
from pathlib import Path

import pytest

from millpond.cli import run
from millpond.cli import up as up_module
from millpond.cli.exits import Exit
from millpond.launch import prepare as prepare_module
from millpond.launch.front import FrontOptions
from millpond.launch.model_config import NoModelConfig, read_model_config
from millpond.launch.system import SystemOptions
from millpond.model.errors import SetupError
from tests.unit import launch_values as configs

ARGV = ("up", "--model", "m", "--pool", "16MiB", "--device", "cpu", "--socket", "/s/pool.sock")


def no_config(*_arguments: object, **_options: object) -> None:
    raise NoModelConfig("there is no network")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SystemOptions]:
    """What systems were asked for; none is started."""
    found: list[SystemOptions] = []

    def system(options: SystemOptions, **_rest: object) -> None:
        found.append(options)
        raise SetupError("nothing is started here")

    monkeypatch.setattr(up_module, "System", system)
    monkeypatch.setattr(prepare_module, "pick_device", lambda _wanted, _environ: "cpu")
    monkeypatch.setattr(prepare_module, "engine_version", lambda: "0.27.1")
    monkeypatch.setattr(prepare_module, "read_model_config", no_config)
    monkeypatch.chdir(tmp_path)
    return found


def test_a_router_stands_before_the_replicas(asked: list[SystemOptions]) -> None:
    argv = [*ARGV, "--port", "9000", "--policy", "alternate", "--stop-grace", "3"]
    assert run(argv, {"MILLPOND_ROUTER_ACCESS_LOG": "/log"}) == Exit.SETUP
    (options,) = asked
    assert options.port == 9001
    assert options.front == FrontOptions(
        policy="alternate",
        admin_socket=Path("/s/router.sock"),
        host="127.0.0.1",
        port=9000,
        access_log=Path("/log"),
        stop_grace_s=3.0,
    )


def test_without_ports_only_the_routers_is_a_known_one(asked: list[SystemOptions]) -> None:
    run(ARGV, {})
    run(ARGV, {"MILLPOND_ROUTER_PORT": "0"})
    fronts = [options.front for options in asked if options.front is not None]
    assert [front.port for front in fronts] == [8000, None]
    assert [options.port for options in asked] == [None, None]


@pytest.mark.parametrize(
    ("argv", "environ"), [(["--no-router"], {}), ([], {"MILLPOND_UP_ROUTER": "no"})]
)
def test_a_balancer_of_ones_own_gets_all_ports(
    asked: list[SystemOptions],
    argv: list[str],
    environ: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run([*ARGV, "--port", "9000", *argv], environ)
    (options,) = asked
    assert (options.front, options.port) == (None, 9000)
    assert "no router" in capsys.readouterr().err


def test_replicas_of_a_router_are_refused_before_anything_starts(
    asked: list[SystemOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("millpond.toml").write_text('[router]\nreplicas = ["a=http://x:1"]\n')
    assert run(ARGV, {}) == Exit.USAGE
    assert asked == []
    printed = capsys.readouterr().err
    assert "router.replicas (" in printed
    assert "--no-router" in printed


# ---------------------------------------------------------------- what each vLLM is told


@pytest.fixture
def hybrid(asked: list[SystemOptions], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder with the configuration of a small hybrid, which is read."""
    monkeypatch.setattr(prepare_module, "read_model_config", read_model_config)
    assert asked == []
    folder = tmp_path / "hybrid"
    folder.mkdir()
    config = {**configs.QWEN35_TEXT, "num_hidden_layers": 4, "layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


OURS = (
    *("--enable-prefix-caching", "--enforce-eager", "--mamba-cache-mode", "align"),
    *("--mamba-ssm-cache-dtype", "float32", "--block-size", "896"),
)


def test_a_hybrids_arguments_go_before_the_users_own_and_are_explained(
    asked: list[SystemOptions], hybrid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*ARGV, "--model", hybrid, "--pool", "2GiB", "--", "--max-model-len", "4096"]
    assert run(argv, {}) == Exit.SETUP
    (options,) = asked
    assert options.engine_args == (*OURS, "--max-model-len", "4096")
    printed = capsys.readouterr().err
    assert "model: hybrid (Qwen3_5ForCausalLM), 1 attention layers, 3 recurrent layers" in printed
    assert "engine arguments for vLLM 0.27.1:" in printed
    assert "--block-size 896  (a state needs 896 tokens of pages;" in printed


def test_a_model_that_cannot_be_looked_at_starts_with_a_note(
    asked: list[SystemOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    run(ARGV, {})
    (options,) = asked
    assert options.engine_args == ("--enable-prefix-caching", "--enforce-eager")
    printed = capsys.readouterr().err
    assert "config.json of m cannot be read: there is no network" in printed
    assert "model: unknown" in printed


def test_what_cannot_work_is_refused_before_anything_starts(
    asked: list[SystemOptions], hybrid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*ARGV, "--model", hybrid, "--", "--no-enable-prefix-caching", "--port", "1"]
    assert run(argv, {}) == Exit.SETUP
    assert asked == []
    printed = capsys.readouterr().err
    assert "this cannot work:\n- --port would be" in printed
    assert "\n- a request resumes from a recurrent state, and vLLM keeps none" in printed
    assert "\n- recurrent states may take 50% of a pool of 16 MiB" in printed


def test_a_dry_run_prints_commands_for_a_shell(
    asked: list[SystemOptions], hybrid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*ARGV, "--model", hybrid, "--pool", "2GiB", "--dry-run"], {"A": "1"}) == Exit.OK
    assert asked == []
    names, lines = _split_commands(capsys.readouterr().out)
    assert names == ["# pool", "# replica a", "# replica b", "# router"]
    pool, a, b, router = (shlex.split(line) for line in lines)
    assert pool[pool.index("--size") + 1] == str(2 << 30)
    for engine, name in ((a, "a"), (b, "b")):
        assert "OMP_NUM_THREADS=" in " ".join(engine[: engine.index("taskset")])
        assert tuple(engine[-len(OURS) :]) == OURS
        transfer = json.loads(engine[engine.index("--kv-transfer-config") + 1])
        assert transfer["kv_connector_extra_config"] == {"replica": name, "socket": "/s/pool.sock"}
        port = engine[engine.index("--port") + 1]
        assert f"{name}=http://127.0.0.1:{port}" in router
    assert "A=1" not in a, "it is in the environment already"


def _split_commands(printed: str) -> tuple[list[str], list[str]]:
    lines = printed.splitlines()
    return lines[0::2], lines[1::2]


def test_a_dry_run_as_json_has_reasons_sizes_and_commands(
    hybrid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*ARGV, "--model", hybrid, "--pool", "2GiB", "--dry-run", "--json"], {}) == Exit.OK
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["model"]["kind"] == "hybrid"
    assert data["model"]["token_bytes"] == 4096
    assert data["model"]["state_bytes"] == 3 * 3_207_168
    arguments = data["engine"]["arguments"]
    words = [word for each in arguments for word in (each["name"], each["value"]) if word]
    assert tuple(words) == OURS
    assert all(each["why"] for each in arguments)
    names = [command["name"] for command in data["commands"]]
    assert names == ["pool", "replica a", "replica b", "router"]
    assert all(command["line"].endswith(command["argv"][-1]) for command in data["commands"])


def test_a_system_that_runs_prints_no_document(asked: list[SystemOptions]) -> None:
    assert run([*ARGV, "--json"], {}) == Exit.USAGE
    assert asked == []


def test_a_dry_run_without_a_router_has_the_ports_that_were_asked_for(
    asked: list[SystemOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*ARGV, "--no-router", "--replicas", "1", "--dry-run"], {}) == Exit.OK
    assert asked == []
    names, _ = _split_commands(capsys.readouterr().out)
    assert names == ["# pool", "# replica a"]


def test_the_file_of_settings_is_named_to_all_commands(
    asked: list[SystemOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("millpond.toml").write_text("[connector]\nstore = false\n")
    assert run([*ARGV, "--dry-run"], {}) == Exit.OK
    assert asked == []
    _, lines = _split_commands(capsys.readouterr().out)
    assert all(f"MILLPOND_CONFIG={Path.cwd() / 'millpond.toml'} " in line for line in lines)
