"""Sentences, tables and whose word tokens are, on made periods."""

import re

import pytest

from millpond.bench.analysis import analyse
from millpond.bench.headlines import headlines
from millpond.bench.periods import plan_periods
from millpond.bench.records import Routed, Sources
from millpond.bench.scenario import Design, Mixed, Moved, Scenario, Sessions
from millpond.bench.tables import run_tables
from tests.unit.bench_values import (
    PLANS,
    SCENARIO,
    base_ms,
    noisy,
    periods,
    planted,
    sample,
)

pytestmark = pytest.mark.usefixtures("few_resamples")


def test_times_between_tokens_have_intervals_and_effects() -> None:
    """Of each request all are in the quantiles, and the median stands for it in its pair."""
    made = periods(PLANS, planted(1.0), num_prompts=20)
    for each in made:
        gain = 2.0 if each.plan.cache == "millpond" else 1.0
        for number, one in enumerate(each.samples):
            one.itl_ms = [(10.0 + number) / gain, (11.0 + number) / gain, 500.0]
    analysis = analyse(made)
    (itl,) = [each for each in analysis.effects if each.metric == "itl_ms"]
    assert itl.ratio.value == pytest.approx(2.0)
    assert itl.verdict == "faster"
    (on,) = [s for s in analysis.summaries if (s.cache, s.metric) == ("millpond", "itl_ms")]
    assert (on.num_requests, on.num_values) == (40, 120)
    assert on.quantiles["p90"].value == 500.0
    median = on.quantiles["median"]
    assert median.over_requests is not None
    assert median.over_periods is not None
    assert median.over_requests.low < median.value < median.over_requests.high
    shown = {str(table.title): list(table.columns[0].cells) for table in run_tables(analysis)}
    rows = ["g moved, TPOT", "g moved, E2EL", "g moved, ITL"]
    assert shown["After the first token: time without / time with"] == rows
    assert shown["After the first token: times"] == [row for row in rows for _ in range(2)]


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


def test_a_failed_request_takes_away_no_explanation() -> None:
    made = periods(PLANS, planted(2.0), num_prompts=12)
    for each in made:
        for one in each.samples:
            one.cached_tokens = 60 if each.plan.cache == "millpond" else 0
    made[5].samples[0] = sample(0, None)
    analysis = analyse(made)
    assert [each.unknown for each in analysis.tokens] == [0, 0]
    assert "100 % of the tokens computed without, 40 % with" in headlines(SCENARIO, analysis)[1]


def test_beyond_noise_is_said_only_where_noise_is_known() -> None:
    """As after Ctrl-C behind one pair: no A/A round, and no second OFF period."""
    plans = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond"])[:2]
    verdicts, moved = headlines(SCENARIO, analyse(periods(plans, planted(10.0), num_prompts=12)))
    assert verdicts == "millpond against off: moved requests 10.00 times as fast (faster)"
    assert "faster, noise not known" in moved


@pytest.mark.parametrize(("num_prompts", "is_told"), [(5, False), (6, True)])
def test_a_verdict_needs_six_prompts(num_prompts: int, *, is_told: bool) -> None:
    """A prompt that is asked in both pairs is one: of fewer, 95 % can't be known."""
    made = periods(PLANS, noisy(planted(2.0), share=0.02, seed=1), num_prompts=num_prompts)
    verdicts, moved = headlines(SCENARIO, analyse(made))
    assert ("faster beyond noise" in verdicts) == is_told
    assert ("too few prompts" in verdicts) != is_told
    assert ("no verdict below 6 prompts" in moved) != is_told


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
            for i in range(12)
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
    assert session.startswith("sessions, talk 9: sum of TTFT 211 ms → 111 ms, 1.9")
    assert "; whole session 1.14 s → 1.09 s, 1.0" in session


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
