"""``millpond gate``: shows on this machine whether copies are ordered and the pool is right."""

from typing import Final

import click

from millpond.cli.context import examples
from millpond.cli.gate_all import gate_all
from millpond.cli.gate_order import gate_order
from millpond.cli.gate_pool import gate_pool
from millpond.cli.gate_service import gate_service

_COMMANDS: Final[tuple[click.Command, ...]] = (gate_order, gate_pool, gate_service, gate_all)


@click.group(
    epilog=examples("millpond gate order", "millpond gate pool --size 8GiB", "millpond gate all")
)
def gate() -> None:
    """Check that what is moved is right: on this machine, with this engine.

    Each subcommand says what it checked and how much of it, and ends with 0 only if all of
    that was checked and is right.
    """


for _command in _COMMANDS:
    gate.add_command(_command)
