"""``millpond gate order``: are copies ordered when what they depend on is late?"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context
from millpond.cli.exits import AnswerIsNo, NotAllChecked
from millpond.cli.output import ProgressLine, print_json, stderr, stdout
from millpond.gate.errors import CannotTest, NoPackage
from millpond.gate.targets import TARGETS

if TYPE_CHECKING:
    from millpond.gate.order import OrderReport

_OWN: Final = "millpond"
_DELAY_S: Final = 0.3
_STYLES: Final = {
    "ordered": "green",
    "right": "green",
    "ordered by a host block": "green",
    "NOT ordered": "bold red",
    "WRONG": "bold red",
    "could not test": "yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedOrder:
    """The command's options. ``mutants`` breaks our own code instead of testing it."""

    device: str = "auto"
    targets: tuple[str, ...] = ()
    mutants: bool = False
    delay_s: float = _DELAY_S


@dataclass(frozen=True, slots=True)
class OrderChecked:
    """What ``gate order`` found; ``report`` is its JSON data."""

    report: "OrderReport"

    def summary(self) -> str:
        """Return the result in one line."""
        report = self.report
        faults, untested = report.faults(), report.untested()
        if faults:
            return f"WRONG: {'; '.join(faults)}"
        bytes_compared = f"{report.num_bytes:,} bytes compared in {report.seconds:.1f} s"
        if untested:
            return f"{len(untested)} could not be tested; {bytes_compared}"
        if report.mutants:
            return f"all {len(report.mutants)} mutants caught; {bytes_compared}"
        return f"ordered: {len(report.findings)} tests; {bytes_compared}"

    def error(self) -> Exception | None:
        """Return what the command has to end with, or None."""
        faults, untested = self.report.faults(), self.report.untested()
        if faults:
            return AnswerIsNo("; ".join(faults))
        if not untested:
            return None
        text = "; ".join(f"{each.path}: {each.reason}" for each in untested)
        causes = {each.cause for each in untested}
        return causes.pop()(text) if len(causes) == 1 else NotAllChecked(text)


@click.command(
    "order",
    epilog=examples(
        "millpond gate order",
        "millpond gate order --device cuda --report order.html",
        "millpond gate order --mutants --json | jq .data.mutants",
        "millpond gate order --target vllm-swap-blocks --target my.module:factory",
    ),
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "emulated"]),
    default="auto",
    show_default=True,
    help="Where copies run; emulated streams are threads.",
)
@click.option(
    "--mutants", is_flag=True, help="Break our own code, one order at a time: each must be noticed."
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Test this path instead of our own; may be repeated. MODULE:FACTORY for one of your own.",
)
@click.option("--list", "as_list", is_flag=True, help="Print the names of all targets.")
@click.option(
    "--delay",
    "delay_s",
    type=click.FloatRange(0.05, 20.0),
    default=_DELAY_S,
    show_default=True,
    metavar="SECONDS",
    help="How late the work is that copies depend on.",
)
@click.option(
    "--report",
    "report_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="Write a page with the verdicts, and pictures of wrong bytes.",
)
@json_option
@pass_context
def gate_order(
    context: Context, *, as_list: bool, as_json: bool, report_file: Path | None, **flags: object
) -> None:
    """Test that copies wait for what they depend on, by making that late.

    Without --target our own copy engine is tested, by each of its routes. Every byte is
    compared, and each verdict comes with controls: the same with the order removed must fail,
    and behind a full synchronize it must pass. Ends with 0 only if all that was asked for was
    checked and is ordered, with 1 if something is not, with 7 to 11 if something could not be
    tested.
    """
    if as_list:
        stdout.print("\n".join((_OWN, *TARGETS)), markup=False)
        return
    asked = AskedOrder(
        device=cast("str", flags["device"]),
        targets=cast("tuple[str, ...]", flags["targets"]),
        mutants=cast("bool", flags["mutants"]),
        delay_s=cast("float", flags["delay_s"]),
    )
    # Other projects log to stdout, where only the result belongs.
    with contextlib.redirect_stdout(sys.stderr):
        checked = check_order(asked)
    if as_json:
        print_json(context.envelope(checked.report.as_json()))
    else:
        _print(checked)
    if report_file is not None:
        _write(context, checked.report, report_file)
    error = checked.error()
    if error is not None:
        raise error


def check_order(asked: AskedOrder) -> OrderChecked:
    """Test what was asked for, with progress on stderr; raises a kind of ``CannotTest``."""
    for target in asked.targets:
        if target not in (_OWN, *TARGETS) and ":" not in target:
            names = ", ".join((_OWN, *TARGETS))
            raise click.UsageError(
                f"--target {target!r}: neither MODULE:FACTORY nor one of {names}"
            )
    if asked.mutants and asked.targets:
        raise click.UsageError("--mutants breaks our own code: there is no --target with it")
    try:
        # Not above: torch takes seconds to import, and may be missing.
        from millpond.gate import order
    except ImportError as error:
        raise NoPackage(f"the gate needs torch, which comes with the engine: {error}") from error
    device = order.open_device(asked.device)
    timing = order.Timing(delay_s=asked.delay_s)
    options = order.OrderOptions(asked.targets or (order.OWN,), timing)
    try:
        with ProgressLine() as line:
            check = order.check_mutants if asked.mutants else order.check_order
            return OrderChecked(check(device, options, lambda text: line.show(text, stage="order")))
    finally:
        device.close()


def _print(checked: OrderChecked) -> None:
    report = checked.report
    stdout.print(f"device: {report.device}", markup=False)
    stdout.print(_mutant_table(report) if report.mutants else _table(report))
    stdout.print(checked.summary(), markup=False)


def _table(report: "OrderReport") -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("path", "edge", "direction", "verdict", "bytes compared", "why"):
        justify = "right" if name.startswith("bytes") else "left"
        table.add_column(name, justify=justify, no_wrap=name != "why")
    for each in report.findings:
        words = each.words()
        table.add_row(
            each.path,
            "all" if each.edge is None else each.edge.value,
            "" if each.direction is None else each.direction.value,
            f"[{_STYLES[words]}]{words}[/]",
            f"{each.num_bytes:,}",
            each.reason.replace("[", r"\["),
        )
    return table


def _mutant_table(report: "OrderReport") -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("edge", "mutant", "", "what was seen"):
        table.add_column(name, no_wrap=name != "what was seen")
    for each in report.mutants:
        caught = "[green]caught[/]" if each.is_caught else "[bold red]NOT caught[/]"
        reason = each.reason.replace("[", r"\[")
        table.add_row(each.mutant.edge.value, each.mutant.name, caught, reason)
    return table


def _write(context: Context, report: "OrderReport", file: Path) -> None:
    from millpond.gate.report import order_html

    document = context.envelope({})
    machine = cast("dict[str, object]", document["machine"])
    gpus = ", ".join(cast("list[str]", machine["gpus"])) or "none"
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    facts: Sequence[tuple[str, str]] = (
        ("Command", str(document["command"])),
        ("Version", f"{document['version']}, commit {document['commit'] or 'unknown'}"),
        ("Date", datetime.now(UTC).isoformat(timespec="seconds")),
        ("Machine", f"{machine['cpu']}, {machine['cores']} cores, GPU: {gpus}"),
        ("Under test", versions or "our own code, broken on purpose"),
        ("Delay", f"{report.delay_s:g} s"),
    )
    file.write_text(order_html(report, facts), encoding="utf-8")
    stderr.print(f"wrote {file}", markup=False)


__all__ = ["AskedOrder", "CannotTest", "OrderChecked", "check_order", "gate_order"]
