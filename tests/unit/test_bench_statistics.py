"""Figures on samples whose truth is known: quantiles, intervals, drift, outliers."""

import numpy as np
import pytest
from scipy import stats

from millpond.bench.resampling import Clusters, Values, one_each, resampled_quantiles
from millpond.bench.statistics import (
    QUANTILES,
    Estimate,
    Interval,
    estimate_median,
    estimate_medians,
    estimate_quantiles,
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
    measures = {"it": [one_each(each) for each in halves]}
    found = estimate_quantiles(measures, QUANTILES, seed=1)["it"]
    values = {name: estimate.value for name, estimate in found.items()}
    assert values == pytest.approx({"median": 50.0, "p90": 90.0, "p99": 99.0})


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    inside = 0
    runs = {seed: [normal(10, 1, 40, seed), normal(10, 1, 40, 1000 + seed)] for seed in range(60)}
    for estimate in estimate_medians(runs, seed=1).values():
        over_requests, _ = known(estimate)
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


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.99])
def test_requests_are_drawn_as_scipy_draws_them(quantile: float) -> None:
    values = normal(10, 1, 40, 1)

    def statistic(drawn: Values, axis: int) -> Values:
        return np.quantile(drawn, quantile, axis=axis)

    theirs = stats.bootstrap(
        (values,),
        statistic,
        n_resamples=2000,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    (ours,) = resampled_quantiles([[one_each(values)]], [quantile], by_period=False, seed=1)
    assert np.percentile(ours, (2.5, 97.5)) == pytest.approx([theirs.low, theirs.high], rel=0.01)


def test_periods_are_drawn_in_two_stages() -> None:
    """Against the same by lists of values, without any of its counting."""
    periods = [normal(10, 1, 9, 1), normal(13, 2, 20, 2), normal(8, 1, 5, 3)]
    generator = np.random.default_rng(7)
    medians: list[float] = []
    for _ in range(4000):
        chosen = [periods[i] for i in generator.integers(3, size=3)]
        medians.append(
            float(np.median(np.concatenate([generator.choice(each, len(each)) for each in chosen])))
        )
    measure = [one_each(each) for each in periods]
    (ours,) = resampled_quantiles([measure], [0.5], by_period=True, seed=1)
    marks = (2.5, 25, 50, 75, 97.5)
    assert np.percentile(ours, marks) == pytest.approx(np.percentile(medians, marks), abs=0.25)


def test_a_request_is_drawn_with_all_of_its_values() -> None:
    """Ten requests of a hundred equal gaps each are ten values and not a thousand."""
    levels = normal(10, 1, 10, 1)
    gaps = Clusters(np.repeat(levels, 100), np.full(10, 100))
    found = estimate_quantiles({"gaps": [gaps], "levels": [one_each(levels)]}, QUANTILES, seed=1)
    alone = estimate_quantiles({"each": [one_each(gaps.values)]}, QUANTILES, seed=1)["each"]
    together, of_levels = found["gaps"]["median"], found["levels"]["median"]
    assert together.over_requests is not None
    assert of_levels.over_requests is not None
    assert alone["median"].over_requests is not None
    assert width(together.over_requests) > 5 * width(alone["median"].over_requests)
    assert width(together.over_requests) == pytest.approx(width(of_levels.over_requests), rel=0.3)


def test_what_is_estimated_together_is_as_if_it_were_alone() -> None:
    one, two = [normal(10, 1, 8, 1), normal(11, 1, 8, 2)], [normal(5, 1, 8, 3), normal(6, 1, 8, 4)]
    other = [normal(10, 1, 9, 1)]
    together = estimate_medians({"one": one, "two": two, "other": other}, seed=1)
    assert together == {
        name: estimate_median(values, seed=1)
        for name, values in (("one", one), ("two", two), ("other", other))
    }


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
    nearly_at_once = np.array([0.0] * 8 + [1.0])
    assert trend(nearly_at_once, np.ones(9)) is None, "no interval, and none that is no number"


def test_a_drift_of_very_many_values_is_found() -> None:
    minutes = np.random.default_rng(1).uniform(0, 10, 30_000)
    found = trend(minutes, normal(100, 5, 30_000, 1) + minutes)
    assert found is not None
    assert found.share_per_minute == pytest.approx(1 / 105, rel=0.05)
    assert found.interval.low < 1 / 105 < found.interval.high


def test_outliers_are_scored_by_ratio() -> None:
    values = np.append(normal(100, 3, 50, 1), [200.0, 50.0])
    scores = outlier_scores(values)
    assert (np.abs(scores[:50]) < 4).all()
    assert scores[50] == pytest.approx(-scores[51], rel=0.2)
    assert scores[50] > 10
    assert (outlier_scores(np.ones(9)) == 0).all()
