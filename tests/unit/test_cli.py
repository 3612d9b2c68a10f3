"""The command line by itself: help, usage errors, exit codes, the envelope."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest

from millpond import __version__
from millpond.cli import app, run
from millpond.cli.envelope import envelope
from millpond.cli.exits import AnswerIsNo, Exit, Terminated, exit_of
from millpond.model.errors import (
    ArenaTooLarge,
    ConfigError,
    DaemonGone,
    InvariantBroken,
    SocketUnusable,
)


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)


ALL_COMMANDS = [(), *commands(app.cli)]


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_each_command_has_help_with_examples(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*path, "--help"], {}) == Exit.OK
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert f"millpond {' '.join(path)}".strip() in text


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], {}) == Exit.OK
    assert capsys.readouterr().out == f"millpond {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "environ", "words"),
    [
        (["nonsense"], {}, ["nonsense"]),
        (["status", "--nonsense"], {}, ["--nonsense"]),
        (["pool", "--size", "big"], {}, ["pool.size", "'big'", "command line", "256MiB"]),
        (["pool"], {}, ["pool.size", "--size"]),
        (["pool", "--size", "16MiB", "on"], {}, ["millpond pool on"]),
        (["pool"], {"MILLPOND_POOL_SIZE": "1"}, ["pool.size", "MILLPOND_POOL_SIZE"]),
        (["status"], {"MILLPOND_SOKCET": "x"}, ["MILLPOND_SOKCET"]),
        (["up", "--model", "m"], {}, ["pool.size", "--pool"]),
        (["up", "--pool", "1GiB"], {}, ["up.model", "--model"]),
        (["up", "--model", "m", "--pool", "1GiB", "--replicas", "0"], {}, ["up.replicas", "'0'"]),
        (["requests", "--last", "0"], {}, ["--last"]),
        (["status", "--watch", "0"], {}, ["--watch"]),
        (["status", "--watch", "--json"], {}, ["--watch", "--json"]),
        (["inspect", "--key", "xyz"], {}, ["--key", "'xyz'"]),
        (["inspect", "--limit", "0"], {}, ["--limit"]),
        (["demo", "--tokens", "3"], {}, ["--tokens"]),
        (["--config", "/no/such.toml", "status"], {}, ["/no/such.toml"]),
    ],
)
def test_wrong_usage_ends_with_2_and_names_what_is_wrong(
    argv: list[str],
    environ: dict[str, str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(argv, environ) == Exit.USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in captured.err


def test_a_file_in_the_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "millpond.toml").write_text("[pool]\nsize = 'big'\n")
    monkeypatch.chdir(tmp_path)
    assert run(["pool"], {}) == Exit.USAGE
    assert "millpond.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["status"],
        ["status", "--watch"],
        ["requests"],
        ["inspect"],
        ["check"],
        ["pool", "on"],
        ["pool", "off"],
        ["pool", "flush"],
    ],
)
def test_without_a_daemon_commands_end_with_4_and_name_the_socket(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "none.sock")
    assert run([*argv, "--socket", path], {}) == Exit.AWAY
    captured = capsys.readouterr()
    assert captured.out == ""
    assert path in captured.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AnswerIsNo("x"), Exit.NO),
        (ConfigError("x"), Exit.USAGE),
        (SocketUnusable("x"), Exit.SETUP),
        (ArenaTooLarge("x", wanted_bytes=2, available_bytes=1), Exit.SETUP),
        (DaemonGone("x"), Exit.AWAY),
        (httpx.ReadError("x"), Exit.AWAY),
        (InvariantBroken("x"), Exit.BROKEN),
        (KeyError("x"), Exit.BUG),
        (KeyboardInterrupt(), Exit.INTERRUPTED),
        (Terminated(), Exit.TERMINATED),
    ],
)
def test_each_kind_of_error_has_its_code(error: BaseException, code: Exit) -> None:
    assert exit_of(error) is code


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (DaemonGone("it is away"), "millpond: it is away"),
        (KeyError("oops"), "this is a bug"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_an_error_of_a_command_is_printed_and_becomes_the_code(
    error: BaseException,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(app.cli, "main", fail)
    assert run(["status"], {}) == exit_of(error)
    assert shown in capsys.readouterr().err


def test_the_envelope_says_what_ran_where() -> None:
    document = envelope(["millpond", "status"], {"x": 1})
    assert set(document) == {"version", "command", "machine", "commit", "data"}
    assert document["command"] == "millpond status"
    assert document["data"] == {"x": 1}
    machine = document["machine"]
    assert isinstance(machine, dict)
    assert {"cpu", "cores", "memory_bytes", "gpus"} <= set(machine)
    json.dumps(document)
