"""``millpond demo``: two replicas, a pool, a router, what moves; needs no model."""

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal, cast

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context
from millpond.cli.exits import AnswerIsNo
from millpond.cli.output import ProgressLine, print_json, stderr, stdout
from millpond.cli.up import show_start
from millpond.config import CONFIG_VARIABLE, format_size
from millpond.launch.conversation import (
    ROUTER_POLICY,
    Conversation,
    ConversationOptions,
    Conversing,
)
from millpond.launch.demo import (
    ENGINE_ARGS,
    ENGINE_ENVIRON,
    NUM_REPLICAS,
    OTHER_STEPS_TOLERANCE,
    SAME_STEPS_TOLERANCE,
    Demo,
    DemoOptions,
    DemoRow,
)
from millpond.launch.front import FrontOptions
from millpond.launch.report import DemoResult, demo_html
from millpond.launch.resources import pick_device
from millpond.launch.system import System, SystemOptions
from millpond.launch.tiny import HYBRID_ENGINE_ARGS, make_hybrid

_FULL: Final = ((4096, 8192, 16_384), 3)
_QUICK: Final = ((4096, 8192), 1)
_FULL_TURNS: Final = (8192, 1024)
_QUICK_TURNS: Final = (4096, 512)
"""Tokens of a conversation's first turn, and of each later one."""
_NUM_TURNS: Final = 4
_DEFAULT_POOL: Final = "256MiB"


@click.command(
    epilog=examples(
        "millpond demo --quick",
        "millpond demo --out report",
        "millpond demo --json | jq .data.rows",
    )
)
@click.option("--quick", is_flag=True, help="Shorter prompts, one round: about a minute.")
@click.option(
    "--tokens",
    type=click.IntRange(512, 19_000),
    multiple=True,
    metavar="N",
    help="A prompt length; may be repeated.  [default: 4096, 8192, 16384]",
)
@click.option("--pool", "size", metavar="SIZE", help=f"Memory shared.  [default: {_DEFAULT_POOL}]")
@click.option("--device", metavar="DEVICE", help="auto, cpu or cuda.  [default: auto]")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the model and prompts.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("report"),
    show_default=True,
    metavar="DIR",
    help="Where demo.json, demo.html and logs go.",
)
@json_option
@pass_context
def demo(
    context: Context, *, tokens: tuple[int, ...], as_json: bool, out: Path, **flags: object
) -> None:
    """Show a request that moves between two real vLLM replicas, with the pool off and on.

    Makes a small model on the spot, starts a pool, two replicas and a router, asks the same
    prompts of both, and compares times and outputs. Then has a conversation through the router,
    which sends each turn to the other replica. Ends with 1 if an output differs, a moved
    request was not served by the pool, or the router's log is not what engines and pool count.
    """
    own = {"up.device": flags["device"], "up.model": "made on the spot", "up.router": False}
    settings = context.settings({**own, "pool.size": flags["size"]})
    if not settings.is_set("pool.size"):
        settings = context.settings({**own, "pool.size": _DEFAULT_POOL})
    config = settings.up()
    seed = cast("int", flags["seed"])
    lengths, num_rounds = _QUICK if flags["quick"] else _FULL
    asked = DemoOptions(tokens or lengths, num_rounds, seed)
    turns = _QUICK_TURNS if flags["quick"] else _FULL_TURNS
    said = ConversationOptions(*turns, num_turns=_NUM_TURNS, seed=seed)
    device = cast("Literal['cpu', 'cuda']", pick_device(config.device, context.environ))
    # A folder with a short path: that of a socket has a limit.
    with tempfile.TemporaryDirectory(prefix="millpond-demo-") as folder, ProgressLine() as line:
        line.show(f"making a model; logs are in {out / 'logs'}", stage="model")
        options = SystemOptions(
            model=str(make_hybrid(Path(folder, "model"), seed=asked.seed).path),
            num_replicas=NUM_REPLICAS,
            device=device,
            environ=own_environ(context),
            pool=replace(config.pool, socket=Path(folder, "pool.sock")),
            front=FrontOptions(policy=ROUTER_POLICY, admin_socket=Path(folder, "router.sock")),
            engine_args=(*ENGINE_ARGS, *HYBRID_ENGINE_ARGS),
            run_dir=out / "logs",
            start_timeout_s=config.start_timeout_s,
            stop_grace_s=config.stop_grace_s,
        )
        with System(options, on_progress=lambda states: show_start(line, states)) as system:
            result = _run(system, asked, said, on_step=lambda step: line.show(step, stage=step))
    publish(context, result, out, config.pool.size_bytes, as_json=as_json)


def own_environ(context: Context) -> dict[str, str]:
    """Return the environment without settings of a router: ours is no other's."""
    kept = {
        name: value
        for name, value in context.environ.items()
        if not name.startswith("MILLPOND_ROUTER_")
    }
    return {**kept, **ENGINE_ENVIRON, CONFIG_VARIABLE: os.devnull}


