"""``millpond gate all``: every check of the gate, one summary."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol, cast

import click
import httpx
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context
from millpond.cli.exits import AnswerIsNo, NotAllChecked
from millpond.cli.gate_order import AskedOrder, OrderChecked, check_order
from millpond.cli.gate_pool import AskedPool, PoolChecked, check_pool
from millpond.cli.gate_service import AskedService, ServiceChecked, check_service
from millpond.cli.output import print_json, stderr, stdout
from millpond.gate.errors import CannotTest
from millpond.gate.service import FAILURES, choose_cases
from millpond.gate.summary import Check, Result, Rows, overall, summary_html
from millpond.model.errors import ExpectedError, InvariantBroken, SetupError

_POOL_SIZE: Final = "256MiB"
_CHECKS: Final = ("order", "mutants", "pool", "service")
_STYLES: Final = {
    Result.PASSED: "green",
    Result.FAILED: "bold red",
    Result.NOT_CHECKED: "yellow",
}


class Checked(Protocol):
    """What each check gives back."""

    def summary(self) -> str:
        """Return the result in one line."""
        ...

    def error(self) -> Exception | None:
        """Return what the check's own command has to end with, or None."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAll:
    """The command's options. ``device`` is ``auto``, ``cpu`` or ``cuda`` for all checks."""

    size: str = _POOL_SIZE
    device: str = "auto"
    cases: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()


@click.command(
    "all",
    epilog=examples(
        "millpond gate all",
        "millpond gate all --size 64GiB --report gate.html",
        "millpond gate all --skip service --json | jq .data.result",
    ),
)
@click.option(
    "--size",
    metavar="SIZE",
    default=_POOL_SIZE,
    show_default=True,
    help="Of the pool that is filled.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where copies and replicas run.",
)
@click.option(
    "--case", "cases", multiple=True, metavar="CASE", help="Of service, only these; repeat it."
)
@click.option(
    "--skip",
    type=click.Choice(_CHECKS),
    multiple=True,
    help="Leave this check out; repeat it.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="Write a page with all results, and pictures of wrong bytes.",
)
@json_option
@pass_context
def gate_all(context: Context, *, as_json: bool, report_file: Path | None, **flags: object) -> None:
    """Run every check: order, its mutants, a pool of its own, launched replicas.

    A check that cannot be made here does not keep the others from running. Ends with 0 only
    if everything that was asked for was checked and is right, with 1 if something is wrong,
    else with 7.
    """
    asked = AskedAll(
        size=cast("str", flags["size"]),
        device=cast("str", flags["device"]),
        cases=cast("tuple[str, ...]", flags["cases"]),
        skip=cast("tuple[str, ...]", flags["skip"]),
    )
    checks = run_all(context, asked)
    if as_json:
        data = {"result": overall(checks).value, "checks": [each.as_json() for each in checks]}
        print_json(context.envelope(data))
    else:
        stdout.print(_table(checks))
    if report_file is not None:
        report_file.write_text(summary_html(checks, _facts(context)), encoding="utf-8")
        stderr.print(f"wrote {report_file}", markup=False)
    _conclude(checks)


def run_all(context: Context, asked: AskedAll) -> list[Check]:
    """Make the checks that are asked for, one after the other, with progress on stderr."""
    # Now, and not after the first checks have run for minutes.
    choose_cases(asked.cases, ())
    context.settings({"pool.size": asked.size}).pool()
    order_device = "emulated" if asked.device == "cpu" else asked.device
    made: Mapping[str, Callable[[], Check]] = {
        "order": lambda: _order("order", AskedOrder(device=order_device)),
        "mutants": lambda: _order("mutants", AskedOrder(device=order_device, mutants=True)),
        "pool": lambda: _pool(check_pool(context, AskedPool(size=asked.size, device=asked.device))),
        "service": lambda: _service(
            check_service(context, AskedService(only=asked.cases, device=asked.device))
        ),
    }
    names = [name for name in _CHECKS if name not in asked.skip]
    if not names:
        raise click.UsageError("--skip leaves no check")
    return [_attempt(name, made[name]) for name in names]


