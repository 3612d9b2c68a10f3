"""From samples to figures: quantiles and effects with their intervals, drift, outliers.

Two intervals of 95 % stand beside each figure. *Over requests* draws the requests anew, as if
all periods were alike. *Over periods* draws periods first and then their requests, so that what
differs from period to period widens it; with few periods it is rough, and with one there is
none. Nothing is dropped: outliers are named and stay in.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgspec
import numpy as np
import numpy.typing as npt
from scipy import stats

Values = npt.NDArray[np.float64]

RESAMPLES: Final = 2000
_DRAWN_AT_ONCE: Final = 4_000_000
"""Values of resamples in memory: a trace has tens of thousands of requests."""
CONFIDENCE: Final = 0.95
QUANTILES: Final = {"median": 0.5, "p90": 0.9, "p99": 0.99}
OUTLIER_SCORE: Final = 3.5
"""Of the modified z-score: Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993."""
_TAILS: Final = (100 * (1 - CONFIDENCE) / 2, 100 * (1 + CONFIDENCE) / 2)
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


def estimate_quantile(periods: Sequence[Values], quantile: float, *, seed: int) -> Estimate:
    """Return a quantile of all values, which ``periods`` holds by period."""

    def of(values: Values, axis: int = -1) -> Values:
        return cast("Values", np.quantile(values, quantile, axis=axis))

    return estimate(periods, of, seed=seed)


def estimate_median(periods: Sequence[Values], *, seed: int) -> Estimate:
    """Return the median of all values, which ``periods`` holds by period."""
    return estimate_quantile(periods, QUANTILES["median"], seed=seed)


def estimate(periods: Sequence[Values], statistic: Callable[..., Values], *, seed: int) -> Estimate:
    """Return ``statistic`` of all values with both intervals; ``ValueError`` without values.

    ``statistic`` takes an array and an axis, as numpy's reductions do.
    """
    known = [values for values in periods if len(values)]
    if not known:
        raise ValueError("no values")
    pooled = np.concatenate(known)
    return Estimate(
        float(statistic(pooled)),
        _over_requests(pooled, statistic, seed),
        _over_periods(known, statistic, seed),
    )


def _over_requests(pooled: Values, statistic: Callable[..., Values], seed: int) -> Interval | None:
    if len(pooled) < 2:
        return None
    result = _stats.bootstrap(
        (pooled,),
        statistic,
        n_resamples=RESAMPLES,
        batch=min(RESAMPLES, max(1, _DRAWN_AT_ONCE // len(pooled))),
        confidence_level=CONFIDENCE,
        # BCa needs a jackknife, which says nothing about quantiles.
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return Interval(float(result.confidence_interval.low), float(result.confidence_interval.high))


def _over_periods(
    periods: Sequence[Values], statistic: Callable[..., Values], seed: int
) -> Interval | None:
    """Draw periods and then values of each, both with replacement (a two-stage bootstrap).

    Davison and Hinkley, Bootstrap Methods and their Application, 1997, section 3.8.
    """
    if len(periods) < 2:
        return None
    generator = np.random.default_rng(seed)
    chosen = np.sort(generator.integers(len(periods), size=(RESAMPLES, len(periods))), axis=1)
    found: list[Values] = []
    # All draws of the same periods at once: with a handful of periods there are few of them.
    compositions = Counter(map(tuple, cast("list[list[int]]", chosen.tolist())))
    for members, num_draws in compositions.items():
        drawn = [generator.choice(periods[j], (num_draws, len(periods[j]))) for j in members]
        found.append(statistic(np.concatenate(drawn, axis=1), axis=1))
    low, high = np.percentile(np.concatenate(found), _TAILS)
    return Interval(float(low), float(high))


def trend(minutes: Values, values: Values) -> Trend | None:
    """Return the drift of values over time by Theil and Sen; None for fewer than five.

    One slow request doesn't move it, nor does one at the begin or the end.
    """
    if len(values) < 5 or np.ptp(minutes) == 0:
        return None
    middle = float(np.median(values))
    result = _stats.theilslopes(values, minutes, CONFIDENCE)
    low, high = sorted((float(result.low_slope), float(result.high_slope)))
    return Trend(float(result.slope) / middle, Interval(low / middle, high / middle))


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
