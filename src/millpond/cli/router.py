"""``millpond router``: the front of the replicas in the foreground, and its switches."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

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
from millpond.config import (
    ROUTER_IDENTITIES,
    ROUTER_POLICIES,
    ROUTER_SOCKET,
    RouterConfig,
    Settings,
    format_size,
    parse_replica,
)
from millpond.model.errors import ConfigError
from millpond.router.client import RouterClient
from millpond.router.options import (
    METRICS_PATH,
    Identity,
    Limits,
    RouterOptions,
    ServeOptions,
    Serving,
)
from millpond.router.placement.chosen import Policy
from millpond.router.prompts import Affinity
from millpond.router.replicas import parse_address


def admin_socket_option(function: FunctionT) -> FunctionT:
    """Add ``--admin-socket``."""
    return click.option(
        "--admin-socket",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help=f"Where the router is changed.  [default: {ROUTER_SOCKET} beside the pool's socket]",
    )(function)


@click.group(
    invoke_without_command=True,
    epilog=examples(
        "millpond router --replica a=http://127.0.0.1:8001 --replica b=http://127.0.0.1:8002",
        "millpond router --replica a=http://10.0.0.2:8000 --policy=prefix-affinity --port 9000",
        "millpond router --replica a=http://127.0.0.1:8001,events=ipc:///run/a,replay=ipc:///run/r",
        "millpond router drain a     # nothing new for a; what runs there goes on",
        "millpond router add c=http://127.0.0.1:8003",
        "millpond router replicas",
    ),
)
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="NAME=URL[,...]",
    help="An engine, under the name that its connector gives the pool; once for each. With "
    ",events=ADDRESS (and ,replay=ADDRESS) behind it where it publishes its cache's events.",
)
@click.option(
    "--policy",
    metavar="POLICY",
    help=f"How a replica is chosen: {', '.join(ROUTER_POLICIES)}.  [default: cost]",
)
@click.option(
    "--identity",
    metavar="WORD",
    help=f"What prefixes are known by: {', '.join(ROUTER_IDENTITIES)}, which is by tokens once a "
    "replica publishes events.  [default: auto]",
)
@click.option("--host", metavar="HOST", help="Where to listen.  [default: 127.0.0.1]")
@click.option("--port", metavar="PORT", help="0 takes any that is free.  [default: 8000]")
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
    metavar="N",
    help="Tokens that a replica's own cache holds, about.  [default: 1000000]",
)
@click.option(
    "--pool-tokens", metavar="N", help="Tokens that the pool holds, about.  [default: 16000000]"
)
@click.option(
    "--affinity-header",
    metavar="NAME",
    help="Header that names a conversation.  [default: x-session-id]",
)
@click.option(
    "--affinity-cookie",
    metavar="NAME",
    help="Cookie that does, where the header is missing.  [default: session_id]",
)
@click.option(
    "--first-byte-timeout",
    "first_byte_timeout_s",
    metavar="S",
    help="Longest wait for an answer to begin: queue and prefill.  [default: 600]",
)
@click.option(
    "--next-byte-timeout",
    "next_byte_timeout_s",
    metavar="S",
    help="Longest pause in an answer.  [default: 300]",
)
@click.option("--body-max", metavar="SIZE", help="Largest body of a request.  [default: 64MiB]")
@click.option(
    "--stop-grace",
    "stop_grace_s",
    metavar="S",
    help="Time for streams to end on Ctrl-C.  [default: 10]",
)
@click.pass_context
def router(context: click.Context, **flags: object) -> None:
    """Serve an OpenAI-compatible front for replicas, or change a running one.

    Without a subcommand, serves in the foreground until Ctrl-C or SIGTERM. Everything passes
    through untouched; response headers x-millpond-... say which replica served and which held
    the prefix. A live page is at /millpond, metrics are at /millpond/metrics.
    """
    # An option that may be given several times is empty where it is not given.
    given = {name: value for name, value in flags.items() if value not in {None, ()}}
    if context.invoked_subcommand is not None:
        if given:
            raise click.UsageError(
                f"options go after the subcommand: millpond router {context.invoked_subcommand} ..."
            )
        return
    settings = router_settings(context.ensure_object(Context), given)
    config = settings.router()
    options = serve_options(config, source=settings.sources()["router.replicas"])
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    _show(config, settings)

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
@click.argument("replica", metavar="NAME=URL[,...]")
@admin_socket_option
@pass_context
def add(context: Context, replica: str, admin_socket: Path | None) -> None:
    """Take a replica in while the router runs; it gets requests once it is healthy."""
    try:
        name, url = parse_replica(replica)
    except ValueError as error:
        raise ConfigError(str(error)) from None
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
        state += ", cache known" if each["is_cache_known"] else ""
        numbers = (count(each[name]) for name in ("num_running", "queued_tokens", "num_requests"))
        table.add_row(str(each["name"]), str(each["url"]), state, *numbers)
    stdout.print(table)


def router_settings(context: Context, flags: Mapping[str, object]) -> Settings:
    """Return the settings with the flags of a command line on top; raises ``ConfigError``."""
    return context.settings({f"router.{name}": value for name, value in flags.items()})


def serve_options(config: RouterConfig, *, source: str) -> ServeOptions:
    """Return what to serve; raises ``ConfigError``. ``source`` is where the replicas are from."""
    for name, url in config.replicas.items():
        try:
            parse_address(url)
        except ValueError as error:
            raise ConfigError(f"router.replicas = '{name}={url}' ({source}): {error}") from None
    return ServeOptions(
        host=config.host,
        port=config.port,
        replicas=config.replicas,
        admin_socket=config.admin_socket,
        pool_socket=config.pool_socket,
        access_log=config.access_log,
        stop_grace_s=config.stop_grace_s,
        router=RouterOptions(
            policy=Policy(config.policy),
            identity=Identity(config.identity),
            api_key=_read_key(config.api_key_file),
            affinity=Affinity(config.affinity_header, config.affinity_cookie),
            local_tokens=config.local_tokens,
            pool_tokens=config.pool_tokens,
            limits=Limits(
                first_byte_s=config.first_byte_timeout_s,
                next_byte_s=config.next_byte_timeout_s,
                body_bytes_max=config.body_bytes_max,
            ),
        ),
    )


def _show(config: RouterConfig, settings: Settings) -> None:
    """Print what is in effect, and where it is from."""
    asked = "not asked for" if config.api_key_file is None else f"that in {config.api_key_file}"
    stderr.print(
        f"router by {config.policy} at {config.host}:{config.port}, "
        f"prefixes by {config.identity}, "
        f"changed at {config.admin_socket}; pool at {config.pool_socket}, "
        f"access log {config.access_log or 'off'}, key {asked}, "
        f"conversations by header {config.affinity_header} or cookie {config.affinity_cookie}, "
        f"{config.local_tokens:,} tokens a replica and {config.pool_tokens:,} in the pool, "
        f"first byte within {config.first_byte_timeout_s:g} s, "
        f"next within {config.next_byte_timeout_s:g} s, "
        f"bodies of at most {format_size(config.body_bytes_max)}, "
        f"{config.stop_grace_s:g} s to stop",
        markup=False,
    )
    for name, url in config.replicas.items():
        stderr.print(f"  replica {name} at {url}", markup=False)
    for key, source in settings.sources().items():
        stderr.print(f"  {key} from {source}", markup=False)


def _admin_socket(context: Context, given: Path | None) -> Path:
    return context.settings({"router.admin_socket": given}).admin_socket()


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
