"""Where ``millpond bench run`` takes place: replicas of its own, or running ones."""

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millpond.cli.context import Context
from millpond.cli.output import ProgressLine
from millpond.cli.up import explain, show_start, system_environ
from millpond.config.values import replicas
from millpond.launch.front import FrontOptions
from millpond.launch.prepare import Prepared, prepare
from millpond.launch.rivals import (
    RIVALS,
    SHARED_MEMORY,
    RivalName,
    RivalOptions,
    check_rival,
)
from millpond.launch.shape import Kind
from millpond.launch.system import ProcessState, SystemOptions
from millpond.model.errors import ConfigError

if TYPE_CHECKING:
    from millpond.bench.stages import Stage

DEFAULT_POOL: Final = "1GiB"
_TINY_ENGINE_ARGS: Final = ("--max-num-seqs", "8", "--max-model-len", "20000")
_ENGINE_ARGS: Final = ("--enable-prompt-tokens-details",)
"""What an engine found in its own cache is told without a pool as well."""
_ENGINE_ENVIRON: Final = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""The first one is for /reset_prefix_cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The flags of ``millpond bench run``, None where one was not given."""

    urls: tuple[str, ...]
    router: str | None
    access_log: Path | None
    policy: str | None
    launch: str | None
    model: str | None
    tiny: str
    size: str | None
    socket: Path | None
    device: str | None
    caches: str
    hybrid_block: int | None
    files_in: Path | None
    switch: str | None
    rounds: int | None
    aa_rounds: int | None
    trace: str | None
    out: Path | None
    resume: bool
    engine_args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """The stage, how many replicas it has, and the options that its figures depend on.

    ``check`` raises ``SetupError`` where it can't be run here, ``ConfigError`` where it has to
    know more. A run that is done is reported on any machine.
    """

    stage: "Stage"
    num_replicas: int
    options: Mapping[str, object]
    check: Callable[[], None] = lambda: None


def split_caches(written: str) -> tuple[str, ...]:
    """Return the names that --caches holds."""
    return tuple(name.strip() for name in written.split(","))


def place_of(
    context: Context, asked: Asked, logs: Path, *, line: ProgressLine, stack: contextlib.ExitStack
) -> Place:
    """Return the place that was asked for; raises ``SetupError`` for one that can't be.

    ``stack`` removes the temporary folder of a system that is launched.
    """
    from millpond.bench.stages import LaunchedStage, RestartStage

    names = _rival_names(asked)
    if asked.urls:
        return _running(asked)
    if asked.router or asked.socket or asked.access_log:
        raise ConfigError(
            "--router, --access-log and --socket are of running replicas: give each with --url"
        )
    switch = asked.switch or "restart"
    if asked.policy and switch == "restart":
        raise ConfigError("--policy needs --switch live: without a pool no router is started")
    options, prepared = _launched(context, asked, logs, stack)
    rivals = {name: _rival(name, asked, options) for name in names}
    kept = {
        "switch": switch,
        "model": asked.model or f"tiny-{asked.tiny}",
        "num_replicas": options.num_replicas,
        "policy": asked.policy,
        "device": options.device,
        "pool_bytes": None if options.pool is None else options.pool.size_bytes,
        "engine_args": list(options.engine_args),
    }
    if rivals:
        kept |= {"hybrid_block": asked.hybrid_block, "files_in": str(_files_in(asked))}

    def show(states: Sequence[ProcessState]) -> None:
        show_start(line, states)

    if switch == "restart":
        stage: Stage = RestartStage(options, on_progress=show, rivals=rivals)
    else:
        stage = LaunchedStage(options, on_progress=show)
    explain(options.model, prepared)
    return Place(
        stage, options.num_replicas, kept, lambda: _check(list(rivals.values()), asked, prepared)
    )


def _rival_names(asked: Asked) -> Sequence[RivalName]:
    """Return the caches beside Millpond's that were asked for; raises ``ConfigError``."""
    names: list[RivalName] = [name for name in RIVALS if name in split_caches(asked.caches)]
    if names and (asked.urls or asked.switch == "live"):
        raise ConfigError(
            f"{' and '.join(names)} can't be switched on and off: replicas join such a cache "
            "when they are started; use --switch restart, and no --url"
        )
    if not names and (asked.hybrid_block or asked.files_in):
        raise ConfigError(
            f"--hybrid-block and --files-in are of {' and '.join(RIVALS)}: name one in --caches"
        )
    return names


