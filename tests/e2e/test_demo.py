"""The demonstration on real engines: the figures are there, the outputs are the same."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

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


def a_conversation_was_had(found: dict[str, Any]) -> None:
    """Check that each turn moved, and was served by what the other had written if it could be."""
    off, on = found["off"], found["on"]
    assert len(off) == len(on) == 4
    assert [turn["prompt_tokens"] for turn in off] == [turn["prompt_tokens"] for turn in on]
    for turns in (off, on):
        assert [turn["replica"] for turn in turns] in (list("abab"), list("baba"))
        holders = [turn["prefix_holder"] for turn in turns]
        assert holders == [None, *(turn["replica"] for turn in turns[:-1])]
        assert {turn["attribution"] for turn in turns} == {"pool"}
    assert not any(turn["written_by"] for turn in off)
    second, last = on[1], on[3]
    assert second["written_by"] == {on[0]["replica"]: 4096}
    assert second["computed_tokens"] == second["prompt_tokens"] - 4096
    assert last["pool_other_tokens"] > 0
    assert last["local_tokens"] > 0, "what it has heard itself is there still"
    assert second["ttft_s"] < off[1]["ttft_s"], "where most is saved, also on a busy machine"
    assert found["on_ttft_s"] == pytest.approx(sum(turn["ttft_s"] for turn in on))
    assert found["counts"]["router"] == found["counts"]["pool"] == found["counts"]["engines"]
    asked = sum(turn["prompt_tokens"] for turn in (*off, *on))
    assert sum(n for each in found["counts"]["router"].values() for n in each.values()) == asked


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
    a_conversation_was_had(document["data"]["conversation"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.html", "demo.json", "logs"]
