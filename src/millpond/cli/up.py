"""``millpond up``: a pool, its replicas and their router in the foreground."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context, socket_option
from millpond.cli.output import ProgressLine, print_json, stderr, stdout
from millpond.config import (
    CONFIG_VARIABLE,
    ROUTER_POLICIES,
    RouterConfig,
    UpConfig,
    format_size,
)
from millpond.launch.commands import Command, system_commands
from millpond.launch.front import FrontOptions
from millpond.launch.prepare import Prepared, prepare
from millpond.launch.system import ProcessState, System, SystemOptions
from millpond.model.errors import ExpectedError

_WATCH_S: Final = 1.0


@click.command(
    context_settings={"ignore_unknown_options": False},
    epilog=examples(
        "millpond up --model Qwen/Qwen3.6-27B --replicas 2 --pool 256GiB",
        "millpond up --model Qwen/Qwen3.6-27B --pool 256GiB --dry-run",
        "millpond up --model ./my-model --replicas 4 --pool 64GiB --port 8000 --run-dir logs",
        "millpond up --model ./my-model --pool 1GiB -- --max-model-len 32768 --dtype bfloat16",
    ),
)
@click.option("--model", metavar="MODEL", help="What vLLM takes as --model.")
@click.option("--replicas", metavar="N", help="Engines to start.  [default: 2]")
@click.option("--pool", "size", metavar="SIZE", help="Memory shared by all, such as 200GiB.")
@click.option("--extent", metavar="SIZE", help="Unit in which memory is given to a slot size.")
@click.option("--device", metavar="DEVICE", help="auto, cpu or cuda.  [default: auto]")
@click.option(
    "--policy",
    metavar="POLICY",
    help=f"How the router chooses a replica: {', '.join(ROUTER_POLICIES)}.  [default: cost]",
)
@click.option("--no-router", is_flag=True, help="Start none: for a balancer of your own.")
@click.option(
    "--port",
    metavar="PORT",
    help="The router's; replicas get those behind it.  [default: 8000, and any that are free]",
)
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="DIR", help="Keep logs here.")
@click.option("--start-timeout", metavar="S", help="Time to become ready.  [default: 600]")
@click.option("--stop-grace", metavar="S", help="Time to stop before a kill.  [default: 10]")
@click.option("--dry-run", is_flag=True, help="Print the commands, and start nothing.")
@json_option
@socket_option
@click.argument("engine_args", nargs=-1, type=click.UNPROCESSED)
@pass_context
def up(
    context: Context,
    engine_args: tuple[str, ...],
    *,
    dry_run: bool,
    as_json: bool,
    **flags: object,
) -> None:
    """Start a pool, replicas and a router, and stop them all on Ctrl-C or when one ends.

    The router is the one address for clients. Its other settings are those of `millpond router`
    in millpond.toml and the environment. Each replica gets its share of the GPUs
    (CUDA_VISIBLE_DEVICES), or of the cores where vLLM for CPUs is installed.

    What vLLM has to be told for the model is chosen from its config.json and printed with the
    reasons. ENGINE_ARGS after -- go to every vLLM as well, and win; what cannot work is refused
    before anything starts.
    """
    if as_json and not dry_run:
        raise click.UsageError("--json is for --dry-run: a system that runs prints no document")
    names = {"replicas": "up.replicas", "size": "pool.size", "extent": "pool.extent"}
    names |= {"model": "up.model", "device": "up.device", "port": "up.port", "socket": "socket"}
    names |= {"run_dir": "up.run_dir", "start_timeout": "up.start_timeout_s"}
    names |= {"stop_grace": "up.stop_grace_s", "policy": "router.policy"}
    has_router = False if flags.pop("no_router") else None  # else as it is set
    given = {names[flag]: value for flag, value in flags.items()}
    settings = context.settings({**given, "up.router": has_router})
    config = settings.up()
    prepared = prepare(config, engine_args, context.environ)
    prepared.check()
    options = _system_options(context, config, prepared, engine_args)
    stderr.print(
        f"{config.num_replicas} replicas of {config.model} on {options.device}, "
        f"pool of {format_size(config.pool.size_bytes)} at {config.pool.socket}, "
        f"{_router_line(config)}, "
        f"{config.start_timeout_s:g} s to start, {config.stop_grace_s:g} s to stop",
        markup=False,
    )
    for key, source in settings.sources().items():
        stderr.print(f"  {key} from {source}", markup=False)
    explain(config.model, prepared)
    if dry_run:
        commands = system_commands(options, environ=context.environ)
        _print_commands(context, prepared, commands, as_json=as_json)
        return
    _run(options)


def _run(options: SystemOptions) -> None:
    with ProgressLine() as progress:
        system = System(options, on_progress=lambda states: show_start(progress, states))
        with system:
            progress.__exit__()
            stdout.print(_table(system))
            if options.front is not None:
                stderr.print(f"requests are logged in {system.front.access_log}", markup=False)
            stderr.print("Ctrl-C stops everything.")
            while (dead := system.wait_for_death(_WATCH_S)) is None:
                continue
            raise ExpectedError(f"stopping everything: {system.obituary(dead)}")


def show_start(progress: ProgressLine, states: Sequence[ProcessState]) -> None:
    """Show how far the start of a system is."""
    parts = [
        f"{state.name} {'ready' if state.is_ready else f'{state.seconds:.0f} s'}"
        for state in states
    ]
    ready = [state.name for state in states if state.is_ready]
    progress.show("starting: " + ", ".join(parts), stage=" ".join(ready))


def explain(model: str, prepared: Prepared) -> None:
    """Print what was found out about a model, and the chosen arguments with their reasons."""
    if prepared.unread is not None:
        stderr.print(f"config.json of {model} cannot be read: {prepared.unread}", markup=False)
    stderr.print(f"model: {prepared.shape.describe()}", markup=False)
    for note in prepared.choice.notes:
        stderr.print(f"  {note}", markup=False)
    version = prepared.situation.engine_version
    stderr.print(f"engine arguments for vLLM {version}:", markup=False)
    for argument in prepared.choice.arguments:
        stderr.print(f"  {' '.join(argument.words)}  ({argument.why})", markup=False)


def _print_commands(
    context: Context, prepared: Prepared, commands: Sequence[Command], *, as_json: bool
) -> None:
    if not as_json:
        for command in commands:
            stdout.print(f"# {command.name}\n{command.line}", markup=False)
        return
    print_json(context.envelope(_document(prepared, commands)))


def _document(prepared: Prepared, commands: Sequence[Command]) -> Mapping[str, object]:
    sizes = prepared.choice.sizes
    return {
        "model": {
            "kind": prepared.shape.kind.value,
            "architecture": prepared.shape.architecture,
            "token_bytes": sizes.token_bytes,
            "state_bytes": sizes.state_bytes,
            "max_tokens": sizes.max_tokens,
        },
        "engine": {
            "version": prepared.situation.engine_version,
            "arguments": [
                {"name": each.name, "value": each.value, "why": each.why}
                for each in prepared.choice.arguments
            ],
        },
        "notes": prepared.choice.notes,
        "commands": [
            {
                "name": each.name,
                "argv": each.argv,
                "environ": dict(each.environ),
                "cores": each.cores,
                "line": each.line,
            }
            for each in commands
        ],
    }


def _system_options(
    context: Context, config: UpConfig, prepared: Prepared, engine_args: Sequence[str]
) -> SystemOptions:
    return SystemOptions(
        model=config.model,
        num_replicas=config.num_replicas,
        device=prepared.situation.device,
        environ=system_environ(context),
        pool=config.pool,
        front=None if config.router is None else _front_options(config.router),
        engine_args=(*prepared.choice.argv, *engine_args),
        port=config.replica_port,
        run_dir=config.run_dir,
        start_timeout_s=config.start_timeout_s,
        stop_grace_s=config.stop_grace_s,
    )


def system_environ(context: Context) -> dict[str, str]:
    """Return the environment of all processes of a system, which read the same settings."""
    environ = dict(context.environ)
    if context.config_file is not None:
        # Connectors read the file only where the environment names it.
        environ[CONFIG_VARIABLE] = str(context.config_file.absolute())
    return environ


def _front_options(config: RouterConfig) -> FrontOptions:
    return FrontOptions(
        policy=config.policy,
        admin_socket=config.admin_socket,
        host=config.host,
        port=config.port or None,
        access_log=config.access_log,
        stop_grace_s=config.stop_grace_s,
    )


def _router_line(config: UpConfig) -> str:
    router = config.router
    if router is None:
        return "no router"
    where = f"{router.host}:{router.port}" if router.port else f"a free port of {router.host}"
    return f"router by {router.policy} at {where}"


def _table(system: System) -> Table:
    now = time.monotonic()
    table = Table("process", "address", "log")
    if system.options.front is not None:
        front = system.front
        table.add_row("router", front.api_url, str(front.process.spec.log_file))
        table.add_row("live page", front.page_url, "")
    pool = system.pool_process
    table.add_row("pool", str(system.socket), str(pool.spec.log_file))
    for replica in system.replicas:
        table.add_row(f"replica {replica.name}", replica.url, str(replica.process.spec.log_file))
    table.caption = f"ready after {now - pool.started_at:.0f} s"
    return table
