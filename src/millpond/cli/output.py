"""What commands print: answers on stdout, everything else on stderr."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Final, Self

from rich.console import Console

stdout: Final = Console(highlight=False, soft_wrap=True)
stderr: Final = Console(stderr=True, highlight=False, soft_wrap=True)

_LINE_EVERY_S: Final = 5.0


def print_json(document: Mapping[str, object]) -> None:
    """Print one JSON document, and nothing else goes to stdout."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    sys.stdout.flush()


class ProgressLine:
    """One line of progress on stderr: redrawn on a terminal, else repeated now and then.

    Once it has ended it is not redrawn any more: there may be other lines below it.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._status = stderr.status("") if stderr.is_terminal else None
        self._printed = ""
        self._printed_at = float("-inf")

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def show(self, text: str, *, stage: str = "") -> None:
        """Show ``text``. Without a terminal, it is printed when ``stage`` changes and every 5 s."""
        if self._status is not None:
            self._status.update(text)
        elif stage != self._printed or self._now() - self._printed_at >= _LINE_EVERY_S:
            stderr.print(text, markup=False)
            self._printed, self._printed_at = stage, self._now()
