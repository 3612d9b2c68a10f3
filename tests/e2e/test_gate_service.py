"""``gate service`` on real replicas: it passes where all is right, and sees what is planted."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.gate import corruption as corruption_module
from millpond.gate.corruption import corruption
from millpond.gate.service import CASES, LAUNCHED_ONLY
from millpond.gate.service_cases import cases_for
from millpond.gate.service_launched import inexact_sums, launch, pair_of
from millpond.gate.service_pair import TOLERANCE, Mismatch, Pair
from millpond.launch.engine_client import Completion
from millpond.launch.system import System
from tests.e2e.engines import OLDER_PYTHON, Replicas

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def pair(hybrid: Replicas) -> Pair:
    return pair_of(hybrid.system, tolerance=0.1, seed=11, on_step=lambda _: None)


def gate_service(
    capsys: pytest.CaptureFixture[str],
    *options: str,
    code: Exit = Exit.OK,
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Run the command and return its cases by name."""
    assert run(["gate", "service", "--json", *options], dict(os.environ)) == code
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["tolerance"] == tolerance
    return {case["name"]: case for case in data["cases"]}


# ---------------------------------------------------------------- launched


@pytest.mark.engines
def test_a_quick_launch_passes_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        options = [f"--only={name}" for name in ("cold", "moved-hit", "cancel-load", "corruption")]
        cases = gate_service(capsys, "--launch", *options, tolerance=0.0)
        assert list(Path(folder).iterdir()) == []
    assert list(cases) == ["cold", "moved-hit", "cancel-load", "corruption"]
    assert {case["verdict"] for case in cases.values()} == {"passed"}
    assert all(case["num_compared"] > 0 for case in cases.values())


@pytest.mark.engines
@pytest.mark.timeout(3600)
def test_all_cases_of_a_launch_pass(capsys: pytest.CaptureFixture[str]) -> None:
    cases = gate_service(capsys, "--launch", tolerance=0.0)
    assert list(cases) == list(CASES)
    assert {case["verdict"] for case in cases.values()} == {"passed"}


@pytest.mark.engines
@pytest.mark.parametrize("python", [Path(sys.executable), OLDER_PYTHON])
def test_sums_of_a_launched_engine_are_exact(python: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        made = launch(
            Path(folder), device="cpu", environ=os.environ, logs=None, on_progress=lambda _: None
        )
        with System(replace(made.options, python=python)) as system:
            asks = pair_of(system, tolerance=0.0, seed=1, on_step=lambda _: None)
            assert inexact_sums(asks) == ""


def test_an_engine_as_it_comes_rounds_by_the_batch(pair: Pair) -> None:
    """The control of ``exact_sums``: without it, answers depend on how they are asked for."""
    assert "answered otherwise" in inexact_sums(pair)


# ---------------------------------------------------------------- running replicas


def test_running_replicas_are_checked_as_far_as_requests_go(
    hybrid: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--socket", str(hybrid.system.socket)]
    where += [f"--url={hybrid.system.replica(name).url}" for name in "ab"]
    chosen = ("local-hit", "moved-hit", "block-multiples", "concurrent")
    cases = gate_service(capsys, *where, *(f"--only={name}" for name in chosen))
    assert {case["verdict"] for case in cases.values()} == {"passed"}
    # What needs the processes is not checked, and that is no success.
    rest = [f"--only={name}" for name in ("cold", *LAUNCHED_ONLY)]
    cases = gate_service(capsys, *where, *rest, code=Exit.NOT_CHECKED)
    verdicts = {name: case["verdict"] for name, case in cases.items()}
    assert verdicts == {"cold": "passed"} | dict.fromkeys(LAUNCHED_ONLY, "not checked")


def test_replicas_that_share_no_pool_are_named(
    hybrid: Replicas, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both URLs name one replica: nothing moves."""
    where = ["--socket", str(hybrid.system.socket)]
    where += [f"--url={hybrid.system.replica('a').url}"] * 2
    assert run(["gate", "service", *where], dict(os.environ)) == Exit.NO
    assert "loaded nothing" in capsys.readouterr().err


def test_a_pool_that_is_off_or_away_is_named(
    hybrid: Replicas, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = [f"--url={hybrid.system.replica(name).url}" for name in "ab"]
    hybrid.switch(enabled=False)
    try:
        argv = ["gate", "service", *where, "--socket", str(hybrid.system.socket)]
        assert run(argv, dict(os.environ)) == Exit.SETUP
    finally:
        hybrid.switch(enabled=True)
    assert "millpond pool on" in capsys.readouterr().err
    argv = ["gate", "service", *where, "--socket", str(tmp_path / "none.sock")]
    assert run(argv, dict(os.environ)) == Exit.AWAY
    assert "no daemon at" in capsys.readouterr().err


# ---------------------------------------------------------------- planted


@pytest.mark.parametrize("name", ["local-hit", "moved-hit", "partial-hit"])
def test_another_answer_with_the_pool_fails_the_case(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token of each prompt differs where the pool is on."""
    honest = Pair.ask

    def ask(self: Pair, replica: str, ids: Sequence[int], salt: str, **rest: int) -> Completion:
        return honest(self, replica, [ids[0] ^ 1, *ids[1:]], salt, **rest)

    monkeypatch.setattr(Pair, "ask", ask)
    case = next(case for case in cases_for(pair) if case.name == name)
    with pytest.raises(Mismatch, match="without the pool"):
        case.run()


def test_a_corrupted_page_is_seen(pair: Pair) -> None:
    assert corruption(pair) > 0


def test_a_corruption_that_nobody_sees_fails_the_case(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corruption_module, "_corrupt", lambda *_: None)
    with pytest.raises(Mismatch, match="cannot see"):
        corruption(pair)
