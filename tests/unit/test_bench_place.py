"""`millpond bench run` starts the engines that `millpond up` would start."""

import json
from pathlib import Path

import pytest

from millpond.bench.periods import Runner
from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.launch import prepare as prepare_module
from tests.unit import launch_values as configs

OLD_ENGINE = "0.27.1"


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a small hybrid; the engine is an old one for CPUs, and none is started."""
    monkeypatch.setattr(prepare_module, "pick_device", lambda _wanted, _environ: "cpu")
    monkeypatch.setattr(prepare_module, "engine_version", lambda: OLD_ENGINE)
    monkeypatch.setattr(Runner, "run", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    config = {**configs.QWEN35_TEXT, "num_hidden_layers": 4, "layer_types": None}
    folder = tmp_path / "hybrid"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bench(model: Path, *argv: str) -> Exit | int:
    flags = ("--model", str(model), "--pool", "2GiB", "--caches", "off,millpond", "--out", "out")
    return run(["bench", "run", "moved-cpu", *flags, *argv], {})


def engine_args() -> list[str]:
    return json.loads(Path("out", "run.json").read_text())["options"]["engine_args"]


def test_a_hybrid_gets_what_up_chooses_for_it(
    hybrid: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(hybrid, "--", "--max-model-len", "4096") == Exit.OK
    measured = engine_args()
    assert "--block-size 896  (a state needs" in capsys.readouterr().err
    up = ["up", "--model", str(hybrid), "--pool", "2GiB", "--dry-run", "--json"]
    assert run(up, {}) == Exit.OK
    chosen = json.loads(capsys.readouterr().out)["data"]["engine"]["arguments"]
    words = [word for each in chosen for word in (each["name"], each["value"]) if word]
    assert words == measured[: len(words)]
    assert {"--mamba-cache-mode", "--block-size"} < set(words)
    assert measured[-2:] == ["--max-model-len", "4096"], "the user's own win"


def test_the_configuration_that_vllm_is_told_to_read_is_read(hybrid: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(configs.QWEN3))
    assert bench(dense, "--", "--hf-config-path", str(hybrid)) == Exit.OK
    assert "--block-size" in engine_args()


def test_what_up_refuses_is_not_measured(hybrid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ("--", "--no-enable-prefix-caching")
    assert bench(hybrid, *wrong) == Exit.SETUP
    assert "vLLM keeps none with --no-enable-prefix-caching" in capsys.readouterr().err
    assert not Path("out").exists(), "nothing is begun"


def test_without_a_pool_nothing_is_refused_for_its_sake(hybrid: Path) -> None:
    wrong = ("--", "--no-enable-prefix-caching")
    assert bench(hybrid, "--caches", "off", "--rounds", "0", *wrong) == Exit.OK
