"""Effects, noise and verdicts on made periods with a planted effect, a drift, or none."""

import re
from collections.abc import Sequence

import msgspec
import pytest

from millpond.bench import effects, resampling
from millpond.bench.analysis import Analysis, analyse
from millpond.bench.comparing import compare
from millpond.bench.effects import Effect
from millpond.bench.headlines import headlines, payoff
from millpond.bench.observations import WHOLE, observe_all
from millpond.bench.periods import plan_periods
from millpond.bench.records import Period, Plan, Routed, Sources
from millpond.bench.scenario import Design, Mixed, Moved, Scenario, Sessions
from millpond.bench.tables import run_tables
from millpond.model.errors import ConfigError
from tests.unit.bench_values import noisy, period, periods, sample

pytestmark = pytest.mark.usefixtures("few_resamples")
PLANS = plan_periods(Design(rounds=1, aa_rounds=1), ["off", "millpond"])
SCENARIO = Scenario(name="s", description="d", workload=(Moved(name="g", lengths=(1,), prompts=1),))


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw less often: intervals are rougher, and the tests five times as fast."""
    monkeypatch.setattr(resampling, "RESAMPLES", 300)


def effects_of(made: Sequence[Period]) -> list[Effect]:
    observed = observe_all(made)
    return effects.effects_of(made, observed, effects.noise_of(made, observed, seed=1), seed=1)


def base_ms(i: int) -> float:
    """Prompts differ a hundredfold: only pairing sees an effect of a few percent."""
    return 10.0 * (1 + 10 * i)


def planted(ratio: float):  # noqa: ANN201
    return lambda plan, i: base_ms(i) / (ratio if plan.cache == "millpond" else 1.0)


def ttft(effects: list[Effect], part: str = "moved") -> Effect:
    (found,) = [each for each in effects if (each.part, each.metric) == (part, "ttft_ms")]
    return found


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


def test_tokens_are_counted_by_source() -> None:
    made = periods(PLANS, planted(2.0), num_prompts=3)
    one, two, three = made[5].samples
    one.sources = Sources(
        computed_tokens=10, local_tokens=20, loaded_tokens=70, writers={"a": 30, "b": 40}
    )
    two.cached_tokens = 60
    assert three.sources is None
    (tokens,) = [each for each in analyse(made[5:6]).tokens if each.cache == "millpond"]
    found = (tokens.computed, tokens.local, tokens.own, tokens.other, tokens.found, tokens.unknown)
    assert found == (50, 20, 30, 40, 60, 100)


def test_what_an_engine_found_is_its_own_only_where_there_is_no_other_cache() -> None:
    made = periods(PLANS, planted(2.0), num_prompts=1)
    for each in made:
        each.samples[0].cached_tokens = 60
    by_cache = {each.cache: each for each in analyse(made).tokens}
    assert (by_cache["off"].local, by_cache["off"].found) == (360, 0)
    assert (by_cache["millpond"].local, by_cache["millpond"].found) == (0, 120)


def routed(tokens: Sources | None, *, is_moved: bool = False) -> Routed:
    return Routed(is_moved=is_moved, sources=tokens)


def test_the_routers_word_comes_first_and_is_held_against_the_pools() -> None:
    made = periods(PLANS[4:], planted(2.0), num_prompts=3)
    loaded = Sources(
        computed_tokens=10, local_tokens=20, loaded_tokens=70, writers={"a": 30, "b": 40}
    )
    computed = Sources(computed_tokens=100, local_tokens=0, loaded_tokens=0, writers={})
    for each in made:
        one, two, three = each.samples
        one.sources, one.routed = loaded, routed(loaded, is_moved=True)
        two.sources, two.routed = loaded, routed(computed)
        three.sources, three.routed = loaded, routed(None)
    analysis = analyse(made)
    (tokens,) = [each for each in analysis.tokens if each.cache == "millpond"]
    assert (tokens.computed, tokens.own, tokens.other) == (2 * 120, 2 * 60, 2 * 80)
    assert (tokens.num_moved, tokens.num_routed) == (2, 6)
    told = analysis.told
    assert told.requests == {"router": 8, "pool": 4}
    assert (told.num_both, told.num_different) == (8, 4)
    assert (told.computed_difference, told.loaded_difference) == (4 * 90, 4 * 70)
    (caption,) = [
        str(table.caption) for table in run_tables(analysis) if "came from" in str(table.title)
    ]
    assert "the router's access log (8), the replicas' reports to the pool (4)" in caption
    assert "of 4 of 8 the pool says otherwise than the router: 360 tokens computed" in caption


def test_a_surprise_is_explained_by_the_tokens_and_only_by_them() -> None:
    """Cold requests that gain: once because they find their prefix, once nobody knows why."""
    made = periods(PLANS, planted(2.0), num_prompts=12)
    for each in made:
        is_on = each.plan.cache == "millpond"
        for one in each.samples:
            one.role = "cold"
            loaded = 60 if is_on else 0
            one.sources = Sources(
                computed_tokens=100 - loaded,
                local_tokens=0,
                loaded_tokens=loaded,
                writers={"b": loaded} if loaded else {},
            )
    explained = headlines(SCENARIO, analyse(made))[1]
    assert explained.endswith(
        "Not as expected; 100 % of the tokens computed without, 40 % with; 60 % loaded that other "
        "replicas wrote"
    )
    for each in made:
        for one in each.samples:
            one.sources = Sources(computed_tokens=100, local_tokens=0, loaded_tokens=0, writers={})
    unexplained = headlines(SCENARIO, analyse(made))[1]
    assert unexplained.endswith(
        "the tokens do not explain it: 100 % computed in both, nothing loaded"
    )
    for each in made:
        each.samples[0].sources = None
    assert headlines(SCENARIO, analyse(made))[1].endswith("where the tokens came from was not told")


def test_each_of_several_caches_has_sentences_of_its_own() -> None:
    plans = plan_periods(Design(rounds=1, aa_rounds=1), ["off", "x", "y"])
    gains = {"off": 1.0, "x": 2.0, "y": 4.0}
    made = periods(plans, noisy(lambda plan, i: base_ms(i) / gains[plan.cache], share=0.02, seed=1))
    lines = headlines(SCENARIO, analyse(made))
    assert lines[0].startswith("x against off: moved requests 2.0")
    assert lines[1].startswith("y against off: moved requests 4.0")
    assert lines[2].startswith("x: moved requests, g: TTFT")
    assert lines[3].startswith("y: moved requests, g: TTFT")


# ---------------------------------------------------------------- little and odd


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
    assert [table.title for table in run_tables(analysis)] == [
        "Where prompts came from, as shares of their tokens",
        "All requests, by cache: median / p99",
    ]
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
    assert "noise not known" in headlines(SCENARIO, analysis)[1]
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
                for i in range(8)
            ]
    analysis = analyse(made)
    assert [share for share, _ in payoff(analysis.effects, mix, "millpond")] == [1e-05, 0.5]
    assert "millpond pays from a moved share of 0.001% on" in headlines(scenario, analysis)


def test_sentences_say_first_what_moved_and_cold_requests_and_sessions_did() -> None:
    scenario = Scenario(
        name="s",
        description="d",
        workload=(
            Moved(name="g", lengths=(1,), prompts=1),
            Sessions(
                name="talk",
                placement="fixed",
                initial_tokens=(9,),
                sessions=1,
                turns=2,
                growth_tokens=1,
                output_tokens=1,
            ),
        ),
    )
    made = periods(PLANS, noisy(planted(4.0), share=0.02, seed=1))
    for each in made:
        ttft_ms = 50.0 if each.plan.cache == "millpond" else 100.0
        each.samples += [
            sample(i, 80.0 + i, role="cold", key=f"c{i}", unit=f"c{i}") for i in range(9)
        ]
        each.samples += [
            sample(
                i, ttft_ms + i, group="talk 9", key=f"t{i}", unit=f"talk 9/{i // 2}", role="local"
            )
            for i in range(8)
        ]
    verdicts, moved, cold, session = headlines(scenario, analyse(made))
    assert re.fullmatch(
        r"millpond against off: moved requests [34]\.\d\d times as fast \(faster beyond noise\); "
        r"cold requests 1\.00 times as fast \(within noise\); "
        r"sessions that stay 1\.\d\d times as fast \(faster beyond noise\)",
        verdicts,
    )
    assert moved.startswith("moved requests, g: TTFT")
    assert "4.0" in moved
    assert "faster, beyond noise" in moved
    assert "by A/A rounds" in moved
    assert cold.startswith("cold requests, g: TTFT")
    assert "within noise" in cold
    assert session.startswith("sessions, talk 9: sum of TTFT 207 ms → 107 ms, 1.9")
    assert "; whole session 1.13 s → 1.08 s, 1.0" in session


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        ((0.0, 20.0, 40.0), "millpond pays from a moved share of 50% on"),
        ((20.0, 0.0, 40.0), "millpond pays from a moved share of 100% on"),
        ((20.0, 20.0, 0.0), "millpond: no gain beyond noise at a moved share of 100%"),
    ],
)
def test_the_share_from_which_sharing_pays_is_told(
    gains: tuple[float, float, float], said: str
) -> None:
    shares = (0.0, 0.5, 1.0)
    scenario = Scenario(
        name="s",
        description="d",
        workload=(Mixed(name="mix", moved_shares=shares, tokens=9, prompts=8),),
    )
    made = periods(PLANS, planted(1.0), num_prompts=0)
    for each in made:
        for share, planted_ms in zip(shares, gains, strict=True):
            gain = planted_ms if each.plan.cache == "millpond" else 0.0
            group = f"mix {share:g}"
            each.samples += [
                sample(
                    i, 100.0 - gain + i % 3, group=group, key=f"{group}{i}", unit=f"{group}{i // 2}"
                )
                for i in range(16)
            ]
    assert headlines(scenario, analyse(made)) == [said]


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


def test_runs_without_a_prompt_in_common_are_refused() -> None:
    one = periods(PLANS, planted(2.0))
    other = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond"])[1:2]
    with pytest.raises(ConfigError, match="no prompt in common"):
        compare(one, periods(other, planted(2.0)))
