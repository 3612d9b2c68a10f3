"""``millpond pool``: the daemon in the foreground, and its switches."""

import logging
import sys
from pathlib import Path

import click

from millpond.cli.context import Context, examples, pass_context, socket_option
from millpond.cli.output import ProgressLine, stderr, stdout
from millpond.config import format_size
from millpond.service.server import ServeOptions, Serving, serve


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "millpond pool --size 256MiB",
        "millpond pool --size 200GiB --socket /run/millpond/pool.sock",
        "millpond pool off          # replicas compute everything themselves",
        "millpond pool on",
        "millpond pool flush        # forget every block",
    ),
)
@click.option("--size", metavar="SIZE", help="Memory for blocks, such as 256MiB or 200GiB.")
@click.option("--extent", metavar="SIZE", help="Unit in which memory is given to a slot size.")
@click.option("--eviction", metavar="POLICY", help="What goes first: lru or arc.  [default: lru]")
@click.option(
    "--admission", metavar="POLICY", help="What is kept: always or second-touch.  [default: always]"
)
@click.option(
    "--state-ratio", metavar="SHARE", help="Memory that recurrent states may take.  [default: 0.5]"
)
@socket_option
@click.pass_context
def pool(context: click.Context, **flags: object) -> None:
    """Run the pool's daemon, or switch a running one.

    Without a subcommand, serves in the foreground until Ctrl-C or SIGTERM. A size that does
    not fit is refused; the memory is taken from the kernel from then on, and what is there is
    used while the rest is still being taken.
    """
    if context.invoked_subcommand is not None:
        if any(value is not None for value in flags.values()):
            raise click.UsageError(
                f"options go after the subcommand: millpond pool {context.invoked_subcommand} ..."
            )
        return
    keys = {name: name if name == "socket" else f"pool.{name}" for name in flags}
    settings = context.ensure_object(Context).settings(
        {keys[name]: value for name, value in flags.items()}
    )
    config = settings.pool()
    # Timestamps and levels for a log file; the daemon's own modules say what happened.
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    stderr.print(
        f"pool of {format_size(config.size_bytes)} at {config.socket} "
        f"(extent {'chosen by the pool' if config.extent_bytes is None else config.extent_bytes}; "
        f"eviction {config.retention.eviction}, admission {config.retention.admission}, "
        f"at most {config.retention.state_ratio:g} of it for states)",
        markup=False,
    )
    for key, source in settings.sources().items():
        stderr.print(f"  {key} from {source}", markup=False)
    with ProgressLine() as progress:

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            if done_bytes == total_bytes:
                progress.show(f"all memory is there: {format_size(total_bytes)}", stage="done")
                return
            percent = 100 * done_bytes // total_bytes
            progress.show(f"taking memory: {percent} % of {format_size(total_bytes)}")

        def on_ready(serving: Serving) -> None:
            progress.__exit__()
            stdout.print(f"serving at {serving.socket_path}", markup=False)

        serve(
            ServeOptions(
                socket_path=str(config.socket),
                size_bytes=config.size_bytes,
                extent_bytes=config.extent_bytes,
                retention=config.retention,
                on_progress=on_progress,
            ),
            on_ready=on_ready,
        )


@pool.command(epilog=examples("millpond pool on"))
@socket_option
@pass_context
def on(context: Context, socket: Path | None) -> None:
    """Turn a running pool on: lookups may hit, blocks are kept."""
    with context.connect(socket) as admin:
        admin.switch(enabled=True)
    stdout.print("pool is on")


@pool.command(epilog=examples("millpond pool off"))
@socket_option
@pass_context
def off(context: Context, socket: Path | None) -> None:
    """Turn a running pool off: every lookup misses, nothing new is kept.

    What the pool holds stays and is found again after `millpond pool on`.
    """
    with context.connect(socket) as admin:
        admin.switch(enabled=False)
    stdout.print("pool is off")


@pool.command(epilog=examples("millpond pool flush"))
@socket_option
@pass_context
def flush(context: Context, socket: Path | None) -> None:
    """Make a running pool forget every block."""
    with context.connect(socket) as admin:
        admin.flush()
    stdout.print("pool is empty")
