"""From samples to figures: quantiles and effects with their intervals, drift, outliers.

Two intervals of 95 % stand beside each figure. *Over requests* draws the requests anew, as if
all periods were alike. *Over periods* draws periods first and then their requests, so that what
differs from period to period widens it; with few periods it is rough, and with one there is
none. Nothing is dropped: outliers are named and stay in.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats

from millpond.bench.resampling import Clusters, Values, one_each, resampled_quantiles

CONFIDENCE: Final = 0.95
QUANTILES: Final = {"median": 0.5, "p90": 0.9, "p99": 0.99}
_MEDIAN: Final = {"median": QUANTILES["median"]}
OUTLIER_SCORE: Final = 3.5
"""Of the modified z-score: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993."""
_TAILS: Final = (100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2)
_TREND_POINTS_MAX: Final = 1000
"""Theil and Sen take every two points: of 20,000 requests that would be 1.6 GB of slopes."""
_Key = TypeVar("_Key")
_stats: Any = stats  # scipy tells no types


class Interval(msgspec.Struct, frozen=True):
    """An interval of 95 %."""

    low: float
    high: float

    def union(self, other: "Interval | None") -> "Interval":
        """Return the interval that holds both."""
        if other is None:
            return self
        return Interval(min(self.low, other.low), max(self.high, other.high))


class Estimate(msgspec.Struct, frozen=True):
    """A figure and how well it is known; None where there are too few samples or periods."""

    value: float
    over_requests: Interval | None
    over_periods: Interval | None

    @property
    def interval(self) -> Interval | None:
        """The interval that holds both."""
        if self.over_requests is None:
            return self.over_periods
        return self.over_requests.union(self.over_periods)


class Trend(msgspec.Struct, frozen=True):
    """Change for each minute, as a share of the median, with its interval."""

    share_per_minute: float
    interval: Interval


def estimate_quantiles(
    measures: Mapping[_Key, Sequence[Clusters]], quantiles: Mapping[str, float], *, seed: int
) -> dict[_Key, dict[str, Estimate]]:
    """Return quantiles of all values of each measure; ``ValueError`` for one without values.

    A measure has its values by period. Those whose periods have equally many requests are
    drawn together, which takes a fraction of the time.
    """
    alike: dict[tuple[int, ...], dict[_Key, list[Clusters]]] = {}
    for key, periods in measures.items():
        known = [each for each in periods if len(each)]
        if not known:
            raise ValueError(f"no values: {key}")
        alike.setdefault(tuple(map(len, known)), {})[key] = known
    found: dict[_Key, dict[str, Estimate]] = {}
    for some in alike.values():
        found |= zip(some, _alike(list(some.values()), quantiles, seed), strict=True)
    return found


def _alike(
    measures: Sequence[Sequence[Clusters]], quantiles: Mapping[str, float], seed: int
) -> Iterator[dict[str, Estimate]]:
    asked = list(quantiles.values())
    lengths = list(map(len, measures[0]))
    over_requests = over_periods = [[None] * len(asked)] * len(measures)
    # The percentile method: BCa needs a jackknife, which says nothing about quantiles.
    if sum(lengths) > 1:
        drawn = resampled_quantiles(measures, asked, by_period=False, seed=seed)
        over_requests = list(map(_intervals, drawn))
    if len(lengths) > 1:
        drawn = resampled_quantiles(measures, asked, by_period=True, seed=seed)
        over_periods = list(map(_intervals, drawn))
    for periods, *intervals in zip(measures, over_requests, over_periods, strict=True):
        pooled = np.quantile(np.concatenate([each.values for each in periods]), asked)
        yield {
            name: Estimate(float(value), *both)
            for name, value, *both in zip(quantiles, pooled, *intervals, strict=True)
        }


def estimate_medians(
    measures: Mapping[_Key, Sequence[Values]], *, seed: int
) -> dict[_Key, Estimate]:
    """Return the median of all values of each measure: one of each request, by period."""
    clusters = {key: [one_each(each) for each in periods] for key, periods in measures.items()}
    estimates = estimate_quantiles(clusters, _MEDIAN, seed=seed)
    return {key: each["median"] for key, each in estimates.items()}


def estimate_median(periods: Sequence[Values], *, seed: int) -> Estimate:
    """Return the median of all values, which ``periods`` holds by period."""
    return estimate_medians({"it": periods}, seed=seed)["it"]


def _intervals(resampled: Values) -> list[Interval]:
    lows, highs = np.percentile(resampled, _TAILS, axis=1)
    return [Interval(float(low), float(high)) for low, high in zip(lows, highs, strict=True)]


def trend(minutes: Values, values: Values) -> Trend | None:
    """Return the drift of values over time by Theil and Sen; None where too little is known.

    That is of fewer than five, and of equal ones. One slow request doesn't move it, nor does
    one at the begin or the end. Of very many values, medians of neighbours are taken.
    """
    if len(values) < 5 or np.ptp(minutes) == 0:
        return None
    middle = float(np.median(values))
    minutes, values = _thinned(minutes, values)
    with np.errstate(invalid="ignore"):  # of its interval where nearly all values are equal
        result = _stats.theilslopes(values, minutes, CONFIDENCE)
    low, high = sorted((float(result.low_slope), float(result.high_slope)))
    if not math.isfinite(high - low):
        return None
    return Trend(float(result.slope) / middle, Interval(low / middle, high / middle))


def _thinned(minutes: Values, values: Values) -> tuple[Values, Values]:
    if len(values) <= _TREND_POINTS_MAX:
        return minutes, values
    order = np.argsort(minutes, kind="stable")
    slices = np.array_split(order, _TREND_POINTS_MAX)
    return _medians(minutes, slices), _medians(values, slices)


def _medians(values: Values, slices: Iterable[npt.NDArray[np.intp]]) -> Values:
    return np.array([np.median(values[each]) for each in slices], np.float64)


def outlier_scores(values: Values) -> Values:
    """Return how far each value lies from the median, in robust standard deviations.

    Of logarithms: times are skewed, and twice as long is as odd as half. All 0 where most
    values are equal.
    """
    logs = np.log(values)
    spread = float(_stats.median_abs_deviation(logs, scale="normal"))
    if spread == 0:
        return np.zeros(len(values))
    return cast("Values", (logs - np.median(logs)) / spread)
