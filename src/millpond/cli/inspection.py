"""``millpond status``, ``requests`` and ``check``: what a running daemon knows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import click
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context, socket_option
from millpond.cli.exits import AnswerIsNo
from millpond.cli.output import print_json, stdout
from millpond.service.protocol import Report

Tree = Mapping[str, object]


@click.command(
    epilog=examples("millpond status", "millpond status --json | jq .data.pool.num_blocks")
)
@socket_option
@json_option
@pass_context
def status(context: Context, socket: Path | None, as_json: bool) -> None:
    """Show what the pool holds and what each replica got from it."""
    with context.connect(socket) as admin:
        statistics = admin.status()
    if as_json:
        print_json(context.envelope(statistics))
        return
    for table in status_tables(statistics):
        stdout.print(table)


def status_tables(statistics: Tree) -> list[Table]:
    """Return the daemon's statistics as tables for people."""
    pool, service = _tree(statistics, "pool"), _tree(statistics, "service")
    memory = Table("memory", "MiB", "slots", title="Pool is " + _on_or_off(pool))
    slots = _tree(pool, "num_slots")
    for state, num_bytes in _tree(pool, "bytes").items():
        memory.add_row(state, f"{_number(num_bytes) / 2**20:,.1f}", _count(slots.get(state)))
    memory.caption = (
        f"{_count(pool['num_blocks'])} blocks, {_count(pool['num_evictions'])} evictions, "
        f"{_count(pool['num_leases'])} leases, up {_number(service['uptime_s']):,.0f} s"
    )
    replicas = Table("replica", title="Tokens of finished requests, by replica")
    for column in ("requests", "prompt", "computed", "local", "loaded", "written by"):
        replicas.add_column(column, justify="left" if column == "written by" else "right")
    for name, totals in _tree(statistics, "tokens").items():
        counts = cast("Tree", totals)
        columns = ("num_requests", "prompt_tokens", "computed_tokens", "local_tokens")
        replicas.add_row(
            name,
            *(_count(counts[column]) for column in (*columns, "loaded_tokens")),
            _writers(_tree(counts, "loaded_tokens_by_writer")),
        )
    return [memory, replicas]


@click.command(
    epilog=examples("millpond requests --last 5", "millpond requests my-request-17 --json")
)
@click.argument("request_id", required=False)
@click.option("--last", type=click.IntRange(1, 1000), default=20, show_default=True, metavar="N")
@socket_option
@json_option
@pass_context
def requests(
    context: Context, request_id: str | None, last: int, socket: Path | None, as_json: bool
) -> None:
    """Show where the tokens of finished requests came from.

    REQUEST_ID is what the client sent as X-Request-Id, or the id in the engine's answer.
    Without it, the latest requests are shown.
    """
    with context.connect(socket) as admin:
        found = (
            admin.latest_requests(last) if request_id is None else admin.requests_named(request_id)
        )
    if as_json:
        print_json(context.envelope({"requests": [_report(*entry) for entry in found]}))
    elif found:
        stdout.print(_requests_table(found))
    if request_id is not None and not found:
        raise AnswerIsNo(f"no finished request {request_id!r} is remembered")


@click.command(epilog=examples("millpond check"))
@socket_option
@pass_context
def check(context: Context, socket: Path | None) -> None:
    """Have the daemon check its own invariants; slow on a large pool."""
    with context.connect(socket) as admin:
        admin.check()
    stdout.print("invariants hold")


def _requests_table(found: Sequence[tuple[str, Report]]) -> Table:
    table = Table("request", "replica")
    for column in ("prompt", "computed", "local", "loaded"):
        table.add_column(column, justify="right")
    table.add_column("written by")
    for replica, report in found:
        table.add_row(
            report.request_id,
            replica,
            _count(report.prompt_tokens),
            _count(report.computed_tokens),
            _count(report.local_tokens),
            _count(report.loaded_tokens),
            _writers(report.writers),
        )
    return table


def _report(replica: str, report: Report) -> dict[str, object]:
    return {
        "request_id": report.request_id,
        "replica": replica,
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "local_tokens": report.local_tokens,
        "loaded_tokens": report.loaded_tokens,
        "writers": report.writers,
    }


def _tree(tree: Tree, key: str) -> Tree:
    return cast("Tree", tree[key])


def _number(value: object) -> float:
    return float(cast("float", value))


def _count(value: object) -> str:
    return "" if value is None else f"{_number(value):,.0f}"


def _writers(writers: Mapping[str, object]) -> str:
    return ", ".join(f"{name}: {_count(tokens)}" for name, tokens in writers.items())


def _on_or_off(pool: Tree) -> str:
    return "on" if pool["enabled"] else "off"
