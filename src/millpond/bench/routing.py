"""What a router's access log says of the requests of a period."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from millpond.bench.records import Routed, Sample, Sources
from millpond.model.errors import ConfigError

_LINES_S_MAX: Final = 12.0
"""The router asks the pool for eight seconds before it writes what it guesses."""
_POLL_S: Final = 0.05
_SURE: Final = "pool"
_LINE_BYTES_MAX: Final = 64 * 1024


class _Told(msgspec.Struct, frozen=True):
    source: str
    computed_tokens: int
    local_tokens: int
    loaded_tokens: int
    writers: dict[str, int]


class _Line(msgspec.Struct, frozen=True):
    request_id: str
    is_moved: bool
    attribution: _Told | None


class RouterLog:
    """Reads the lines that a running router appends from now on.

    Raises ``ConfigError`` for what is no access log. Later on nothing is raised: of a request
    whose line is gone or can't be read the router has not told.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: dict[str, _Line] = {}
        try:
            with path.open("rb") as file:
                self._inode: int = os.fstat(file.fileno()).st_ino
                end = file.seek(0, os.SEEK_END)
                start = file.seek(max(0, end - _LINE_BYTES_MAX))
                lines = file.read(end - start).splitlines(keepends=True)
            self._offset = end
            if lines and not lines[-1].endswith(b"\n"):
                self._offset -= len(lines.pop())  # the rest of it comes later
            if lines:
                msgspec.json.decode(lines[-1], type=_Line)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{path} is no access log of a router: {error!r}; give the file of its --access-log"
            ) from error

    def attribute(self, samples: Sequence[Sample]) -> None:
        """Set ``routed`` of all samples that the log has; waits for twelve seconds at most.

        Lines are written once the router knows where the tokens came from. What they say of
        other requests is forgotten.
        """
        deadline = time.monotonic() + _LINES_S_MAX
        waiting = [sample for sample in samples if sample.error is None]
        while True:
            self._lines |= {line.request_id: line for line in self._new_lines()}
            waiting = [sample for sample in waiting if not self._attributed(sample)]
            if not waiting or time.monotonic() > deadline:
                self._lines.clear()
                return
            time.sleep(_POLL_S)

    def _attributed(self, sample: Sample) -> bool:
        line = self._lines.get(sample.request_id)
        if line is None:
            return False
        sample.routed = Routed(is_moved=line.is_moved, sources=_sources(line.attribution))
        return True

    def _new_lines(self) -> Iterator[_Line]:
        # While a log is rotated there may be none for a moment.
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            now = os.fstat(file.fileno())
            if now.st_ino != self._inode or now.st_size < self._offset:
                self._inode, self._offset = now.st_ino, 0  # another file, or truncated
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # the rest of it comes later
                self._offset += len(line)
                with contextlib.suppress(msgspec.DecodeError):
                    yield msgspec.json.decode(line, type=_Line)


def _sources(told: _Told | None) -> Sources | None:
    """Return the tokens where a replica has reported them: a guess is none."""
    if told is None or told.source != _SURE:
        return None
    return Sources(
        computed_tokens=told.computed_tokens,
        local_tokens=told.local_tokens,
        loaded_tokens=told.loaded_tokens,
        writers=told.writers,
    )