def _attempt(name: str, make: Callable[[], Check]) -> Check:
    stderr.print(f"gate {name}", markup=False)
    try:
        return make()
    except InvariantBroken as error:
        return Check(name, Result.FAILED, f"the pool is broken: {error}")
    except (CannotTest, SetupError, ExpectedError, httpx.HTTPError, TimeoutError) as error:
        return Check(name, Result.NOT_CHECKED, str(error))
    except FAILURES as error:
        # A bug of the check must not cost the results of the others.
        text = f"the check itself failed: {type(error).__name__}: {error}"
        return Check(name, Result.NOT_CHECKED, text)


def _result(checked: Checked) -> Result:
    error = checked.error()
    if error is None:
        return Result.PASSED
    return Result.FAILED if isinstance(error, AnswerIsNo) else Result.NOT_CHECKED


def _order(name: str, asked: AskedOrder) -> Check:
    checked: OrderChecked = check_order(asked)
    report = checked.report
    # Only here: it needs torch, and the check has just shown that it is there.
    from millpond.gate.report import picture

    findings = [
        (
            each.path,
            "all" if each.edge is None else each.edge.value,
            "" if each.direction is None else each.direction.value,
            each.words(),
            f"{each.num_bytes:,} bytes",
            each.reason,
        )
        for each in report.findings
    ]
    mutants = [
        (each.mutant.edge.value, each.mutant.name, "caught" if each.is_caught else "NOT caught")
        for each in report.mutants
    ]
    tables = [
        Rows(("path", "edge", "direction", "verdict", "compared", "why"), findings),
        Rows(("edge", "mutant", ""), mutants),
    ]
    return Check(
        name,
        _result(checked),
        f"{checked.summary()} ({report.device})",
        report.as_json(),
        [table for table in tables if table.rows],
        [picture(each.wrong) for each in report.findings if each.wrong is not None],
    )


def _pool(checked: PoolChecked) -> Check:
    report = checked.report
    rows = [
        (
            each.name,
            f"{each.num_slots:,}",
            f"{each.num_bytes_compared:,}",
            f"{each.seconds:.1f}",
            f"{each.store_gb_per_s:.1f}",
            f"{each.load_gb_per_s:.1f}",
        )
        for each in report.fillings
    ]
    head = ("filling", "slots", "bytes compared", "seconds", "store GB/s", "load GB/s")
    return Check("pool", _result(checked), checked.summary(), report.as_json(), [Rows(head, rows)])


def _service(checked: ServiceChecked) -> Check:
    report = checked.report
    rows = [
        (case.name, case.verdict.value, f"{case.num_compared:,}", case.why) for case in report.cases
    ]
    head = ("case", "verdict", "tokens compared", "what it shows, or why")
    return Check(
        "service", _result(checked), checked.summary(), report.as_json(), [Rows(head, rows)]
    )


def _conclude(checks: list[Check]) -> None:
    worst = overall(checks)
    if worst is Result.PASSED:
        return
    text = "; ".join(f"{each.name}: {each.text}" for each in checks if each.result is worst)
    raise AnswerIsNo(text) if worst is Result.FAILED else NotAllChecked(text)


def _facts(context: Context) -> list[tuple[str, str]]:
    document = context.envelope({})
    machine = cast("dict[str, object]", document["machine"])
    gpus = ", ".join(cast("list[str]", machine["gpus"])) or "none"
    return [
        ("Command", str(document["command"])),
        ("Version", f"{document['version']}, commit {document['commit'] or 'unknown'}"),
        ("Date", datetime.now(UTC).isoformat(timespec="seconds")),
        ("Machine", f"{machine['cpu']}, {machine['cores']} cores, GPU: {gpus}"),
    ]


def _table(checks: list[Check]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("check", "result", ""):
        table.add_column(name, no_wrap=bool(name))
    for check in checks:
        style = _STYLES[check.result]
        text = check.text.replace("[", r"\[")
        table.add_row(check.name, f"[{style}]{check.result.value}[/]", text)
    return table