def _run(
    system: System,
    asked: DemoOptions,
    said: ConversationOptions,
    *,
    on_step: Callable[[str], None],
) -> DemoResult:
    with contextlib.closing(Demo(system, on_step=on_step)) as demo:
        rows = demo.run(asked)
    with contextlib.closing(Conversing(system, on_step=on_step)) as conversing:
        return DemoResult(rows, conversing.run(said))


def publish(
    context: Context, result: DemoResult, out: Path, pool_bytes: int, *, as_json: bool
) -> None:
    """Write both reports, print the result, and raise ``AnswerIsNo`` if it has faults."""
    plain = [row.as_json() for row in result.rows]
    data = {
        "rows": plain,
        "conversation": result.conversation.as_json(),
        "pool_bytes": pool_bytes,
        "same_steps_tolerance": SAME_STEPS_TOLERANCE,
        "other_steps_tolerance": OTHER_STEPS_TOLERANCE,
    }
    now = datetime.now(UTC).isoformat(timespec="seconds")
    # The rows are also at the top: that is where readers of this file look for them.
    document = context.envelope(data) | {"date": now, "rows": plain}
    out.mkdir(parents=True, exist_ok=True)
    (out / "demo.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    page = demo_html(result, _facts(document, pool_bytes))
    (out / "demo.html").write_text(page, encoding="utf-8")
    if as_json:
        print_json(document)
    else:
        stdout.print(_table(result.rows))
        stdout.print(_turns_table(result.conversation))
    stderr.print(f"wrote {out / 'demo.json'} and {out / 'demo.html'}", markup=False)
    faults = result.faults()
    if faults:
        raise AnswerIsNo("; ".join(faults))


def _facts(document: dict[str, object], pool_bytes: int) -> list[tuple[str, str]]:
    machine = cast("dict[str, object]", document["machine"])
    gpus = ", ".join(cast("list[str]", machine["gpus"])) or "none"
    memory = f"{cast('int', machine['memory_bytes']) / 2**30:.0f} GiB"
    return [
        ("Command", str(document["command"])),
        ("Version", f"{document['version']}, commit {document['commit'] or 'unknown'}"),
        ("Date", str(document["date"])),
        ("Machine", f"{machine['cpu']}, {machine['cores']} cores, {memory}, GPU: {gpus}"),
        ("Model", "a Qwen3.5-shaped hybrid of 11 million random weights, made on the spot"),
        ("Pool", format_size(pool_bytes)),
        ("Tolerance of log-probabilities, computed alike", str(SAME_STEPS_TOLERANCE)),
        ("Tolerance of log-probabilities, computed and cached", str(OTHER_STEPS_TOLERANCE)),
    ]


def _table(rows: Sequence[DemoRow]) -> Table:
    # Narrow enough for 80 columns, which is what a pipe gets.
    table = Table(
        title="Time to the first token, in seconds", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    names = ("tokens", "A cold", "A again", "B off", "B on", "cold/on", "on/local")
    for name in (*names, "MB", "from", "same"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.prompt_tokens:,}",
            f"{row.cold_ttft_s:.3f}",
            f"{row.local_ttft_s:.3f}",
            f"{row.moved_off_ttft_s:.3f}",
            f"{row.moved_on_ttft_s:.3f}",
            f"{row.cold_ttft_s / row.moved_on_ttft_s:.1f}x",
            f"{row.moved_on_ttft_s / row.local_ttft_s:.2f}x",
            f"{row.loaded_bytes / 1e6:.1f}",
            ",".join(row.written_by),
            "yes" if row.identical else "NO",
        )
    return table


def _turns_table(conversation: Conversation) -> Table:
    off_s, on_s = conversation.off_ttft_s, conversation.on_ttft_s
    table = Table(
        title="A conversation through the router, each turn on the other replica",
        caption=f"first tokens, all turns: {off_s:.3f} s with the pool off, {on_s:.3f} s on",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    names = ("pool", "turn", "tokens", "TTFT", "by", "held by", "moved", "computed", "local")
    for name in (*names, "loaded", "from"):
        table.add_column(name, justify="right", no_wrap=True)
    for pool, turns in (("off", conversation.off), ("on", conversation.on)):
        for turn in turns:
            table.add_row(
                *(pool, str(turn.number), f"{turn.prompt_tokens:,}", f"{turn.ttft_s:.3f}"),
                *(turn.replica, turn.prefix_holder or "", "yes" if turn.is_moved else "no"),
                *(f"{n:,}" for n in (turn.computed_tokens, turn.local_tokens, turn.loaded_tokens)),
                ",".join(turn.written_by),
            )
    return table
