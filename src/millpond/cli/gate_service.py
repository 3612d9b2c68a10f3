"""``millpond gate service``: the same answers with the pool off and on, from real replicas."""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, cast

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context, socket_option
from millpond.cli.exits import AnswerIsNo, NotAllChecked
from millpond.cli.output import ProgressLine, print_json, stderr, stdout
from millpond.cli.up import show_start
from millpond.gate.service import (
    CaseVerdict,
    ServiceReport,
    choose_cases,
    run_cases,
)
from millpond.gate.service_cases import cases_for
from millpond.gate.service_launched import (
    COPY_DELAY_S,
    Launched,
    inexact_sums,
    launch,
    pair_of,
)
from millpond.gate.service_pair import (
    TOLERANCE,
    CannotCheck,
    Mismatch,
    Pair,
    PairOptions,
    find_block_tokens,
    find_place,
)
from millpond.launch.resources import pick_device
from millpond.model.errors import SetupError

_HOW_OFF: Final = 'the request says {"kv_transfer_params": {"millpond": "off"}}, with its own salt'


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedService:
    """The command's options; no ``urls`` launches a pool and two replicas."""

    urls: tuple[str, ...] = ()
    socket: Path | None = None
    device: str = "auto"
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    block_tokens: int | None = None
    tolerance: float | None = None
    seed: int = 1
    logs: Path | None = None


@dataclass(frozen=True, slots=True)
class ServiceChecked:
    """What ``gate service`` found; ``report`` is its JSON data."""

    report: ServiceReport

    def summary(self) -> str:
        """Return the result in one line."""
        report = self.report
        counts = ", ".join(
            f"{len(found)} {verdict}"
            for verdict in CaseVerdict
            if (found := report.with_verdict(verdict))
        )
        num_compared = sum(case.num_compared for case in report.cases)
        close_calls = f", {report.num_close_calls} close calls" if report.num_close_calls else ""
        inexact = f"; sums not exact: {report.why_inexact}" if report.why_inexact else ""
        return f"{counts}; {num_compared:,} tokens compared{close_calls} ({report.mode}){inexact}"

    def error(self) -> Exception | None:
        """Return what the command has to end with, or None."""
        kinds = {CaseVerdict.FAILED: AnswerIsNo, CaseVerdict.NOT_CHECKED: NotAllChecked}
        for verdict, kind in kinds.items():
            found = self.report.with_verdict(verdict)
            if found:
                return kind("; ".join(f"{case.name} {verdict}: {case.why}" for case in found))
        return None


@click.command(
    "service",
    epilog=examples(
        "millpond gate service --launch",
        "millpond gate service --launch --only moved-hit --only corruption",
        "millpond gate service --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 "
        "--only cold --only moved-hit",
    ),
)
@click.option("--url", "urls", multiple=True, metavar="URL", help="A running replica; give two.")
@click.option("--launch", "is_launch", is_flag=True, help="Start a pool and two small replicas.")
@click.option("--only", multiple=True, metavar="CASE", help="Check only these; repeat it.")
@click.option("--skip", multiple=True, metavar="CASE", help="Check all but these; repeat it.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Of launched replicas.",
)
@click.option(
    "--block-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Of a block of running replicas.  [default: found out by a moved request]",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0.0),
    metavar="X",
    help="Difference of log-probabilities that counts as equal; with 0 a batch may not round "
    "differently either.  [default: 0 where launched replicas add up each token by itself, as on "
    f"a CPU; else {TOLERANCE:g}]",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the prompts.")
@click.option("--logs", type=click.Path(path_type=Path), metavar="DIR", help="Keep logs here.")
@socket_option
@json_option
@pass_context
def gate_service(context: Context, *, as_json: bool, is_launch: bool, **flags: object) -> None:
    """Check that two replicas give the same answers with the pool off and on.

    The same prompts, greedy: same tokens, and log-probabilities equal within --tolerance, for
    cold, local-hit, moved-hit, partial-hit, block-multiples, concurrent and cancel-load; with
    --launch also for preemption, killed-store, killed-load, daemon-restart and corruption,
    which overwrites one page in the pool and must see another answer. With the pool off means
    that a request says so itself; nothing is switched. Ends with 1 if a case failed, and with
    7 if one that was asked for could not be checked.
    """
    urls = cast("tuple[str, ...]", flags["urls"])
    if is_launch == bool(urls) or (urls and len(urls) != 2):
        raise click.UsageError("give --launch, or --url twice: one for each replica")
    tolerance = cast("float | None", flags["tolerance"])
    # A range takes "nan", and then all would be equal.
    if not (tolerance is None or math.isfinite(tolerance)):
        raise click.UsageError(f"--tolerance {tolerance}: not a finite number")
    asked = AskedService(
        urls=urls,
        socket=cast("Path | None", flags["socket"]),
        device=cast("str", flags["device"]),
        only=cast("tuple[str, ...]", flags["only"]),
        skip=cast("tuple[str, ...]", flags["skip"]),
        block_tokens=cast("int | None", flags["block_tokens"]),
        tolerance=tolerance,
        seed=cast("int", flags["seed"]),
        logs=cast("Path | None", flags["logs"]),
    )
    checked = check_service(context, asked)
    if as_json:
        print_json(context.envelope(checked.report.as_json()))
    else:
        stdout.print(_table(checked.report))
        stdout.print(checked.summary(), markup=False)
    error = checked.error()
    if error is not None:
        raise error


