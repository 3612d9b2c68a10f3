"""``millpond inspect``: invariants, what keys there are, and one prefix end to end."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, cast

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context, socket_option
from millpond.cli.exits import AnswerIsNo
from millpond.cli.figures import count, number, tree
from millpond.cli.inspection import report_fields, requests_table
from millpond.cli.keys import Block, Blocks
from millpond.cli.output import print_json, stdout
from millpond.model.limits import BLOCKS_SHOWN_MAX
from millpond.service.client import AdminClient
from millpond.service.protocol import Report

_KEY_SHOWN: Final = 16
"""Digits of a key in a table: as many as tell blocks apart, and few enough for 80 columns."""
_HEX: Final = frozenset("0123456789abcdef")


def _key_prefix(_context: object, _parameter: object, value: str | None) -> str | None:
    if value is None:
        return None
    value = value.lower()
    if not value or set(value) - _HEX:
        raise click.BadParameter(f"{value!r} is not the beginning of a key in hexadecimal")
    return value


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found; None stands for what was not asked for.

    ``named`` are the blocks whose key begins as asked; ``chain`` is there if it is one.
    """

    num_blocks: int
    blocks: Blocks
    named: Sequence[Block] | None = None
    chain: Sequence[Block] | None = None
    reports: Sequence[tuple[str, Report]] | None = None

    @property
    def num_hidden(self) -> int:
        """Blocks of the pool that one answer does not show."""
        return max(0, self.num_blocks - len(self.blocks.all))


@click.command(
    epilog=examples(
        "millpond inspect                       # invariants, totals, and 20 prefixes",
        "millpond inspect --limit 200           # more of them",
        "millpond inspect --key 3fa9c1          # one prefix, from block 0 to this key",
        "millpond inspect --request my-chat-17  # where a request's tokens came from",
        "millpond inspect --json | jq .data.namespaces",
    )
)
@click.option(
    "--key", callback=_key_prefix, metavar="HEX-PREFIX", help="Beginning of one block's key."
)
@click.option("--request", "request_id", metavar="ID", help="As for `millpond requests`.")
@click.option(
    "--limit",
    type=click.IntRange(1, BLOCKS_SHOWN_MAX),
    default=20,
    show_default=True,
    metavar="N",
    help="Prefixes to list; the longest come first.",
)
@socket_option
@json_option
@pass_context
def inspect(  # noqa: PLR0913 - click hands over one argument an option
    context: Context,
    *,
    key: str | None,
    request_id: str | None,
    limit: int,
    socket: Path | None,
    as_json: bool,
) -> None:
    """Check the pool's invariants and show which keys it holds, or one prefix end to end.

    A prefix is shown block by block: the state of each of its parts, who wrote them, and how
    many leases hold them. The daemon serves nobody while it checks, which takes seconds for
    millions of blocks. Ends with 1 if what was asked for is not there, and with 5 if an
    invariant is broken.
    """
    with context.connect(socket) as admin:
        admin.check()
        found = look(admin, key=key, request_id=request_id)
    if as_json:
        print_json(context.envelope(as_data(found, limit)))
    else:
        stdout.print("invariants hold")
        for table in _tables(found, limit):
            stdout.print(table)
    _complain(found, key, request_id)


def look(admin: AdminClient, *, key: str | None, request_id: str | None) -> Inspection:
    """Ask the daemon for all that is to be shown."""
    num_blocks = int(number(tree(admin.status(), "pool")["num_blocks"]))
    blocks = Blocks(admin.blocks(BLOCKS_SHOWN_MAX))
    found = Inspection(num_blocks, blocks)
    if request_id is not None:
        found = replace(found, reports=admin.requests_named(request_id))
    if key is None:
        return found
    named = blocks.named(key)
    return replace(found, named=named, chain=blocks.chain(named[0]) if len(named) == 1 else None)


def as_data(found: Inspection, limit: int) -> dict[str, object]:
    """Return what was found as plain values; broken invariants never get here."""
    data: dict[str, object] = {
        "invariants": "hold",
        "num_blocks": found.num_blocks,
        "num_blocks_shown": len(found.blocks.all),
        "namespaces": found.blocks.summary(),
        "prefixes": [asdict(block) for block in _longest(found, limit)],
    }
    if found.named is not None:
        data["named"] = [block.key for block in found.named]
    if found.chain is not None:
        data["chain"] = [asdict(block) for block in found.chain]
    if found.reports is not None:
        data["requests"] = [report_fields(*entry) for entry in found.reports]
    return data


