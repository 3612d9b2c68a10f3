"""Effects, noise and verdicts on made periods with a planted effect, a drift, or none."""

from collections.abc import Callable, Sequence

import pytest

from millpond.bench import effects
from millpond.bench.analysis import analyse
from millpond.bench.comparing import compare
from millpond.bench.effects import Effect
from millpond.bench.headlines import headlines
from millpond.bench.observations import WHOLE, observe_all
from millpond.bench.periods import plan_periods
from millpond.bench.records import Period, Plan
from millpond.bench.scenario import Design
from millpond.model.errors import ConfigError
from tests.unit.bench_values import (
    PLANS,
    SCENARIO,
    base_ms,
    noisy,
    period,
    periods,
    planted,
    sample,
    ttft,
)

pytestmark = pytest.mark.usefixtures("few_resamples")


def effects_of(made: Sequence[Period]) -> list[Effect]:
    observed = observe_all(made)
    return effects.effects_of(made, observed, effects.noise_of(made, observed, seed=1), seed=1)


def test_rounds_are_off_on_on_off_after_those_of_a_a() -> None:
    assert [plan.cache for plan in PLANS] == ["off"] * 4 + ["off", "millpond", "millpond", "off"]
    assert [plan.round for plan in PLANS] == [0] * 4 + [1] * 4
    assert [plan.pair for plan in PLANS[4:]] == [0, 0, 1, 1]
    assert [plan.number for plan in PLANS] == list(range(8))


@pytest.mark.parametrize("others", [[], ["x"], ["x", "y"], ["x", "y", "z"]])
def test_rounds_read_the_same_both_ways_however_many_caches(others: list[str]) -> None:
    plans = plan_periods(Design(rounds=2, aa_rounds=1), ["off", *others])
    rounds = [[plan for plan in plans if plan.round == number] for number in range(3)]
    half = ["off", *others]
    assert [plan.cache for plan in rounds[0]] == ["off"] * 4
    for members in rounds[1:]:
        caches = [plan.cache for plan in members]
        assert caches == ([*half, *reversed(half)] if others else [])
        assert [caches[plan.mirror] for plan in members] == caches
        assert [plan.pair for plan in members] == [0] * len(half[: len(caches)]) + [1] * len(
            half[: len(caches)]
        )
    assert [plan.number for plan in plans] == list(range(len(plans)))


FOUR = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond", "lmcache", "vllm-fs"])
SPEEDS = {"off": 1.0, "millpond": 4.0, "lmcache": 2.0, "vllm-fs": 0.8}


def test_each_of_four_caches_is_compared_with_the_periods_that_are_off() -> None:
    def times(plan: Plan, i: int) -> float:
        return base_ms(i) / SPEEDS[plan.cache]

    effects = [
        each
        for each in effects_of(periods(FOUR, noisy(times, share=0.02, seed=1)))
        if each.metric == "ttft_ms"
    ]
    assert [(each.base, each.other) for each in effects] == [
        ("off", other) for other in ("millpond", "lmcache", "vllm-fs")
    ]
    for effect in effects:
        assert effect.ratio.value == pytest.approx(SPEEDS[effect.other], rel=0.02)
        assert (effect.num_prompts, len(effect.pairs)) == (60, 2)
        assert effect.noise_source == "OFF periods"
    assert [each.verdict for each in effects] == ["faster", "faster", "slower"]


def test_a_steady_drift_is_no_effect_of_any_of_four_caches() -> None:
    """By a tenth of the first period in each: the last one takes 1.7 times as long."""

    def drifting(plan: Plan, i: int) -> float:
        return base_ms(i) * (1 + 0.1 * plan.position)

    made = periods(FOUR, noisy(drifting, share=0.01, seed=1))
    for effect in effects_of(made):
        if effect.metric == "ttft_ms":
            first, second = (pair.ratio.value for pair in effect.pairs)
            assert first < 0.95, "each errs in its first pair"
            assert second > 1.05, "and the other way in its second"
            assert effect.verdict == "within noise"
    shifts = {shift.cache: shift.ratio.value for shift in analyse(made).shifts}
    assert shifts.keys() == SPEEDS.keys()
    assert shifts["off"] == pytest.approx(1.7, abs=0.02)
    assert shifts["vllm-fs"] == pytest.approx(1.4 / 1.3, abs=0.02)


