"""Everything that is worked out from a run's samples, as plain values."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
import numpy as np

from millpond.bench.effects import Effect, effects_of, noise_of
from millpond.bench.observations import (
    Cell,
    Observation,
    Observed,
    cells_of,
    clusters_of,
    observe_all,
    values_by_key,
)
from millpond.bench.records import Period, serve_metrics
from millpond.bench.resampling import Clusters
from millpond.bench.statistics import (
    OUTLIER_SCORE,
    QUANTILES,
    Estimate,
    Trend,
    estimate_median,
    estimate_quantiles,
    outlier_scores,
    trend,
)
from millpond.bench.tokens import Tokens, Told, tokens_of, told_of

_TTFT: Final = "ttft_ms"
_MS_PER_MINUTE: Final = 60_000


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of one group, role and metric under one cache.

    A request has one value, but of ITL as many as there are times between its tokens.
    """

    group: str
    part: str
    metric: str
    cache: str
    num_requests: int
    num_values: int
    quantiles: dict[str, Estimate]


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """How TTFT changed within one period, all groups together, each beside its own median."""

    period: int
    cache: str
    trend: Trend


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT of a later period over that of an earlier one of the same round and cache."""

    earlier: int
    later: int
    cache: str
    ratio: Estimate


class Outlier(msgspec.Struct, frozen=True, kw_only=True):
    """A value far from its group's median in its period. It is part of every figure."""

    key: str
    metric: str
    period: int
    cache: str
    value_ms: float
    median_ms: float
    score: float


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """What replicas read from the pool in one period.

    The mean speed is over all its time; None where it was interrupted before any passed.
    """

    period: int
    cache: str
    bytes_read: int
    gb_per_s: float | None


class Analysis(msgspec.Struct, frozen=True, kw_only=True):
    """See the module.

    ``metrics`` has the figures of ``vllm bench serve`` for all requests under each cache.
    ``num_errors`` counts failed requests by cache. ``late_ms_max`` is how late the harness
    itself has sent a request at most.
    """

    effects: list[Effect]
    noise_floor: list[Effect]
    summaries: list[Summary]
    drifts: list[Drift]
    shifts: list[Shift]
    outliers: list[Outlier]
    tokens: list[Tokens]
    told: Told
    transfers: list[Transfer]
    metrics: dict[str, dict[str, float]]
    num_requests: int
    num_errors: dict[str, int]
    num_incomplete_periods: int
    late_ms_max: float


def analyse(periods: Sequence[Period], *, seed: int = 1) -> Analysis:
    """Return the analysis; ``seed`` decides what the bootstrap draws."""
    observed = observe_all(periods)
    noise = noise_of(periods, observed, seed=seed)
    samples = [sample for period in periods for sample in period.samples]
    errors = Counter(
        period.plan.cache for period in periods for each in period.samples if each.error is not None
    )
    return Analysis(
        effects=effects_of(periods, observed, noise, seed=seed),
        noise_floor=list(noise.effects),
        summaries=_summaries(periods, observed, seed),
        drifts=_drifts(periods, observed),
        shifts=_shifts(periods, observed, seed),
        outliers=_outliers(periods, observed),
        tokens=tokens_of(periods),
        told=told_of(samples),
        transfers=_transfers(periods),
        metrics=_metrics(periods),
        num_requests=len(samples),
        num_errors=dict(errors),
        num_incomplete_periods=sum(not period.is_complete for period in periods),
        late_ms_max=max((sample.late_ms or 0.0 for sample in samples), default=0.0),
    )


