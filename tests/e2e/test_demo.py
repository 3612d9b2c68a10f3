"""The demonstration on real engines: the figures are there, the outputs are the same."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.launch.demo import Demo, DemoOptions
from tests.e2e.engines import Replicas

pytestmark = pytest.mark.timeout(400)


def test_a_moved_request_is_loaded_and_gives_the_same_output(hybrid: Replicas) -> None:
    steps: list[str] = []
    demo = Demo(hybrid.system, on_step=steps.append)
    try:
        rows = demo.run(DemoOptions(lengths=(1024, 2000), num_rounds=2, seed=3))
    finally:
        demo.close()
    assert [row.prompt_tokens for row in rows] == [1024, 2000]
    for row in rows:
        assert row.faults() == []
        assert row.loaded_tokens == (row.prompt_tokens - 1) // 256 * 256
        assert row.written_by == {"a": row.loaded_tokens}
        assert row.loaded_bytes > 0
        assert 0 < row.moved_on_ttft_s < row.cold_ttft_s
    assert any("B, pool off" in step for step in steps)


def test_outputs_that_differ_are_found(hybrid: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(hybrid.system, on_step=lambda _step: None)
    honest = demo._ask

    def ask_something_else_when_moved(engine, prompt, request_id):  # noqa: ANN001, ANN202
        changed = [*prompt[:-1], 17] if request_id.endswith("-on") else prompt
        return honest(engine, changed, request_id)

    monkeypatch.setattr(demo, "_ask", ask_something_else_when_moved)
    try:
        (row,) = demo.run(DemoOptions(lengths=(600,), num_rounds=1, seed=4))
    finally:
        demo.close()
    assert not row.identical
    assert "differ" in row.faults()[0]


def test_the_command_runs_from_nothing_and_leaves_only_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        argv = ["demo", "--quick", "--tokens", "1024", "--out", str(tmp_path), "--json"]
        assert run(argv, {**os.environ, "TMPDIR": folder}) == Exit.OK
        assert list(Path(folder).iterdir()) == []
    document = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "demo.json").read_text()) == document
    (row,) = document["rows"]
    assert row["identical"]
    assert row["loaded_tokens"] == 768
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.html", "demo.json", "logs"]
