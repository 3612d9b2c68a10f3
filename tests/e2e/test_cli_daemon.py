"""Commands against a running daemon."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.config import PoolConfig
from millpond.launch.system import System, SystemOptions
from millpond.model.limits import MIB


@pytest.fixture(scope="module")
def environ() -> Iterator[dict[str, str]]:
    """The environment of commands: it names the socket of a daemon that runs."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        pool = PoolConfig(Path(folder, "p.sock"), 16 * MIB, None)
        options = SystemOptions(
            model="", num_replicas=0, device="cpu", environ=os.environ, pool=pool
        )
        with System(options):
            yield {"MILLPOND_SOCKET": str(pool.socket)}


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
