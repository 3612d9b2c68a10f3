"""All commands under one name, and the one place where errors end."""

import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from millpond import __version__
from millpond.cli.bench import bench
from millpond.cli.blocks import inspect
from millpond.cli.context import Context, examples
from millpond.cli.demo import demo
from millpond.cli.exits import Exit, Terminated, exit_of
from millpond.cli.gate import gate
from millpond.cli.inspection import check, requests
from millpond.cli.output import stderr
from millpond.cli.pool import pool
from millpond.cli.router import router
from millpond.cli.status import status
from millpond.cli.up import up


@click.group(
    epilog=examples(
        "millpond demo --quick",
        "millpond up --model MODEL --replicas 2 --pool 64GiB",
        "millpond status",
    )
)
@click.version_option(__version__, message="millpond %(version)s")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration.  [default: $MILLPOND_CONFIG, else millpond.toml in this folder]",
)
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """One key/value cache in host memory for all vLLM replicas of a model on one machine.

    Values come from a TOML file, above it MILLPOND_* variables, above them flags.
    """
    context.ensure_object(Context).find_config(config)


for _command in (up, pool, router, status, requests, inspect, check, demo, gate, bench):
    cli.add_command(_command)


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run one command line and return its exit code; errors are printed to stderr."""
    try:
        code: object = cli.main(
            list(argv),
            prog_name="millpond",
            standalone_mode=False,
            obj=Context(environ=environ, argv=tuple(argv)),
        )
    except click.ClickException as error:
        error.show()
        return Exit.USAGE
    except click.Abort:
        return Exit.INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - every command ends here
        return _failed(error)
    return code if isinstance(code, int) else Exit.OK


def main() -> NoReturn:
    """Run the command line of this process."""
    # A supervisor's stop unwinds like Ctrl-C, so that children are stopped and folders removed.
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(run(sys.argv[1:], os.environ))


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated


def _failed(error: BaseException) -> Exit:
    code = exit_of(error)
    if code is Exit.BUG:
        stderr.print("".join(traceback.format_exception(error)), markup=False)
        stderr.print("millpond: unexpected error; this is a bug", markup=False)
    elif code in (Exit.INTERRUPTED, Exit.TERMINATED):
        stderr.print("millpond: stopped", markup=False)
    else:
        stderr.print(f"millpond: {error}", markup=False)
    return code
