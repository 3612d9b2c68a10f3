"""Little and odd: failed periods, a prompt or two, times of zero, names that are none."""

import msgspec
import pytest

from millpond.bench.analysis import Analysis, analyse
from millpond.bench.headlines import headlines, payoff
from millpond.bench.observations import WHOLE
from millpond.bench.scenario import Mixed, Scenario
from millpond.bench.tables import run_tables
from tests.unit.bench_values import PLANS, SCENARIO, period, periods, planted, sample, ttft

pytestmark = pytest.mark.usefixtures("few_resamples")


def no_nan(analysis: Analysis) -> dict[str, object]:
    """Return what is written; a figure that is no number would be null where none may be."""
    text = msgspec.json.encode(analysis)
    assert msgspec.json.decode(text, type=Analysis) == analysis
    return msgspec.json.decode(text)


def test_a_run_in_which_everything_failed_says_so() -> None:
    made = [period(plan, [sample(i, None) for i in range(3)]) for plan in PLANS]
    analysis = analyse(made)
    assert headlines(SCENARIO, analysis) == [
        "nothing to compare yet: no prompt was answered with and without the cache",
        "24 of 24 requests FAILED and are in no figure",
    ]
    titles = [table.title for table in run_tables(analysis)]
    assert titles == ["All requests, by cache: median / p99"]
    no_nan(analysis)


def test_periods_of_which_one_cache_failed_are_compared_with_nothing() -> None:
    made = periods(PLANS, planted(2.0), num_prompts=3)
    for each in made:
        if each.plan.cache == "millpond":
            each.samples = [sample(i, None) for i in range(3)]
    analysis = analyse(made)
    assert analysis.effects == []
    assert {each.cache for each in analysis.summaries} == {"off"}
    assert headlines(SCENARIO, analysis)[0].startswith("A/A, g: TTFT")
    no_nan(analysis)


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_prompt_or_two_have_an_effect_without_a_verdict_beyond_their_periods(
    num_prompts: int,
) -> None:
    analysis = analyse(periods(PLANS[4:6], planted(2.0), num_prompts=num_prompts))
    effect = ttft(analysis.effects)
    assert effect.ratio.value == pytest.approx(2.0)
    assert effect.ratio.over_periods is None, "one pair"
    assert (effect.ratio.over_requests is None) == (num_prompts == 1)
    assert effect.noise_source == "none"
    assert effect.verdict == "too few prompts"
    assert "no verdict below 6 prompts" in headlines(SCENARIO, analysis)[1]
    no_nan(analysis)


def test_times_of_zero_have_figures() -> None:
    made = periods(PLANS, lambda plan, i: 0.0 if plan.cache == "millpond" or i % 2 else 5.0)
    for each in made:
        each.duration_s = 0.0
        for one in each.samples:
            one.itl_ms = [0.0, 0.0]
    analysis = analyse(made)
    assert ttft(analysis.effects).ratio.value > 1
    (itl,) = [each for each in analysis.effects if each.metric == "itl_ms"]
    assert itl.ratio.value == 1.0
    assert all("request_throughput" not in each for each in analysis.metrics.values())
    assert run_tables(analysis)
    no_nan(analysis)


def test_a_session_whose_turns_all_failed_but_one_is_none() -> None:
    made = periods(PLANS, planted(2.0), num_prompts=4)
    for each in made:
        for one in each.samples:
            one.unit = "s"
        each.samples[1:] = [sample(i, None, unit="s") for i in range(1, 4)]
    assert not [each for each in analyse(made).effects if each.part == WHOLE]


@pytest.mark.parametrize("group", ["mix", "mix nan", "mix x", "mix 0.50", "mixed 0.5"])
def test_a_group_that_is_none_of_a_mix_is_no_share_of_it(group: str) -> None:
    mix = Mixed(name="mix", moved_shares=(0.5, 1e-05), tokens=9, prompts=8)
    scenario = Scenario(name="s", description="d", workload=(mix,))
    made = periods(PLANS, planted(2.0), num_prompts=0)
    for each in made:
        ttft_ms = 50.0 if each.plan.cache == "millpond" else 100.0
        for name in ("mix 0.5", "mix 1e-05", group):
            each.samples += [
                sample(i, ttft_ms + i, group=name, key=f"{name}{i}", unit=f"{name}{i // 2}")
                for i in range(12)
            ]
    analysis = analyse(made)
    assert [share for share, _ in payoff(analysis.effects, mix, "millpond")] == [1e-05, 0.5]
    assert "millpond pays from a moved share of 0.001% on" in headlines(scenario, analysis)