def _rival(name: RivalName, asked: Asked, options: SystemOptions) -> RivalOptions:
    """Return a cache as large as the pool."""
    if options.pool is None:
        raise ValueError("a system to be measured has a pool")
    return RivalOptions(
        name=name,
        size_bytes=options.pool.size_bytes,
        hybrid_block_tokens=asked.hybrid_block,
        files_in=_files_in(asked),
    )


def _check(rivals: Sequence[RivalOptions], asked: Asked, prepared: Prepared) -> None:
    from millpond.bench.records import OFF

    if set(split_caches(asked.caches)) != {OFF}:  # else nothing has to go with a pool
        prepared.check()
    for rival in rivals:
        check_rival(rival, prepared.situation.device)
        if asked.hybrid_block is None and prepared.shape.kind is Kind.HYBRID:
            raise ConfigError(
                f"{asked.model or 'the small hybrid'} has recurrent layers, and {rival.name} has "
                "to know vLLM's block: give the N of its `Setting attention block size to N "
                "tokens`, or of --block-size, as --hybrid-block"
            )


def _files_in(asked: Asked) -> Path:
    return asked.files_in or SHARED_MEMORY


def _running(asked: Asked) -> Place:
    from millpond.bench.records import OFF
    from millpond.bench.stages import LiveStage, live_targets

    if asked.switch == "restart" or asked.launch or asked.engine_args:
        raise ConfigError("replicas given with --url run already: they can't be started anew")
    if asked.policy:
        raise ConfigError(
            "--policy is of a router that is started: give the running one's --router"
        )
    if asked.socket is None and asked.caches != OFF:
        raise ConfigError(
            "switching the pool of running replicas needs its address: give its --socket, or "
            "--caches off"
        )
    try:
        urls = replicas(asked.urls)
    except ValueError as error:
        raise ConfigError(f"--url: {error}") from error
    targets = live_targets(urls, model=asked.model)
    router = None
    if asked.router is not None:
        (router,) = live_targets({"router": asked.router}, model=asked.model)
    if asked.access_log is not None and router is None:
        raise ConfigError("--access-log is a router's: give its --router")
    stage = LiveStage(targets, socket=asked.socket, router=router, access_log=asked.access_log)
    kept: dict[str, object] = {"switch": "live", "urls": urls, "router": asked.router}
    if asked.access_log is not None:  # it decides whose word tokens are
        kept["access_log"] = str(asked.access_log)
    return Place(stage, len(targets), kept)


def _launched(
    context: Context, asked: Asked, logs: Path, stack: contextlib.ExitStack
) -> tuple[SystemOptions, Prepared]:
    """Return a system with the arguments that `millpond up` chooses, and how they came about."""
    own: dict[str, object] = {
        "up.device": asked.device,
        "up.model": asked.model or "made on the spot",
        "up.replicas": asked.launch,
        "up.router": asked.policy is not None,
        "router.policy": asked.policy,
        "pool.size": asked.size,
    }
    settings = context.settings(own)
    if not settings.is_set("pool.size"):
        settings = context.settings(own | {"pool.size": DEFAULT_POOL})
    config = settings.up()
    # A folder with a short path: that of a socket has a limit.
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-bench-")))
    model, args = asked.model, [*_ENGINE_ARGS, *asked.engine_args]
    environ = {**system_environ(context), **_ENGINE_ENVIRON}
    if model is None:
        model, tiny_args = _make_tiny(folder / "model", asked.tiny)
        args = [*tiny_args, *args]
        environ["HF_HUB_OFFLINE"] = "1"  # it is in no hub
    prepared = prepare(replace(config, model=model), args, context.environ)
    options = SystemOptions(
        model=model,
        num_replicas=config.num_replicas,
        device=prepared.situation.device,
        environ=environ,
        pool=replace(config.pool, socket=folder / "pool.sock"),
        needs_whole_pool=True,
        front=None
        if config.router is None
        else FrontOptions(policy=config.router.policy, admin_socket=folder / "router.sock"),
        engine_args=[*prepared.choice.argv, *args],
        run_dir=logs,
        start_timeout_s=config.start_timeout_s,
        stop_grace_s=config.stop_grace_s,
    )
    return options, prepared


def _make_tiny(folder: Path, kind: str) -> tuple[str, Sequence[str]]:
    from millpond.launch.tiny import HYBRID_ENGINE_ARGS, make_attention, make_hybrid

    if kind == "attention":
        return str(make_attention(folder, seed=1).path), _TINY_ENGINE_ARGS
    return str(make_hybrid(folder, seed=1).path), (*_TINY_ENGINE_ARGS, *HYBRID_ENGINE_ARGS)
