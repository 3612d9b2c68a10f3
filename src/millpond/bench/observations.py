"""Samples as what is compared: of each request, and of each session or prompt as a whole."""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from millpond.bench.records import Period, Sample
from millpond.bench.resampling import Clusters
from millpond.bench.workloads import Role

Part = Role | Literal["whole"]
"""Which requests of a group; ``whole`` is all requests of a session or of a prompt together."""

WHOLE: Final = "whole"
_TICK_MS: Final = 1e-6
"""What clocks here can tell. Times of 0 count as that much: ratios of theirs have a value."""
ITL: Final = "itl_ms"
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
    """One value of one period. Equal ``key`` in two periods of a round: the same prompt.

    ``parts`` are there where a request has many values, the times between its tokens: ``value``
    is their median, which stands for them where prompts are paired.
    """

    key: str
    value: float
    at_ms: float
    parts: Sequence[float] = ()


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
                seen = Observation(sample.key, max(value, _TICK_MS), sample.start_ms)
                found.setdefault(cell, []).append(seen)
        if sample.itl_ms:
            middle = max(statistics.median(sample.itl_ms), _TICK_MS)
            found.setdefault(Cell(sample.group, sample.role, ITL), []).append(
                Observation(sample.key, middle, sample.start_ms, sample.itl_ms)
            )
    for (group, unit), members in units.items():
        if len(members) > 1:
            for metric, value in _whole(members):
                cell = Cell(group, WHOLE, metric)
                start_ms = min(member.start_ms for member in members)
                seen = Observation(unit, max(value, _TICK_MS), start_ms)
                found.setdefault(cell, []).append(seen)
    return found


def _whole(members: Sequence[Sample]) -> Iterable[tuple[str, float]]:
    ttfts = [member.ttft_ms for member in members if member.error is None]
    ends = [member.start_ms + member.e2el_ms for member in members if member.e2el_ms is not None]
    known = [ttft for ttft in ttfts if ttft is not None]
    if len(known) < len(members) or len(ends) < len(members):
        return
    yield "total_ttft_ms", sum(known)
    yield "span_ms", max(ends) - min(member.start_ms for member in members)


Observed = Mapping[int, Mapping[Cell, Sequence[Observation]]]
"""Values by the period's number and by cell."""


def cells_of(observed: Observed) -> list[Cell]:
    """Return all cells, in the order in which they were met."""
    return list(dict.fromkeys(cell for by_cell in observed.values() for cell in by_cell))


def values_by_key(observed: Observed, number: int, cell: Cell) -> dict[str, float]:
    """Return one period's values of a cell by prompt."""
    return {each.key: each.value for each in observed[number].get(cell, ())}


def clusters_of(observations: Sequence[Observation]) -> Clusters:
    """Return what there is to draw: requests, each with all of its values."""
    parts = [each.parts or (each.value,) for each in observations]
    return Clusters(
        np.fromiter(itertools.chain.from_iterable(parts), np.float64),
        np.fromiter(map(len, parts), np.int64),
    )


def observe_all(periods: Iterable[Period]) -> Observed:
    """Return the values of periods by the period's number."""
    return {period.plan.number: observe(period.samples) for period in periods}
