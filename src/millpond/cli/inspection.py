"""``millpond requests`` and ``check``: what became of requests, and whether the pool holds."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context, socket_option
from millpond.cli.exits import AnswerIsNo
from millpond.cli.figures import count, writers
from millpond.cli.output import print_json, stdout
from millpond.service.protocol import Report


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
        print_json(context.envelope({"requests": [report_fields(*entry) for entry in found]}))
    elif found:
        stdout.print(requests_table(found))
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


def requests_table(found: Sequence[tuple[str, Report]]) -> Table:
    """Return a row for each (replica, report)."""
    table = Table("request", "replica")
    for column in ("prompt", "computed", "local", "loaded"):
        table.add_column(column, justify="right")
    table.add_column("written by")
    for replica, report in found:
        table.add_row(
            report.request_id,
            replica,
            count(report.prompt_tokens),
            count(report.computed_tokens),
            count(report.local_tokens),
            count(report.loaded_tokens),
            writers(report.writers),
        )
    return table


def report_fields(replica: str, report: Report) -> dict[str, object]:
    """Return a report as plain values."""
    return {
        "request_id": report.request_id,
        "replica": replica,
        "prompt_tokens": report.prompt_tokens,
        "computed_tokens": report.computed_tokens,
        "local_tokens": report.local_tokens,
        "loaded_tokens": report.loaded_tokens,
        "writers": report.writers,
    }
