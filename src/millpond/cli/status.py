"""``millpond status``: what a running daemon holds and did, once or again and again."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from millpond.cli.context import Context, examples, json_option, pass_context, socket_option
from millpond.cli.figures import Tree, tree
from millpond.cli.output import print_json, stdout
from millpond.cli.tables import status_line, status_tables
from millpond.model.errors import ExpectedError

_EVERY_S: Final = 2.0
_EVERY_S_MIN: Final = 0.1


@click.command(
    epilog=examples(
        "millpond status",
        "millpond status --json | jq .data.pool.num_blocks",
        "millpond status --watch",
        "millpond status --watch 10 >>pool.log   # a line every 10 s",
    )
)
@click.option(
    "--watch",
    "every_s",
    type=click.FloatRange(min=_EVERY_S_MIN),
    is_flag=False,
    flag_value=_EVERY_S,
    metavar="[SECONDS]",
    help="Show it again every SECONDS until Ctrl-C.  [default: 2]",
)
@socket_option
@json_option
@pass_context
def status(context: Context, socket: Path | None, every_s: float | None, as_json: bool) -> None:
    """Show what the pool holds, what each replica got from it, and what was refused and why.

    With --watch, a terminal is redrawn; anything else gets one line each time. A daemon that
    goes away is waited for, and the time without it is said.
    """
    if every_s is not None:
        if as_json:
            raise click.UsageError("--watch and --json exclude each other")
        _watch(Watch(lambda: context.connect(socket)), every_s)
        return
    with context.connect(socket) as admin:
        statistics = admin.status()
    if as_json:
        print_json(context.envelope(statistics))
        return
    for table in status_tables(statistics):
        stdout.print(table)


class Asked(Protocol):
    """What is watched: an ``AdminClient``."""

    def status(self) -> dict[str, object]:
        """Return the daemon's ``statistics()``."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


@dataclass(frozen=True, slots=True)
class Seen:
    """The last figures known, and what became of the daemon: ``news`` is "" if nothing did."""

    statistics: Tree
    is_away: bool
    news: str


class Watch:
    """Asks one daemon time and again, over a connection that it opens anew when it broke."""

    def __init__(
        self, connect: Callable[[], Asked], *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._connect = connect
        self._now = now
        self._admin: Asked | None = None
        self._latest: Tree | None = None
        self._away_since: float | None = None

    def ask(self) -> Seen:
        """Return what is known now; raises ``ExpectedError`` only if no daemon was ever there."""
        try:
            if self._admin is None:
                self._admin = self._connect()
            statistics = self._admin.status()
        except ExpectedError as error:
            self.close()
            if self._latest is None:
                raise
            if self._away_since is None:
                self._away_since = self._now()
            seconds = self._now() - self._away_since
            return Seen(self._latest, is_away=True, news=f"away for {seconds:.0f} s: {error}")
        news = self._news_of(statistics)
        self._latest, self._away_since = statistics, None
        return Seen(statistics, is_away=False, news=news)

    def close(self) -> None:
        """End the connection, if there is one."""
        if self._admin is not None:
            self._admin.close()
            self._admin = None

    def _news_of(self, statistics: Tree) -> str:
        if self._latest is None:
            return ""
        is_new = _epoch(statistics) != _epoch(self._latest)
        if self._away_since is None and not is_new:
            return ""
        seconds = 0.0 if self._away_since is None else self._now() - self._away_since
        who = "a new daemon, which holds nothing of before" if is_new else "the same daemon"
        return f"back after {seconds:.0f} s: {who}"


def _epoch(statistics: Tree) -> object:
    return tree(statistics, "service")["epoch"]


def _watch(watch: Watch, every_s: float) -> None:
    is_screen = sys.stdout.isatty() and stdout.is_terminal and not stdout.is_dumb_terminal
    with contextlib.closing(watch):
        if is_screen:
            _redraw(watch, every_s)
        else:
            _write_lines(watch, every_s)


def _redraw(watch: Watch, every_s: float) -> None:
    seen = watch.ask()  # before the screen changes: an error belongs on the one that stays
    news = ""
    # The alternate screen: whatever ends this, the terminal is as it was.
    with Live(console=stdout, screen=True, auto_refresh=False) as live:
        while True:
            news = seen.news or news
            live.update(screen(seen, news, every_s), refresh=True)
            time.sleep(every_s)
            seen = watch.ask()


def screen(seen: Seen, news: str, every_s: float) -> Group:
    """Return what a terminal shows; ``news`` may be older than what was seen."""
    head = Text(f"{_clock()}, every {every_s:g} s, Ctrl-C ends")
    if news:
        head.append(f"\nThe daemon is {news}", style="bold red" if seen.is_away else "yellow")
    if seen.is_away:
        head.append("\nThe figures are the last it gave.")
    return Group(head, *status_tables(seen.statistics))


def _write_lines(watch: Watch, every_s: float) -> None:
    while True:
        try:
            for line in lines(watch.ask()):
                sys.stdout.write(f"{_clock()} {line}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            # Who read this has seen enough. What is left in the buffer must go somewhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        time.sleep(every_s)


def lines(seen: Seen) -> list[str]:
    """Return what a log gets: the news, and the figures if they are fresh."""
    news = [f"daemon is {seen.news}"] if seen.news else []
    return news if seen.is_away else [*news, status_line(seen.statistics)]


def _clock() -> str:
    return datetime.now(UTC).astimezone().isoformat(timespec="seconds")
