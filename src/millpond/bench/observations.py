"""Samples as what is compared: of each request, and of each session or prompt as a whole."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from millpond.bench.records import Period, Sample
from millpond.bench.workloads import Role

Part = Role | Literal["whole"]
"""Which requests of a group; ``whole`` is all requests of a session or of a prompt together."""

WHOLE: Final = "whole"
REQUEST_METRICS: Final = ("ttft_ms", "tpot_ms", "e2el_ms")
WHOLE_METRICS: Final = ("total_ttft_ms", "span_ms")
"""The sum of TTFT over a session's turns; from its first request's start to its last one's end."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a report: a group of requests, those of one role, and what of them."""

    group: str
    part: Part
    metric: str


@dataclass(frozen=True, slots=True)
class Observation:
    """One value of one period. Equal ``key`` in two periods of a round: the same prompt."""

    key: str
    value: float
    at_ms: float


def observe(samples: Sequence[Sample]) -> dict[Cell, list[Observation]]:
    """Return the values of one period's samples by cell, failed requests left out.

    A session with a failed request has no value as a whole: it would be too short.
    """
    found: dict[Cell, list[Observation]] = {}
    units: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        units.setdefault((sample.group, sample.unit), []).append(sample)
        if sample.error is not None:
            continue
        for metric in REQUEST_METRICS:
            value: float | None = getattr(sample, metric)
            if value is not None:
                cell = Cell(sample.group, sample.role, metric)
                found.setdefault(cell, []).append(Observation(sample.key, value, sample.start_ms))
    for (group, unit), members in units.items():
        if len(members) > 1:
            for metric, value in _whole(members):
                cell = Cell(group, WHOLE, metric)
                start_ms = min(member.start_ms for member in members)
                found.setdefault(cell, []).append(Observation(unit, value, start_ms))
    return found


def _whole(members: Sequence[Sample]) -> Iterable[tuple[str, float]]:
    ttfts = [member.ttft_ms for member in members if member.error is None]
    ends = [member.start_ms + member.e2el_ms for member in members if member.e2el_ms is not None]
    known = [ttft for ttft in ttfts if ttft is not None]
    if len(known) < len(members) or len(ends) < len(members):
        return
    yield "total_ttft_ms", sum(known)
    yield "span_ms", max(ends) - min(member.start_ms for member in members)


def observe_all(periods: Iterable[Period]) -> dict[int, dict[Cell, list[Observation]]]:
    """Return the values of periods by the period's number."""
    return {period.plan.number: observe(period.samples) for period in periods}