def _metrics(periods: Sequence[Period]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for cache in dict.fromkeys(period.plan.cache for period in periods):
        mine = [period for period in periods if period.plan.cache == cache]
        samples = [sample for period in mine for sample in period.samples]
        found[cache] = serve_metrics(samples, sum(period.duration_s for period in mine))
    return found


def _summaries(periods: Sequence[Period], observed: Observed, seed: int) -> list[Summary]:
    caches = dict.fromkeys(period.plan.cache for period in periods)
    measures: dict[tuple[Cell, str], list[Clusters]] = {}
    for cell in cells_of(observed):
        for cache in caches:
            clusters = [
                clusters_of(observed[period.plan.number].get(cell, ()))
                for period in periods
                if period.plan.cache == cache
            ]
            if any(map(len, clusters)):
                measures[cell, cache] = clusters
    estimates = estimate_quantiles(measures, QUANTILES, seed=seed)
    return [
        Summary(
            group=cell.group,
            part=cell.part,
            metric=cell.metric,
            cache=cache,
            num_requests=sum(map(len, clusters)),
            num_values=sum(len(each.values) for each in clusters),
            quantiles=estimates[cell, cache],
        )
        for (cell, cache), clusters in measures.items()
    ]


def _drifts(periods: Sequence[Period], observed: Observed) -> list[Drift]:
    found: list[Drift] = []
    for period in periods:
        minutes: list[float] = []
        shares: list[float] = []
        for cell, values in observed[period.plan.number].items():
            if cell.metric == _TTFT:
                middle = float(np.median([each.value for each in values]))
                minutes += [each.at_ms / _MS_PER_MINUTE for each in values]
                shares += [each.value / middle for each in values]
        line = trend(np.array(minutes), np.array(shares))
        if line is not None:
            found.append(Drift(period=period.plan.number, cache=period.plan.cache, trend=line))
    return found


def _shifts(periods: Sequence[Period], observed: Observed, seed: int) -> list[Shift]:
    """Compare the halves of each round: equal caches, at different times."""
    places = {(period.plan.round, period.plan.position): period for period in periods}
    found: list[Shift] = []
    for early in periods:
        late = places.get((early.plan.round, early.plan.mirror))
        if early.plan.pair == 1 or late is None:
            continue
        earlier, later = (_ttfts(observed, each) for each in (early, late))
        ratios = np.array([later[key] / earlier[key] for key in earlier if key in later])
        if len(ratios):
            found.append(
                Shift(
                    earlier=early.plan.number,
                    later=late.plan.number,
                    cache=early.plan.cache,
                    ratio=estimate_median([ratios], seed=seed),
                )
            )
    return found


def _ttfts(observed: Observed, period: Period) -> dict[str, float]:
    number = period.plan.number
    by_key: dict[str, float] = {}
    for cell in observed[number]:
        if cell.metric == _TTFT:
            by_key |= values_by_key(observed, number, cell)
    return by_key


def _outliers(periods: Sequence[Period], observed: Observed) -> list[Outlier]:
    return [
        outlier
        for period in periods
        for cell, values in observed[period.plan.number].items()
        if cell.metric == _TTFT
        for outlier in _outliers_of(period, cell, values)
    ]


def _outliers_of(period: Period, cell: Cell, values: Sequence[Observation]) -> Iterable[Outlier]:
    numbers = np.array([each.value for each in values])
    for each, score in zip(values, outlier_scores(numbers).tolist(), strict=True):
        if abs(score) > OUTLIER_SCORE:
            yield Outlier(
                key=each.key,
                metric=cell.metric,
                period=period.plan.number,
                cache=period.plan.cache,
                value_ms=each.value,
                median_ms=float(np.median(numbers)),
                score=score,
            )


def _transfers(periods: Sequence[Period]) -> list[Transfer]:
    found: list[Transfer] = []
    for period in periods:
        bytes_read = sum(traffic.bytes_read for traffic in period.traffic.values())
        if period.traffic:
            found.append(
                Transfer(
                    period=period.plan.number,
                    cache=period.plan.cache,
                    bytes_read=bytes_read,
                    gb_per_s=bytes_read / period.duration_s / 1e9 if period.duration_s else None,
                )
            )
    return found