@pytest.mark.parametrize("ratio", [1.1, 2.0, 50.0])
def test_a_planted_effect_is_recovered_within_its_interval(ratio: float) -> None:
    effect = ttft(effects_of(periods(PLANS, noisy(planted(ratio), share=0.05, seed=1))))
    interval = effect.ratio.interval
    assert interval is not None
    assert interval.low <= ratio <= interval.high
    assert effect.verdict == "faster"
    assert (effect.noise_source, effect.num_prompts) == ("A/A rounds", 60)
    assert len(effect.pairs) == 2


def test_a_loss_is_called_one() -> None:
    effect = ttft(effects_of(periods(PLANS, noisy(planted(0.8), share=0.05, seed=1))))
    assert effect.verdict == "slower"
    assert effect.gain_share == pytest.approx(-0.25, abs=0.05)


def test_where_nothing_differs_nothing_is_found() -> None:
    found = 0
    for seed in range(40):
        made = periods(PLANS, noisy(planted(1.0), share=0.1, seed=seed), num_prompts=15)
        effect = ttft(effects_of(made))
        found += effect.verdict != "within noise"
        assert effect.noise is not None
    assert found <= 1


def test_a_steady_drift_is_no_effect_and_shows_in_the_pairs() -> None:
    def drifting(plan: Plan, i: int) -> float:
        return base_ms(i) * (1 + 0.1 * plan.position)

    made = periods(PLANS, noisy(drifting, share=0.01, seed=1))
    effect = ttft(effects_of(made))
    first, second = (pair.ratio.value for pair in effect.pairs)
    assert first < 0.95
    assert second > 1.05
    assert effect.verdict == "within noise"
    shifts = {shift.cache: shift.ratio.value for shift in analyse(made).shifts if shift.later > 4}
    assert shifts["off"] == pytest.approx(1.3, abs=0.02)
    assert shifts["millpond"] == pytest.approx(1.2 / 1.1, abs=0.02)


def test_an_effect_within_the_noise_floor_is_none() -> None:
    """The machine is restless: A/A pairs differ by more than the cache does."""

    def restless(plan: Plan, i: int) -> float:
        factor = 1.3 if plan.round == 0 and plan.position == 1 else 1.0
        return base_ms(i) * factor / (1.1 if plan.cache == "millpond" else 1.0)

    effect = ttft(effects_of(periods(PLANS, noisy(restless, share=0.01, seed=1))))
    assert effect.ratio.interval is not None
    assert effect.ratio.interval.low > 1.05
    assert effect.verdict == "within noise"


def test_without_a_a_the_off_periods_are_the_noise_floor() -> None:
    plans = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond"])
    effect = ttft(effects_of(periods(plans, noisy(planted(2.0), share=0.05, seed=1))))
    assert effect.noise_source == "OFF periods"
    assert effect.noise is not None
    assert effect.noise.low < 1 < effect.noise.high


def test_prompts_are_paired_and_not_the_medians() -> None:
    plans = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond"])
    made = periods(plans, planted(1.2))
    made[1].samples.reverse()
    made[2].samples = made[2].samples[3:]
    effect = ttft(effects_of(made))
    assert effect.ratio.value == pytest.approx(1.2)
    assert [pair.num_prompts for pair in effect.pairs] == [30, 27]


