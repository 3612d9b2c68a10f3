"""``gate all``: one result out of several, and a page that shows them."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.cli import gate_all as module
from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.cli.gate_pool import PoolChecked
from millpond.cli.gate_service import ServiceChecked
from millpond.gate.errors import NoPackage
from millpond.gate.pool import FillingResult, PoolReport
from millpond.gate.service import CaseResult, CaseVerdict, ServiceReport
from millpond.gate.summary import Check, Result, Rows, overall, summary_html
from millpond.model.errors import InvariantBroken, SetupError


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([Result.PASSED, Result.PASSED], Result.PASSED),
        ([Result.PASSED, Result.NOT_CHECKED], Result.NOT_CHECKED),
        ([Result.NOT_CHECKED, Result.FAILED, Result.PASSED], Result.FAILED),
        ([], Result.NOT_CHECKED),
    ],
)
def test_the_worst_result_is_that_of_all(results: list[Result], expected: Result) -> None:
    assert overall([Check("x", result, "") for result in results]) is expected


def test_the_page_stands_alone_and_escapes() -> None:
    tables = [Rows(("case", "verdict"), [("cold", "passed"), ("moved", "failed")])]
    pictures = ['<svg class="mine"></svg>']
    checks = [
        Check("order", Result.NOT_CHECKED, "no <GPU>"),
        Check("service", Result.FAILED, "bad", {}, tables, pictures),
    ]
    page = summary_html(checks, [("Command", "millpond gate all")])
    assert "no &lt;GPU&gt;" in page
    assert '<span class="failed">failed</span>' in page
    assert '<span class="not-checked">not checked</span>' in page
    assert pictures[0] in page
    assert "millpond gate all" in page
    assert "http" not in page


# ---------------------------------------------------------------- the command


def pool(fault: str | None = None) -> PoolChecked:
    filling = FillingResult("first", 3, {64: 3}, 192, 192, 1.0, 2.0, 3.0)
    return PoolChecked(PoolReport("cpu", 1, 192, 64, [filling], fault))


def service(verdict: CaseVerdict = CaseVerdict.PASSED) -> ServiceChecked:
    case = CaseResult("cold", verdict, "why", 8)
    return ServiceChecked(ServiceReport("launched", "", [], 256, 0.25, 1, 0, [case]))


def raising(error: Exception) -> Callable[[], PoolChecked]:
    def check() -> PoolChecked:
        raise error

    return check


@pytest.mark.parametrize(
    ("make_pool", "verdict", "code", "results"),
    [
        (pool, CaseVerdict.PASSED, Exit.OK, ["passed", "passed"]),
        (lambda: pool("a hole"), CaseVerdict.NOT_CHECKED, Exit.NO, ["failed", "not checked"]),
        (pool, CaseVerdict.NOT_CHECKED, Exit.NOT_CHECKED, ["passed", "not checked"]),
        (
            raising(SetupError("too small")),
            CaseVerdict.PASSED,
            Exit.NOT_CHECKED,
            ["not checked", "passed"],
        ),
        (
            raising(NoPackage("no torch")),
            CaseVerdict.FAILED,
            Exit.NO,
            ["not checked", "failed"],
        ),
        (
            raising(InvariantBroken("a hole")),
            CaseVerdict.PASSED,
            Exit.NO,
            ["failed", "passed"],
        ),
        (
            raising(KeyError("odd")),
            CaseVerdict.PASSED,
            Exit.NOT_CHECKED,
            ["not checked", "passed"],
        ),
    ],
)
def test_all_is_as_good_as_its_worst(
    make_pool: Callable[[], PoolChecked],
    verdict: CaseVerdict,
    code: Exit,
    results: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "check_pool", lambda *_: make_pool())
    monkeypatch.setattr(module, "check_service", lambda *_: service(verdict))
    page = tmp_path / "gate.html"
    argv = ["gate", "all", "--skip", "order", "--skip", "mutants", "--json"]
    assert run([*argv, "--report", str(page)], dict(os.environ)) == code
    data = json.loads(capsys.readouterr().out)["data"]
    assert [check["name"] for check in data["checks"]] == ["pool", "service"]
    assert [check["result"] for check in data["checks"]] == results
    assert (data["result"] == "passed") == (code == Exit.OK)
    assert "<h2>service</h2>" in page.read_text()


def test_order_and_its_mutants_are_run_on_the_emulated_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def check_order(order: object) -> object:
        asked.append(order)
        raise NoPackage("no torch here")

    monkeypatch.setattr(module, "check_order", check_order)
    argv = ["gate", "all", "--skip", "pool", "--skip", "service", "--device", "cpu"]
    assert run(argv, dict(os.environ)) == Exit.NOT_CHECKED
    assert [(each.device, each.mutants) for each in asked] == [
        ("emulated", False),
        ("emulated", True),
    ]
    assert "order: no torch here; mutants: no torch here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--case", "warm"], "no case 'warm'"),
        (["--size", "big"], "big"),
        ([f"--skip={name}" for name in ("order", "mutants", "pool", "service")], "no check"),
    ],
)
def test_wrong_usage_is_named_before_anything_runs(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["gate", "all", *options], dict(os.environ)) == Exit.USAGE
    assert words in capsys.readouterr().err
