"""Figures on samples whose truth is known: quantiles, intervals, drift, outliers."""

import numpy as np
import pytest

from millpond.bench.statistics import (
    Estimate,
    Interval,
    estimate_median,
    estimate_quantile,
    outlier_scores,
    trend,
)


def normal(centre: float, spread: float, num: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(centre, spread, num)


def known(estimate: Estimate) -> tuple[Interval, Interval]:
    assert estimate.over_requests is not None
    assert estimate.over_periods is not None
    return estimate.over_requests, estimate.over_periods


def width(interval: Interval) -> float:
    return interval.high - interval.low


def test_quantiles_are_those_of_all_values() -> None:
    halves = [np.arange(0.0, 50.0), np.arange(50.0, 101.0)]
    for quantile, value in ((0.5, 50.0), (0.9, 90.0), (0.99, 99.0)):
        assert estimate_quantile(halves, quantile, seed=1).value == pytest.approx(value)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    inside = 0
    for seed in range(60):
        over_requests, _ = known(
            estimate_median([normal(10, 1, 40, seed), normal(10, 1, 40, 1000 + seed)], seed=1)
        )
        inside += over_requests.low <= 10 <= over_requests.high
    assert 51 <= inside <= 60


def test_periods_that_differ_widen_the_interval_over_periods_only() -> None:
    alike = [normal(10, 1, 50, seed) for seed in range(4)]
    apart = [values + shift for values, shift in zip(alike, (-3, -1, 1, 3), strict=True)]
    requests_alike, periods_alike = known(estimate_median(alike, seed=1))
    requests_apart, periods_apart = known(estimate_median(apart, seed=1))
    assert width(periods_alike) < 2 * width(requests_alike)
    assert width(periods_apart) > 2 * width(requests_apart)


def test_a_seed_decides_the_intervals() -> None:
    values = [normal(10, 1, 20, 1), normal(10, 1, 20, 2)]
    assert estimate_median(values, seed=3) == estimate_median(values, seed=3)
    assert estimate_median(values, seed=3) != estimate_median(values, seed=4)


def test_periods_of_different_lengths_are_drawn_too() -> None:
    estimate = estimate_median([normal(10, 1, 5, 1), normal(10, 1, 30, 2), np.array([])], seed=1)
    over_requests, over_periods = known(estimate)
    assert over_requests.low < estimate.value < over_requests.high
    assert over_periods.low < estimate.value < over_periods.high


def test_too_little_has_no_interval() -> None:
    assert estimate_median([np.array([5.0])], seed=1) == Estimate(5.0, None, None)
    assert estimate_median([np.array([5.0, 6.0])], seed=1).over_periods is None
    with pytest.raises(ValueError, match="no values"):
        estimate_median([np.array([])], seed=1)


def test_a_drift_is_found_and_one_slow_request_is_none() -> None:
    minutes = np.linspace(0, 10, 40)
    level = normal(100, 1, 40, 1)
    rising = trend(minutes, level + 2 * minutes)
    assert rising is not None
    assert rising.interval.low < 2 / 110 < rising.interval.high
    assert rising.interval.low > 0
    level[-1] = 1000.0
    steady = trend(minutes, level)
    assert steady is not None
    assert steady.interval.low < 0 < steady.interval.high


def test_a_trend_needs_values_at_different_times() -> None:
    assert trend(np.arange(4.0), np.arange(1.0, 5.0)) is None
    assert trend(np.ones(9), np.arange(1.0, 10.0)) is None


def test_outliers_are_scored_by_ratio() -> None:
    values = np.append(normal(100, 3, 50, 1), [200.0, 50.0])
    scores = outlier_scores(values)
    assert (np.abs(scores[:50]) < 4).all()
    assert scores[50] == pytest.approx(-scores[51], rel=0.2)
    assert scores[50] > 10
    assert (outlier_scores(np.ones(9)) == 0).all()