def test_failed_requests_are_counted_and_in_no_figure() -> None:
    made = periods(PLANS, planted(2.0))
    made[5].samples[0] = sample(0, None)
    analysis = analyse(made)
    assert analysis.num_errors == {"millpond": 1}
    assert ttft(analysis.effects).num_prompts == 59
    assert any("1 of 240 requests FAILED" in line for line in headlines(SCENARIO, analysis))


def test_outliers_are_named_and_stay_in() -> None:
    made = periods(PLANS, noisy(lambda _plan, _i: 100.0, share=0.02, seed=1))
    made[6].samples[7].ttft_ms = 900.0
    analysis = analyse(made)
    worst = max(analysis.outliers, key=lambda outlier: outlier.score)
    assert (worst.key, worst.period, worst.cache, worst.value_ms) == ("g/7", 6, "millpond", 900.0)
    (on,) = [s for s in analysis.summaries if (s.cache, s.metric) == ("millpond", "ttft_ms")]
    assert on.num_values == 60
    assert on.quantiles["p99"].value > 300


def test_a_session_is_the_sum_of_its_turns() -> None:
    plans = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond"])

    def turns(plan: Plan) -> list[object]:
        ttft_ms = 50.0 if plan.cache == "millpond" else 100.0
        return [
            sample(3 * i + turn, ttft_ms, unit=f"s/{i}", turn=turn)
            for i in range(4)
            for turn in range(3)
        ]

    made = [period(plan, turns(plan)) for plan in plans]  # pyright: ignore[reportArgumentType]
    made[3].samples[0].error, made[3].samples[0].ttft_ms = "lost", None
    by_metric = {e.metric: e for e in effects_of(made) if e.part == WHOLE}
    total, span = by_metric["total_ttft_ms"], by_metric["span_ms"]
    assert (total.base_median_ms, total.other_median_ms) == (300.0, 150.0)
    assert (span.base_median_ms, span.other_median_ms) == (2130.0, 2080.0)
    assert total.num_prompts == 7, "a session with a lost turn is no session"


# ---------------------------------------------------------------- two runs


def test_two_runs_are_compared_prompt_by_prompt() -> None:
    before = periods(PLANS, noisy(planted(2.0), share=0.02, seed=1))
    after = periods(
        PLANS,
        noisy(
            lambda plan, i: planted(2.0)(plan, i) / (1.5 if plan.cache == "millpond" else 1.0),
            share=0.02,
            seed=2,
        ),
    )
    found = {each.cache: each for each in compare(before, after) if each.metric == "ttft_ms"}
    assert found["millpond"].ratio.value == pytest.approx(1.5, rel=0.03)
    assert found["millpond"].verdict == "faster"
    assert found["off"].verdict == "within noise"


def test_a_run_with_more_caches_is_compared_with_one_that_has_fewer() -> None:
    """By cache and half of the round, whatever lies between; what only one has is left out."""

    def times(speeds: dict[str, float]) -> Callable[[Plan, int], float]:
        return noisy(lambda plan, i: base_ms(i) / speeds[plan.cache], share=0.02, seed=1)

    before = periods(PLANS, times({"off": 1.0, "millpond": 2.0}))
    plans = plan_periods(Design(rounds=1, aa_rounds=1), ["off", "lmcache", "millpond"])
    after = periods(plans, times({"off": 1.0, "lmcache": 1.5, "millpond": 3.0}))
    found = {each.cache: each for each in compare(before, after) if each.metric == "ttft_ms"}
    assert found.keys() == {"off", "millpond"}
    assert found["millpond"].ratio.value == pytest.approx(1.5, rel=0.03)
    assert found["millpond"].num_prompts == 60
    assert found["off"].num_prompts == 180
    assert found["off"].verdict == "within noise"


def test_runs_without_a_prompt_in_common_are_refused() -> None:
    one = periods(PLANS, planted(2.0))
    other = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond"])[1:2]
    with pytest.raises(ConfigError, match="no prompt in common"):
        compare(one, periods(other, planted(2.0)))
