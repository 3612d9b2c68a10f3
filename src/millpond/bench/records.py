"""What a benchmark leaves: every sample, and all that it depends on, as one JSON file.

Times are milliseconds. Metrics have the names of ``vllm bench serve`` where it has them; those
are written beside each period's samples when the record is saved.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from millpond.bench.scenario import Scenario
from millpond.bench.workloads import Role
from millpond.model.errors import ConfigError

FORMAT: Final = 2
_FORMAT_OF_TWO: Final = 1
"""Its rounds compared two caches each, and a plan named the second one as `other`."""
OFF: Final = "off"
"""The cache that is none: the engine's own alone."""
_PERCENTILES: Final = (90, 99)
_MS_PER_S: Final = 1000


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where a prompt's tokens came from, by the replica's report to the pool."""

    computed_tokens: int
    local_tokens: int
    loaded_tokens: int
    writers: dict[str, int]


class Routed(msgspec.Struct, frozen=True, kw_only=True):
    """What a router's access log says of a request.

    ``is_moved``: another replica than the one that was asked held its longest prefix, as far as
    the router knew. ``sources`` is there where the router is sure of it.
    """

    is_moved: bool
    sources: Sources | None


class Sample(msgspec.Struct, kw_only=True):
    """One request as it went. Equal keys in two periods are the same prompt.

    ``start_ms`` is since the period's begin. ``late_ms`` is how much later it was sent than it
    was due; None where nothing was due. ``ttft_ms`` is None where no token came. ``itl_ms``
    has the time between the events that brought tokens. ``cached_tokens`` is the engine's own
    word, where it says so, ``sources`` the pool's and ``routed`` the router's.
    """

    key: str
    group: str
    role: Role
    unit: str
    turn: int
    replica: str
    request_id: str
    input_tokens: int
    start_ms: float
    late_ms: float | None = None
    ttft_ms: float | None = None
    e2el_ms: float | None = None
    itl_ms: list[float] = []
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None
    sources: Sources | None = None
    routed: Routed | None = None

    @property
    def tpot_ms(self) -> float | None:
        """(E2EL - TTFT) / (output tokens - 1); None for answers of fewer than two tokens."""
        if self.ttft_ms is None or self.e2el_ms is None or self.output_tokens < 2:
            return None
        return (self.e2el_ms - self.ttft_ms) / (self.output_tokens - 1)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica read from the pool in a period, and the pool's word on its link."""

    bytes_read: int
    blocks_read: int
    blocks_written: int
    link: dict[str, object] | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One period before it has run.

    ``base`` is the cache that its round compares the ``others`` with, and ``cache`` the one
    that it runs with. ``position`` is its place in the round, which reads the same both ways:
    OFF-ON-ON-OFF, or OFF-X-Y-Y-X-OFF.
    """

    number: int
    base: str
    others: tuple[str, ...]
    round: int
    position: int
    cache: str

    @property
    def num_positions(self) -> int:
        """How many periods its round has."""
        return num_positions(self.others)

    @property
    def mirror(self) -> int:
        """The place of the same cache in the other half of the round."""
        return self.num_positions - 1 - self.position

    @property
    def is_other(self) -> bool:
        """Whether it lies between the two outer ones, which run with the base."""
        return 0 < self.position < self.num_positions - 1

    @property
    def pair(self) -> int:
        """The half of the round it belongs to: OFF-ON is 0, ON-OFF is 1."""
        return self.position // (self.num_positions // 2)

    @property
    def is_aa(self) -> bool:
        """Whether its round compares a cache with itself."""
        return self.others == (self.base,)

    def compares(self, other: str) -> bool:
        """Return whether it is part of what compares the base with ``other``."""
        return other in self.others and (not self.is_other or self.cache == other)


def num_positions(others: Sequence[str]) -> int:
    """Return how many periods a round has that compares a base with ``others``."""
    return 2 * (1 + len(others))


class Period(msgspec.Struct, kw_only=True):
    """One period that has run, or was interrupted: then ``is_complete`` is false."""

    plan: Plan
    started_at: str
    duration_s: float
    is_complete: bool
    samples: list[Sample]
    warm_up: list[Sample]
    traffic: dict[str, Traffic]


class Record(msgspec.Struct, kw_only=True):
    """A whole run."""

    format: int = FORMAT
    scenario: Scenario
    options: dict[str, object]
    facts: dict[str, object]
    periods: list[Period]

    def save(self, path: Path, analysis: msgspec.Struct | None = None) -> None:
        """Write the record and the metrics of each period, with the analysis if there is one."""
        document = msgspec.to_builtins(self) | {"analysis": msgspec.to_builtins(analysis)}
        for built, period in zip(document["periods"], self.periods, strict=True):
            built["metrics"] = serve_metrics(period.samples, period.duration_s)
        write_json(path, document)


def load_record(path: Path) -> Record:
    """Read what ``Record.save`` wrote; raises ``ConfigError``."""
    try:
        document = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        if document.get("format") == _FORMAT_OF_TWO:
            _upgrade(document)
        record = msgspec.convert(document, Record)
    except (OSError, msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} is no record of a benchmark: {error}; give a bench.json"
        ) from error
    if record.format != FORMAT:
        raise ConfigError(f"{path} has format {record.format}, and this reads {FORMAT}")
    return record


def _upgrade(document: dict[str, Any]) -> None:
    document["format"] = FORMAT
    for period in document["periods"]:
        plan = msgspec.convert(period["plan"], dict[str, Any])
        period["plan"] = plan | {"others": [plan.pop("other")]}


def write_json(path: Path, value: object) -> None:
    """Write a JSON file in one step, so that none is ever found half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    partial.replace(path)


def serve_metrics(samples: Sequence[Sample], duration_s: float) -> dict[str, Any]:
    """Return the figures of ``vllm bench serve`` under its names, for some samples."""
    completed = [sample for sample in samples if sample.error is None]
    num_in = sum(sample.input_tokens for sample in completed)
    num_out = sum(sample.output_tokens for sample in completed)
    metrics: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(samples) - len(completed),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
    }
    if duration_s > 0:  # else it was interrupted before its first request
        metrics |= {
            "request_throughput": len(completed) / duration_s,
            "output_throughput": num_out / duration_s,
            "total_token_throughput": (num_in + num_out) / duration_s,
        }
    times = {
        "ttft": [sample.ttft_ms for sample in completed],
        "tpot": [sample.tpot_ms for sample in completed],
        "itl": [gap for sample in completed for gap in sample.itl_ms],
        "e2el": [sample.e2el_ms for sample in completed],
    }
    for name, values in times.items():
        known = np.array([value for value in values if value is not None], float)
        if not len(known):
            continue
        metrics[f"mean_{name}_ms"] = float(np.mean(known))
        metrics[f"median_{name}_ms"] = float(np.median(known))
        metrics[f"std_{name}_ms"] = float(np.std(known))
        for percentile in _PERCENTILES:
            metrics[f"p{percentile}_{name}_ms"] = float(np.percentile(known, percentile))
    return metrics
