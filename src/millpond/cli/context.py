"""What every command gets: the environment, its own command line, and the settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from millpond.cli.envelope import envelope
from millpond.config import Settings, find_config_file, load_settings
from millpond.service.client import AdminClient

_ADMIN_TIMEOUT_S: Final = 10.0

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(slots=True)
class Context:
    """One invocation. ``argv`` is the command line without the program's name."""

    environ: Mapping[str, str]
    argv: Sequence[str]
    config_file: Path | None = None

    def settings(self, flags: Mapping[str, object]) -> Settings:
        """Return the settings with ``flags`` on top; raises ``ConfigError``."""
        return load_settings(self.environ, config_file=self.config_file, flags=flags)

    def find_config(self, given: Path | None) -> None:
        """Settle which file is read."""
        self.config_file = find_config_file(self.environ, given=given, folder=Path.cwd())

    def connect(self, socket: Path | None) -> AdminClient:
        """Connect to the daemon at ``socket`` or the configured one; raises ``DaemonGone``."""
        path = self.settings({"socket": socket}).socket()
        return AdminClient.connect(str(path), timeout_s=_ADMIN_TIMEOUT_S)

    def envelope(self, data: Mapping[str, object]) -> dict[str, object]:
        """Return ``data`` in the JSON envelope of this invocation."""
        return envelope(["millpond", *self.argv], data)


pass_context: Final = click.make_pass_decorator(Context)


def socket_option(function: FunctionT) -> FunctionT:
    """Add ``--socket``."""
    return click.option(
        "--socket",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="The daemon's socket.  [default: $XDG_RUNTIME_DIR/millpond/pool.sock, "
        "else /tmp/millpond-UID/pool.sock]",
    )(function)


def json_option(function: FunctionT) -> FunctionT:
    """Add ``--json``."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON document to stdout."
    )(function)


def examples(*lines: str) -> str:
    """Return examples for the end of a command's help, one a line."""
    # Click leaves a paragraph's lines alone after a backspace.
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
