"""What `millpond up` makes of its flags: a router in front, unless it is told otherwise."""

from pathlib import Path

import pytest

from millpond.cli import run
from millpond.cli import up as up_module
from millpond.cli.exits import Exit
from millpond.launch.front import FrontOptions
from millpond.launch.system import SystemOptions
from millpond.model.errors import SetupError

ARGV = ("up", "--model", "m", "--pool", "16MiB", "--device", "cpu", "--socket", "/s/pool.sock")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SystemOptions]:
    """What systems were asked for; none is started."""
    found: list[SystemOptions] = []

    def system(options: SystemOptions, **_rest: object) -> None:
        found.append(options)
        raise SetupError("nothing is started here")

    monkeypatch.setattr(up_module, "System", system)
    monkeypatch.setattr(up_module, "pick_device", lambda *_arguments: "cpu")
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