def check_service(context: Context, asked: AskedService) -> ServiceChecked:
    """Check what was asked for, with progress on stderr."""
    names = choose_cases(asked.only, asked.skip)
    check = _check_running if asked.urls else _check_launched
    with ProgressLine() as line:
        return ServiceChecked(check(context, asked, names, line))


def _check_running(
    context: Context, asked: AskedService, names: tuple[str, ...], line: ProgressLine
) -> ServiceReport:
    socket = str(context.settings({"socket": asked.socket}).socket())
    places = {name: find_place(url) for name, url in zip("ab", asked.urls, strict=True)}
    with context.connect(asked.socket) as admin:
        if not cast("Mapping[str, object]", admin.status()["pool"])["enabled"]:
            raise SetupError("the pool is switched off: millpond pool on")
    block_tokens = asked.block_tokens
    if block_tokens is None:
        line.show("asking for the size of a block", stage="block")
        try:
            block_tokens = find_block_tokens(places, socket, asked.seed)
        except Mismatch as mismatch:
            raise AnswerIsNo(str(mismatch)) from None
        except CannotCheck as reason:
            raise NotAllChecked(str(reason)) from None
    options = PairOptions(
        socket=socket,
        block_tokens=block_tokens,
        tolerance=TOLERANCE if asked.tolerance is None else asked.tolerance,
        seed=asked.seed,
        is_own=False,
    )
    pair = Pair(places, options, lambda step: line.show(step, stage=step))
    report = _report("running replicas", pair)
    run_cases(report, names, list(cases_for(pair)), on_step=pair.on_step, before_each=lambda: None)
    report.num_close_calls = pair.num_close_calls
    return report


def _check_launched(
    context: Context, asked: AskedService, names: tuple[str, ...], line: ProgressLine
) -> ServiceReport:
    device = cast("Literal['cpu', 'cuda']", pick_device(asked.device, context.environ))
    # A folder with a short path: that of a socket has a limit.
    with tempfile.TemporaryDirectory(prefix="millpond-gate-") as folder:
        line.show("making a model", stage="model")
        system = launch(
            Path(folder),
            device=device,
            environ=context.environ,
            logs=asked.logs,
            on_progress=lambda states: show_start(line, states),
        )
        with system:
            pair = pair_of(
                system,
                tolerance=TOLERANCE if asked.tolerance is None else asked.tolerance,
                seed=asked.seed,
                on_step=lambda step: line.show(step, stage=step),
            )
            why_inexact = ""
            if asked.tolerance is None and device == "cpu":
                pair.on_step("looking whether answers depend on the batch")
                why_inexact = inexact_sums(pair)
                if not why_inexact:
                    pair.options = replace(pair.options, tolerance=0.0)
            launched = Launched(system, pair)
            held = f", copies held back by {COPY_DELAY_S} s" if device == "cpu" else ""
            report = _report(f"launched on {device}{held}", pair)
            report.why_inexact = why_inexact
            if why_inexact:
                stderr.print(f"gate service: sums are not exact: {why_inexact}", markup=False)
            run_cases(
                report,
                names,
                [*cases_for(pair), *launched.cases()],
                on_step=pair.on_step,
                before_each=launched.revive,
            )
    report.num_close_calls = pair.num_close_calls
    return report


def _report(mode: str, pair: Pair) -> ServiceReport:
    stderr.print(
        f"gate service: {mode}; pool off: {_HOW_OFF}; log-probabilities within "
        f"{pair.options.tolerance:g} are equal, blocks of {pair.block} tokens, "
        f"seed {pair.options.seed}",
        markup=False,
    )
    return ServiceReport(
        mode=mode,
        how_off=_HOW_OFF,
        replicas=[place.url for place in pair.places.values()],
        block_tokens=pair.block,
        tolerance=pair.options.tolerance,
        seed=pair.options.seed,
    )


def _table(report: ServiceReport) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("what it shows, or why")
    for case in report.cases:
        table.add_row(case.name, case.verdict.value, f"{case.num_compared:,}", case.why)
    return table
