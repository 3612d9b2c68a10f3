"""``millpond gate pool``: fills a pool to its last slot and reads all of it back."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from millpond.cli.context import Context, examples, json_option, pass_context, socket_option
from millpond.cli.exits import AnswerIsNo
from millpond.cli.output import ProgressLine, print_json, stderr, stdout
from millpond.cli.up import show_start
from millpond.config import PoolConfig, format_size
from millpond.config.values import parse_size
from millpond.gate.errors import NoPackage
from millpond.launch.system import System, SystemOptions
from millpond.model.errors import ConfigError

if TYPE_CHECKING:
    from millpond.gate.pool import PoolReport

_SIZES_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedPool:
    """The command's options, as they were written; ``size`` None checks a running pool."""

    size: str | None
    socket: Path | None = None
    slot_sizes: tuple[str, ...] = ()
    device: str = "auto"
    seed: int = 1


@dataclass(frozen=True, slots=True)
class PoolChecked:
    """What ``gate pool`` found; ``report`` is its JSON data."""

    report: "PoolReport"

    def error(self) -> Exception | None:
        """Return what the command has to end with, or None."""
        return None if self.report.fault is None else AnswerIsNo(self.report.fault)

    def summary(self) -> str:
        """Return the result in one line."""
        report = self.report
        if report.fault is not None:
            return f"WRONG: {report.fault}"
        num_bytes = sum(filling.num_bytes_compared for filling in report.fillings)
        num_slots = report.fillings[0].num_slots
        return (
            f"right: {num_slots:,} slots of a pool of {format_size(report.arena_bytes)}, "
            f"{len(report.fillings)} fillings, {num_bytes:,} bytes compared ({report.device})"
        )


@click.command(
    "pool",
    epilog=examples(
        "millpond gate pool --size 8GiB",
        "millpond gate pool --size 200GiB --device cuda --slot-size 1MiB",
        "millpond gate pool --socket /run/millpond/pool.sock --json | jq .data",
    ),
)
@click.option("--size", metavar="SIZE", help="Start a pool of this size, and stop it afterwards.")
@click.option(
    "--slot-size",
    "slot_sizes",
    multiple=True,
    metavar="SIZE",
    help="Of the slots; repeat it to mix sizes.  [default: 1MiB and 200KiB]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the engine's pages are.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the order of things.")
@socket_option
@json_option
@pass_context
def gate_pool(context: Context, *, as_json: bool, **flags: object) -> None:
    """Check every slot of a pool: handed out once, written and read back whole.

    Fills the pool to its last slot through the real daemon, clients and copy engine, frees it
    in random order, fills it again, and a third time beside a second live client. Without
    --size the running pool at --socket is used; it must be empty, and one that is in use is
    left alone (exit status 6). Ends with 1 at the first thing that is wrong.
    """
    asked = AskedPool(
        size=cast("str | None", flags["size"]),
        socket=cast("Path | None", flags["socket"]),
        slot_sizes=cast("tuple[str, ...]", flags["slot_sizes"]),
        device=cast("str", flags["device"]),
        seed=cast("int", flags["seed"]),
    )
    checked = check_pool(context, asked)
    if as_json:
        print_json(context.envelope(checked.report.as_json()))
    else:
        stdout.print(_table(checked.report))
        stdout.print(checked.summary(), markup=False)
    error = checked.error()
    if error is not None:
        raise error


def check_pool(context: Context, asked: AskedPool) -> PoolChecked:
    """Check the pool that was asked for, with progress on stderr."""
    if asked.size is not None and asked.socket is not None:
        raise click.UsageError("--size starts a pool and --socket names a running one: give one")
    sizes = _slot_sizes(asked.slot_sizes)
    try:
        # Not above: torch takes seconds to import, and may be missing.
        from millpond.gate.pool import DEFAULT_SLOT_SIZES, PoolCheck, PoolCheckOptions
        from millpond.gate.pool_device import SLOT_STEP_BYTES, pick_device
        from millpond.gate.pool_pattern import SLOT_BYTES_MAX
    except ImportError as error:
        raise NoPackage(f"the gate needs torch, which comes with the engine: {error}") from error

    for slot_bytes in sizes:
        if slot_bytes % SLOT_STEP_BYTES or not 0 < slot_bytes <= SLOT_BYTES_MAX:
            raise ConfigError(
                f"--slot-size {slot_bytes}: not a multiple of {SLOT_STEP_BYTES} bytes up to "
                f"{format_size(SLOT_BYTES_MAX)}"
            )
    with ProgressLine() as line, _pool(context, asked, line) as path:
        options = PoolCheckOptions(
            socket=str(path),
            slot_sizes=sizes or DEFAULT_SLOT_SIZES,
            device=pick_device(asked.device),
            seed=asked.seed,
        )
        stderr.print(
            f"gate pool: {path}, slots of "
            f"{' and '.join(map(format_size, options.slot_sizes))}, on {options.device}, "
            f"seed {asked.seed}",
            markup=False,
        )
        check = PoolCheck(options, on_step=lambda text, stage: line.show(text, stage=stage))
        return PoolChecked(check.run())


@contextmanager
def _pool(context: Context, asked: AskedPool, line: ProgressLine) -> Generator[Path]:
    """Yield the socket of a running pool, or of one that lasts as long as the context."""
    if asked.size is None:
        yield context.settings({"socket": asked.socket}).socket()
        return
    # A folder with a short path: that of a socket has a limit.
    with tempfile.TemporaryDirectory(prefix="millpond-gate-") as folder:
        own = Path(folder, "pool.sock")
        config = context.settings({"pool.size": asked.size, "socket": own}).pool()
        options = SystemOptions(
            model="",
            num_replicas=0,
            device="cpu",  # of replicas, and there are none
            environ=context.environ,
            pool=PoolConfig(own, config.size_bytes, config.extent_bytes),
        )
        with System(options, on_progress=lambda states: show_start(line, states)):
            yield own


def _slot_sizes(written: tuple[str, ...]) -> tuple[int, ...]:
    sizes: list[int] = []
    for text in written:
        try:
            sizes.append(parse_size(text))
        except ValueError as error:
            raise ConfigError(f"--slot-size {text!r}: {error}") from error
    if len(set(sizes)) != len(sizes) or len(sizes) > _SIZES_MAX:
        raise ConfigError(f"--slot-size: at most {_SIZES_MAX} sizes, each once")
    return tuple(sizes)


def _table(report: "PoolReport") -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = ("filling", "slots", "GB", "compared", "seconds", "store GB/s", "load GB/s")
    for name in names:
        table.add_column(name, justify="left" if name == "filling" else "right", no_wrap=True)
    for filling in report.fillings:
        table.add_row(
            filling.name,
            f"{filling.num_slots:,}",
            f"{filling.num_bytes / 1e9:.3f}",
            f"{filling.num_bytes_compared / 1e9:.3f}",
            f"{filling.seconds:.1f}",
            f"{filling.store_gb_per_s:.1f}",
            f"{filling.load_gb_per_s:.1f}",
        )
    return table
