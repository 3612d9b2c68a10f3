"""`millpond pool` shows how far its memory is, before it serves and after."""

import sys
from pathlib import Path

import pytest

from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.model.limits import GIB
from millpond.service.server import ServeOptions, Serving


def test_progress_goes_on_once_it_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, str]] = []

    def serve(options: ServeOptions, *, on_ready: object) -> None:
        assert options.on_progress is not None
        assert callable(on_ready)
        serving = Serving(
            socket_path=options.socket_path, pid=1, epoch=1, arena_bytes=4 * GIB, extent_bytes=GIB
        )
        for step in (
            lambda: options.on_progress(GIB, 4 * GIB),
            lambda: on_ready(serving),
            lambda: options.on_progress(2 * GIB, 4 * GIB),
            lambda: options.on_progress(4 * GIB, 4 * GIB),
        ):
            capsys.readouterr()
            step()
            seen.append(capsys.readouterr())

    # The package has the command under the module's name.
    monkeypatch.setattr(sys.modules["millpond.cli.pool"], "serve", serve)
    path = str(tmp_path / "p.sock")
    assert run(["pool", "--size", "4GiB", "--socket", path], {}) == Exit.OK
    assert seen == [
        ("", "taking memory: 25 % of 4GiB\n"),
        (f"serving at {path}\n", ""),
        ("", ""),  # not every step needs a line, but for the last
        ("", "all memory is there: 4GiB\n"),
    ]