def _complain(found: Inspection, key: str | None, request_id: str | None) -> None:
    if request_id is not None and not found.reports:
        raise AnswerIsNo(f"no finished request {request_id!r} is remembered")
    if key is None or found.chain is not None:
        return
    if found.named:
        raise AnswerIsNo(f"{len(found.named)} keys begin with {key}: give more digits")
    hidden = (
        f" among the {len(found.blocks.all):,} blocks that one answer shows; the pool holds "
        f"{found.num_blocks:,}"
        if found.num_hidden
        else f" among the pool's {found.num_blocks:,} blocks"
    )
    raise AnswerIsNo(f"no key begins with {key}{hidden}")


# ---------------------------------------------------------------- tables


def _tables(found: Inspection, limit: int) -> list[Table]:
    tables: list[Table] = []
    if found.reports:
        tables.append(requests_table(found.reports))
    if found.chain is not None:
        tables.append(_chain(found.chain))
    elif found.named:
        tables.append(_keys(found.named[:limit], "Keys that begin so"))
    elif found.named is None and found.reports is None:
        tables += [_namespaces(found), _parts(found)]
        tables.append(_keys(_longest(found, limit), "Last keys of the longest prefixes"))
    return tables


def _longest(found: Inspection, limit: int) -> list[Block]:
    return sorted(found.blocks.ends(), key=lambda block: -block.block)[:limit]


def _table(title: str, *columns: str) -> Table:
    # Without frames they fit into 80 columns, which is what a pipe gets.
    table = Table(
        *columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for column in table.columns:
        column.overflow = "fold"
    return table


def _namespaces(found: Inspection) -> Table:
    table = _table(
        f"{count(found.num_blocks)} blocks", "namespace", "blocks", "ready", "prefixes", "longest"
    )
    for total in found.blocks.summary():
        names = ("namespace", "num_blocks", "num_ready", "num_prefixes", "longest_prefix")
        table.add_row(*(count(total[name]) for name in names))
    if found.num_hidden:
        table.caption = (
            f"Of {found.num_blocks:,} blocks, one answer shows {len(found.blocks.all):,}: "
            f"{found.num_hidden:,} are not counted here"
        )
    return table


def _parts(found: Inspection) -> Table:
    table = _table(
        "Parts of these blocks",
        *("namespace", "part", "slots", "bytes each", "held", "states", "written by"),
    )
    for total in found.blocks.summary():
        for part in cast("Sequence[Mapping[str, object]]", total["parts"]):
            table.add_row(
                count(total["namespace"]),
                *(count(part[name]) for name in ("part", "num_slots", "slot_bytes", "num_held")),
                _counts(part, "num_by_state"),
                _counts(part, "num_by_writer"),
            )
    return table


def _counts(part: Mapping[str, object], name: str) -> str:
    return ", ".join(f"{key}: {count(value)}" for key, value in tree(part, name).items())


def _keys(blocks: Sequence[Block], title: str) -> Table:
    table = _table(title, "key", "namespace", "block", "ready", "parts", "holds")
    for block in blocks:
        table.add_row(
            block.key[:_KEY_SHOWN],
            str(block.namespace),
            str(block.block),
            _yes_no(block),
            ",".join(str(slot.part) for slot in block.slots),
            str(sum(slot.num_holds for slot in block.slots)),
        )
    return table


def _chain(chain: Sequence[Block]) -> Table:
    last = chain[-1]
    table = _table(
        f"From block 0 to {last.key}",
        *("block", "key", "ready", "part", "state", "writer", "holds", "offset"),
    )
    for block in chain:
        cells = [str(block.block), block.key[:_KEY_SHOWN], _yes_no(block)]
        for slot in block.slots:
            table.add_row(
                *cells,
                str(slot.part),
                slot.state,
                slot.writer,
                str(slot.num_holds),
                count(slot.offset),
            )
            cells = [""] * len(cells)
        if not block.slots:
            table.add_row(*cells, "none")
    table.caption = f"namespace {last.namespace}, {len(chain)} blocks"
    return table


def _yes_no(block: Block) -> str:
    return "yes" if block.is_ready else "no"
