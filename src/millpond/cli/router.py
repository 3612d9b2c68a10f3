"""``millpond router``: the front of the replicas in the foreground, and its switches."""

import logging
import sys
from pathlib import Path
from typing import Final, cast

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millpond.cli.context import (
    Context,
    FunctionT,
    examples,
    json_option,
    pass_context,
)
from millpond.cli.figures import count
from millpond.cli.output import print_json, stderr, stdout
from millpond.config import parse_size
from millpond.model.errors import ConfigError
from millpond.model.limits import NAME_LENGTH_MAX
from millpond.router.client import RouterClient
from millpond.router.options import METRICS_PATH, Limits, RouterOptions, ServeOptions, Serving
from millpond.router.placement.chosen import Policy
from millpond.router.prompts import Affinity

_ADMIN_SOCKET: Final = "router.sock"
_ROUTER: Final = RouterOptions()
_LIMITS: Final = _ROUTER.limits
_AFFINITY: Final = _ROUTER.affinity
_SECONDS: Final = click.FloatRange(min=0.1, max=86_400)


def admin_socket_option(function: FunctionT) -> FunctionT:
    """Add ``--admin-socket``."""
    return click.option(
        "--admin-socket",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help=f"Where the router is changed.  [default: {_ADMIN_SOCKET} beside the pool's socket]",
    )(function)


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "millpond router --replica a=http://127.0.0.1:8001 --replica b=http://127.0.0.1:8002",
        "millpond router --replica a=http://10.0.0.2:8000 --policy=prefix-affinity --port 9000",
        "millpond router drain a     # nothing new for a; what runs there goes on",
        "millpond router add c=http://127.0.0.1:8003",
        "millpond router replicas",
    ),
)
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="NAME=URL",
    help="An engine, under the name that its connector gives the pool; once for each.",
)
@click.option(
    "--policy",
    type=click.Choice([each.value for each in Policy]),
    default=Policy.COST.value,
    show_default=True,
    help="How a replica is chosen.",
)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="HOST")
@click.option("--port", type=click.IntRange(0, 65_535), default=8000, show_default=True)
@click.option(
    "--pool-socket",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The pool that knows where tokens came from.  [default: the usual socket]",
)
@admin_socket_option
@click.option(
    "--access-log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Append a JSON line for each request; never a body.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Ask clients for this key, too.  [default: keys only pass through]",
)
@click.option(
    "--local-tokens",
    type=click.IntRange(min=1),
    default=_ROUTER.local_tokens,
    show_default=True,
    metavar="N",
    help="Tokens that a replica's own cache holds, about.",
)
@click.option(
    "--pool-tokens",
    type=click.IntRange(min=1),
    default=_ROUTER.pool_tokens,
    show_default=True,
    metavar="N",
    help="Tokens that the pool holds, about.",
)
@click.option("--affinity-header", default=_AFFINITY.header, show_default=True, metavar="NAME")
@click.option("--affinity-cookie", default=_AFFINITY.cookie, show_default=True, metavar="NAME")
@click.option(
    "--first-byte-timeout",
    type=_SECONDS,
    default=_LIMITS.first_byte_s,
    show_default=True,
    metavar="S",
    help="Longest wait for an answer to begin: queue and prefill.",
)
@click.option(
    "--next-byte-timeout",
    type=_SECONDS,
    default=_LIMITS.next_byte_s,
    show_default=True,
    metavar="S",
    help="Longest pause in an answer.",
)
@click.option("--body-max", default="64MiB", show_default=True, metavar="SIZE")
@click.option(
    "--stop-grace",
    type=click.FloatRange(0, 600),
    default=10.0,
    show_default=True,
    metavar="S",
    help="Time for streams to end on Ctrl-C.",
)
@click.pass_context
def router(context: click.Context, **flags: object) -> None:
    """Serve an OpenAI-compatible front for replicas, or change a running one.

    Without a subcommand, serves in the foreground until Ctrl-C or SIGTERM. Everything passes
    through untouched; response headers x-millpond-... say which replica served and which held
    the prefix. Metrics are at /millpond/metrics.
    """
    if context.invoked_subcommand is not None:
        given = [
            name
            for name in flags
            if context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
        ]
        if given:
            raise click.UsageError(
                f"options go after the subcommand: millpond router {context.invoked_subcommand} ..."
            )
        return
    options = serve_options(context.ensure_object(Context), flags)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    limits = options.router.limits
    stderr.print(
        f"router by {options.router.policy} for {', '.join(options.replicas)}; "
        f"pool at {options.pool_socket}, access log {options.access_log or 'off'}, "
        f"key {'asked for' if options.router.api_key else 'not asked for'}, "
        f"first byte within {limits.first_byte_s:g} s, next within {limits.next_byte_s:g} s, "
        f"bodies of at most {limits.body_bytes_max:,} bytes",
        markup=False,
    )

    def on_ready(serving: Serving) -> None:
        stdout.print(f"serving at {serving.url}", markup=False)
        stderr.print(f"metrics at {serving.url}{METRICS_PATH}", markup=False)

    # Only here: other commands start without an HTTP server.
    from millpond.router.server import serve

    serve(options, on_ready=on_ready)


