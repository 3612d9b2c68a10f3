"""What became of each request: the record that logs, metrics and headers are made from."""

import contextlib
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final

from millpond.router.errors import Ended
from millpond.router.placement.estimates import Work

_log = logging.getLogger(__name__)

_NS_PER_MS: Final = 1e6
NO_TOKENS: Final[Mapping[str, int]] = {}


@dataclass(frozen=True, slots=True)
class Attribution:
    """Where a prompt's tokens came from.

    ``source`` is ``pool`` where the replica reported it, ``pool-ambiguous`` where the client
    used one name for several requests, so that these are sums over them, and ``guessed``
    where no report came and the router says what it thinks. ``writers`` counts loaded tokens
    by the replica that had written them. ``reader`` is who reported.
    ``num_reports`` is more than one for several prompts or samples, too.
    """

    source: str
    reader: str
    prompt_tokens: int
    computed_tokens: int
    local_tokens: int
    loaded_tokens: int
    writers: Mapping[str, int] = field(default_factory=lambda: NO_TOKENS)
    num_reports: int = 0

    @property
    def is_ambiguous(self) -> bool:
        """Whether other requests may be part of these sums: they are no measure of anything."""
        return self.source == "pool-ambiguous"

    @property
    def is_of_one_prompt(self) -> bool:
        """Whether the tokens are those of one prompt, by a report or a guess."""
        return not self.is_ambiguous and self.num_reports <= 1

    @property
    def own_tokens(self) -> int:
        """Tokens loaded from the pool that the reader itself had written."""
        return self.writers.get(self.reader, 0)

    @property
    def other_tokens(self) -> int:
        """Tokens loaded from the pool that other replicas had written."""
        return self.loaded_tokens - self.own_tokens


@dataclass(slots=True)
class GivenName:
    """A name that clients gave requests, and to how many so far."""

    num_requests: int = 0


@dataclass(slots=True)
class Record:
    """One request, filled in while it lives. Times are of ``time.perf_counter_ns``.

    ``local_tokens`` and ``holder`` are what the router thought when it placed the request.
    ``planned`` is the work it expected. ``given_name`` is the client's, shared with all requests
    that have it; None where the router chose one. No body and no query is ever part of it.
    """

    request_id: str
    method: str
    path: str
    policy: str
    is_own_id: bool
    given_name: GivenName | None = None
    arrived_ns: int = field(default_factory=time.perf_counter_ns)
    arrived_at: float = field(default_factory=time.time)
    replica: str | None = None
    tried: list[str] = field(default_factory=list[str])
    holder: str | None = None
    identity: str = ""
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    local_tokens: int = 0
    planned: Work | None = None
    status: int | None = None
    is_stream: bool = False
    first_byte_ns: int | None = None
    ended_ns: int | None = None
    request_bytes: int = 0
    response_bytes: int = 0
    ended: Ended = Ended.COMPLETE
    attribution: Attribution | None = None

    @property
    def has_unique_name(self) -> bool:
        """Whether no other request has had its name so far, also none that still runs."""
        return self.given_name is None or self.given_name.num_requests == 1

    @property
    def is_moved(self) -> bool:
        """Whether it went to another replica than the one that held its longest prefix."""
        return self.holder is not None and self.replica is not None and self.holder != self.replica

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first byte of a stream; None where the answer came in one piece."""
        if self.first_byte_ns is None or not self.is_stream:
            return None
        return (self.first_byte_ns - self.arrived_ns) / 1e9

    def as_line(self) -> dict[str, object]:
        """Return the line of the access log."""
        return {
            "time": datetime.fromtimestamp(self.arrived_at, UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "ended": self.ended.value,
            "policy": self.policy,
            "replica": self.replica,
            "tried": self.tried,
            "prefix_holder": self.holder,
            "prefix_identity": self.identity or None,
            "is_moved": self.is_moved,
            "prompt_tokens_guessed": self.prompt_tokens,
            "local_tokens_guessed": self.local_tokens,
            "is_stream": self.is_stream,
            "first_byte_ms": _ms(self.arrived_ns, self.first_byte_ns),
            "e2el_ms": _ms(self.arrived_ns, self.ended_ns),
            "request_bytes": self.request_bytes,
            "response_bytes": self.response_bytes,
            "attribution": None if self.attribution is None else _fields(self.attribution),
        }


def _fields(attribution: Attribution) -> dict[str, object]:
    return {
        "source": attribution.source,
        "reader": attribution.reader,
        "prompt_tokens": attribution.prompt_tokens,
        "computed_tokens": attribution.computed_tokens,
        "local_tokens": attribution.local_tokens,
        "loaded_tokens": attribution.loaded_tokens,
        "pool_own_tokens": attribution.own_tokens,
        "pool_other_tokens": attribution.other_tokens,
        "writers": dict(attribution.writers),
    }


def _ms(start_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else round((end_ns - start_ns) / _NS_PER_MS, 3)


class AccessLog:
    """A JSON line for each request, appended to a file; without a file nothing is kept.

    Lines are written as requests are attributed, seconds after they ended, and so not quite
    in their order. Opening raises ``OSError``. A log that can't be written any more ends, and
    says so once: requests go on.
    """

    def __init__(self, path: Path | None) -> None:
        # Line by line: a reader sees whole lines only.
        self._file: IO[str] | None = None if path is None else path.open("a", buffering=1)

    def write(self, record: Record) -> None:
        """Append a request."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(record.as_line(), separators=(",", ":")) + "\n")
        except OSError as error:
            _log.error("access log ends: path=%s error=%s", self._file.name, error.strerror)
            self._file, ended = None, self._file
            with contextlib.suppress(OSError):
                ended.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
