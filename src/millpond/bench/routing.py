"""What a router's access log says of the requests of a period."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from millpond.bench.records import Routed, Sample, Sources
from millpond.model.errors import ConfigError

_LINES_S_MAX: Final = 12.0
"""The router asks the pool for eight seconds before it writes what it guesses."""
_POLL_S: Final = 0.05
_SURE: Final = "pool"

Line = dict[str, Any]


class RouterLog:
    """Reads the lines that a running router appends; raises ``ConfigError`` for no such file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._lines: dict[str, Line] = {}
        self._read()

    def attribute(self, samples: Sequence[Sample]) -> None:
        """Set ``routed`` of all samples that the log has; waits for twelve seconds at most.

        Lines are written once the router knows where the tokens came from. What they say of
        other requests is forgotten.
        """
        deadline = time.monotonic() + _LINES_S_MAX
        waiting = [sample for sample in samples if sample.error is None]
        while True:
            self._read()
            waiting = [sample for sample in waiting if not self._attributed(sample)]
            if not waiting or time.monotonic() > deadline:
                self._lines.clear()
                return
            time.sleep(_POLL_S)

    def _attributed(self, sample: Sample) -> bool:
        line = self._lines.get(sample.request_id)
        if line is None:
            return False
        sample.routed = Routed(
            is_moved=cast("bool", line["is_moved"]), sources=_sources(line["attribution"])
        )
        return True

    def _read(self) -> None:
        try:
            for line in self._new_lines():
                self._lines[line["request_id"]] = line
        except (OSError, msgspec.DecodeError, KeyError) as error:
            raise ConfigError(
                f"{self._path} is no access log of a router: {error!r}; give the file of its "
                "--access-log"
            ) from error

    def _new_lines(self) -> Iterator[Line]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # the rest of it comes later
                self._offset += len(line)
                yield msgspec.json.decode(line, type=Line)


def _sources(attribution: Line | None) -> Sources | None:
    """Return the tokens where a replica has reported them: a guess is none."""
    if attribution is None or attribution["source"] != _SURE:
        return None
    return Sources(
        computed_tokens=attribution["computed_tokens"],
        local_tokens=attribution["local_tokens"],
        loaded_tokens=attribution["loaded_tokens"],
        writers=attribution["writers"],
    )