@router.command(epilog=examples("millpond router drain a"))
@click.argument("name")
@admin_socket_option
@pass_context
def drain(context: Context, name: str, admin_socket: Path | None) -> None:
    """Give a replica nothing new. What runs there goes on; `add` takes it back."""
    with RouterClient(_admin_socket(context, admin_socket)) as client:
        found = client.drain(name)
    stdout.print(f"{name} gets nothing new; {found['num_running']} requests run there")


@router.command(
    epilog=examples(
        "millpond router add c=http://127.0.0.1:8003",
        "millpond router add a=http://127.0.0.1:8001   # takes a drained one back",
    )
)
@click.argument("replica", metavar="NAME=URL")
@admin_socket_option
@pass_context
def add(context: Context, replica: str, admin_socket: Path | None) -> None:
    """Take a replica in while the router runs; it gets requests once it is healthy."""
    name, url = parse_replica(replica)
    with RouterClient(_admin_socket(context, admin_socket)) as client:
        found = client.add(name, url)
    stdout.print(f"{name} is {found['state']}")


@router.command(epilog=examples("millpond router replicas", "millpond router replicas --json"))
@admin_socket_option
@json_option
@pass_context
def replicas(context: Context, admin_socket: Path | None, as_json: bool) -> None:
    """Show the replicas of a running router, with their state and load."""
    with RouterClient(_admin_socket(context, admin_socket)) as client:
        found = client.replicas()
    if as_json:
        print_json(context.envelope({"replicas": found}))
        return
    # Without frames an address fits into 80 columns, which is what a pipe gets.
    table = Table("replica", "address", "state", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("running", "queued tokens", "requests"):
        table.add_column(column, justify="right")
    for each in found:
        state = f"{each['state']}, draining" if each["is_draining"] else str(each["state"])
        numbers = (count(each[name]) for name in ("num_running", "queued_tokens", "num_requests"))
        table.add_row(str(each["name"]), str(each["url"]), state, *numbers)
    stdout.print(table)


def serve_options(context: Context, flags: dict[str, object]) -> ServeOptions:
    """Return what to serve from the flags of a command line; raises ``ConfigError``."""
    named = [parse_replica(each) for each in cast("tuple[str, ...]", flags["replicas"])]
    if not named:
        raise ConfigError("no replica is given: add --replica NAME=URL for each engine")
    if len(dict(named)) < len(named):
        raise ConfigError("two replicas have the same name")
    try:
        body_bytes_max = parse_size(flags["body_max"])
    except ValueError as error:
        raise ConfigError(f"--body-max {flags['body_max']!r}: {error}") from None
    return ServeOptions(
        host=str(flags["host"]),
        port=int(str(flags["port"])),
        replicas=dict(named),
        admin_socket=_admin_socket(context, _path(flags["admin_socket"])),
        pool_socket=context.settings({"socket": flags["pool_socket"]}).socket(),
        access_log=_path(flags["access_log"]),
        stop_grace_s=float(str(flags["stop_grace"])),
        router=RouterOptions(
            policy=Policy(str(flags["policy"])),
            api_key=_read_key(_path(flags["api_key_file"])),
            affinity=Affinity(str(flags["affinity_header"]), str(flags["affinity_cookie"])),
            local_tokens=int(str(flags["local_tokens"])),
            pool_tokens=int(str(flags["pool_tokens"])),
            limits=Limits(
                first_byte_s=float(str(flags["first_byte_timeout"])),
                next_byte_s=float(str(flags["next_byte_timeout"])),
                body_bytes_max=body_bytes_max,
            ),
        ),
    )


def parse_replica(written: str) -> tuple[str, str]:
    """Return name and address of NAME=URL; raises ``ConfigError``."""
    name, mark, url = written.partition("=")
    if not mark or not name or not name.isprintable() or len(name) > NAME_LENGTH_MAX:
        raise ConfigError(f"{written!r} is no replica; write for example a=http://127.0.0.1:8001")
    return name, url


def _admin_socket(context: Context, given: Path | None) -> Path:
    return given if given is not None else context.settings({}).socket().with_name(_ADMIN_SOCKET)


def _path(value: object) -> Path | None:
    return value if isinstance(value, Path) else None


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the key in {path}: {error}") from None
    if not key:
        raise ConfigError(f"there is no key in {path}")
    return key
