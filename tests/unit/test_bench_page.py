"""A run's page: what was planted is read back from its plots, by their own axes."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from millpond.bench import resampling
from millpond.bench.analysis import Analysis, Outlier, analyse
from millpond.bench.headlines import headlines
from millpond.bench.periods import plan_periods
from millpond.bench.records import Period, Plan, Record, Sample
from millpond.bench.report import plots, report_html
from millpond.bench.report.charts import Axis, linear_axis, log_axis
from millpond.bench.scenario import Design, Mixed, Moved, Scenario, Sessions, Workload
from millpond.cli import bench, run
from millpond.cli.context import Context
from millpond.cli.exits import Exit
from tests.unit.bench_values import noisy, period, periods, sample

PLANS = plan_periods(Design(rounds=1, aa_rounds=1), ["off", "millpond"])
HOSTILE = "<script>alert(1)</script><img src=x onerror='a'>&amp;\"]]>"
OVER_TIME = "Time to first token, by period"
DISTRIBUTION = "Time to first token, distribution"
TURNS = "Sessions, turn by turn"
PAYOFF = "Does sharing pay?"
UNITS = {"ms": 1.0, "s": 1000.0, "%": 1.0}


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals have tests of their own; here they need to be somewhere only."""
    monkeypatch.setattr(resampling, "RESAMPLES", 100)


def scenario(*workloads: Workload) -> Scenario:
    chosen = workloads or (Moved(name="g", lengths=(100,), prompts=1),)
    return Scenario(name="made", description="for a test", workload=chosen)


def page_of(
    made: Sequence[Period], *workloads: Workload, analysis: Analysis | None = None, **fields: object
) -> ET.Element:
    """Return the page as a tree: it is well-formed XML, or this fails."""
    given = {"options": {}, "facts": {}, "scenario": scenario(*workloads)} | fields
    record = Record(periods=list(made), **given)  # pyright: ignore[reportArgumentType]
    return ET.fromstring(report_html(record, analysis or analyse(made)))


def text_of(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def section(page: ET.Element, title: str) -> ET.Element | None:
    found = [each for each in page.iter("section") if each.findtext("h2") == title]
    return found[0] if found else None


def figures(page: ET.Element, title: str) -> dict[str, "Shown"]:
    within = section(page, title)
    assert within is not None, f"no section {title}"
    return {str(each.findtext("figcaption/h3")): Shown(each) for each in within.iter("figure")}


class Shown:
    """One figure, read as people read it: by the labels of its axes."""

    def __init__(self, figure: ET.Element) -> None:
        self.caption = text_of(figure.find("figcaption"))  # pyright: ignore[reportArgumentType]
        (self.plot,) = [each for each in figure.iter("svg") if each.get("class") == "plot"]
        self.texts = list(self.plot.iter("text"))

    def paths(self, css: str) -> list[list[tuple[float, float]]]:
        """Return the points of each path of a class, in thousandths of width and height."""
        wanted = set(css.split())
        found = [
            each for each in self.plot.iter("path") if wanted <= set(each.attrib["class"].split())
        ]
        return [
            [
                (float(x) / 2, float(y))
                for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", each.attrib["d"])
            ]
            for each in found
        ]

    def scale(self, css: str, *, is_log: bool) -> Callable[[float], float]:
        """Return what turns thousandths into a value, from two labels of an axis."""
        labels = [each for each in self.texts if each.get("class") == css]
        ticks: list[tuple[float, float]] = []
        for each in labels:
            match = re.fullmatch(r"([+-]?[\d.]+)(?: (ms|s|%))?", str(each.text))
            if match is not None:
                place = each.attrib["y" if css == "left" else "x"]
                value = float(match[1]) * UNITS[match[2] or "ms"]
                ticks.append(
                    (10 * float(place.removesuffix("%")), math.log(value) if is_log else value)
                )
        (a, low), (b, high) = min(ticks), max(ticks)

        def value_at(place: float) -> float:
            value = low + (high - low) * (place - a) / (b - a)
            return math.exp(value) if is_log else value

        return value_at

    def circles(self, css: str) -> list[tuple[float, float]]:
        return [
            tuple(10 * float(each.attrib[name].removesuffix("%")) for name in ("cx", "cy"))  # pyright: ignore[reportReturnType]
            for each in self.plot.iter("circle")
            if css in each.attrib["class"].split()
        ]

    def words(self, css: str) -> list[str]:
        return [str(each.text) for each in self.texts if each.get("class") == css]


def half_with_the_cache(plan: Plan, number: int) -> float:
    return (50.0 if plan.cache == "millpond" else 100.0) * (1 + number / 100)


# ---------------------------------------------------------------- over time


def test_every_period_has_its_median_and_its_dots_where_they_belong() -> None:
    made = periods(PLANS, half_with_the_cache, num_prompts=11)
    (shown,) = figures(page_of(made), OVER_TIME).values()
    ms = shown.scale("left", is_log=True)
    off, on = shown.paths("median c0"), shown.paths("median c1")
    assert [ms(line[0][1]) for line in off] == pytest.approx([105.0] * 6, rel=0.01)
    assert [ms(line[0][1]) for line in on] == pytest.approx([52.5] * 2, rel=0.01)
    begins = sorted(line[0][0] for line in off + on)
    assert [line[0][0] for line in on] == begins[5:7], "ON are the inner two of the second round"
    (dots,) = shown.paths("dots c1")
    assert len(dots) == 22
    assert {round(ms(y)) for _, y in dots} == {round(50 * (1 + i / 100)) for i in range(11)}
    for j, line in enumerate(on):
        begin, end = line[0][0], line[1][0]
        # One is sent each second, and a period takes a minute.
        seconds = [60 * (x - begin) / (end - begin) for x, _ in dots[11 * j : 11 * (j + 1)]]
        assert seconds == pytest.approx(range(11), abs=0.5)
    assert shown.words("below") == ["0", "1", "2", "3", "4", "5", "6", "7", "A/A", "millpond"]


def test_outliers_are_open_circles_at_their_own_height() -> None:
    def times(plan: Plan, number: int) -> float:
        return 900.0 if (plan.number, number) == (4, 7) else half_with_the_cache(plan, number)

    made = periods(PLANS, times, num_prompts=15)
    (shown,) = figures(page_of(made), OVER_TIME).values()
    (ring,) = shown.circles("ring")
    assert shown.scale("left", is_log=True)(ring[1]) == pytest.approx(900, rel=0.01)
    assert "outliers: 1" in shown.caption
    num_dots = sum(len(path) for css in ("c0", "c1") for path in shown.paths(f"dots {css}"))
    assert num_dots + 1 == 8 * 15, "every request is there once"


def test_failed_requests_are_crosses_and_in_no_figure() -> None:
    made = periods(PLANS, half_with_the_cache, num_prompts=11)
    made[5].samples[3] = sample(3, None)
    made[5].samples[4] = sample(4, 1e6, error="broken off")
    page = page_of(made)
    (shown,) = figures(page, OVER_TIME).values()
    assert len(shown.words("cross")) == 2
    assert "failed: 2" in shown.caption
    assert sum(len(path) for path in shown.paths("dots c1")) == 20
    bad = [text_of(each) for each in page.iter("li") if each.get("class") == "bad"]
    assert bad == ["2 of 88 requests FAILED and are in no figure"]


def test_an_interrupted_period_is_marked_and_keeps_the_scale_of_its_cache() -> None:
    made = periods(PLANS, half_with_the_cache, num_prompts=20)[:7]
    made[-1].samples = made[-1].samples[:5]
    made[-1].is_complete, made[-1].duration_s = False, 5.0
    page = page_of(made)
    (shown,) = figures(page, OVER_TIME).values()
    assert "6*" in shown.words("below")
    ends = [line[1][0] for line in shown.paths("median c1")]
    (dots,) = shown.paths("dots c1")
    before, last = [x for x, _ in dots if x <= ends[0]], [x for x, _ in dots if x > ends[0]]
    assert len(last) == 5
    assert last[1] - last[0] == pytest.approx(before[1] - before[0], abs=1.0)
    assert "interrupted" in text_of(page)


def test_many_rounds_have_no_more_labels_than_fit_a_phone() -> None:
    plans = plan_periods(Design(rounds=20, aa_rounds=3), ["off", "millpond"])
    made = periods(plans, half_with_the_cache, num_prompts=1)
    (shown,) = figures(page_of(made, analysis=analyse([])), OVER_TIME).values()
    assert shown.words("below") == [
        "0…",
        "A/A",
        "24…",
        "millpond",
        "48…",
        "millpond",
        "72…",
        "millpond",
    ]
    assert len(shown.paths("area c1")) == 40, "every period has its place all the same"


# ---------------------------------------------------------------- the other plots


def test_the_distribution_shows_half_of_the_requests_at_the_median() -> None:
    made = periods(PLANS, half_with_the_cache, num_prompts=21)
    (shown,) = figures(page_of(made), DISTRIBUTION).values()
    ms = shown.scale("below", is_log=True)
    for css, median_ms in (("c0", 110.0), ("c1", 55.0)):
        (curve,) = shown.paths(f"line {css}")
        assert [y for _, y in curve] == sorted((y for _, y in curve), reverse=True), "never falls"
        x = next(x for x, y in curve if y <= 500)
        assert ms(x) == pytest.approx(median_ms, rel=0.02)
    assert shown.caption == "g, moved requestsoff median 110 msmillpond median 55.0 ms"


def test_the_distribution_rises_at_each_value_by_its_share_and_leaves_a_a_rounds_out() -> None:
    def times(plan: Plan, number: int) -> float:
        return 3000.0 if plan.is_aa else 100.0 * (1 + plan.position + number)

    made = periods(PLANS, times, num_prompts=1)
    (shown,) = figures(page_of(made), DISTRIBUTION).values()
    ms = shown.scale("below", is_log=True)
    for css, first, last in (("c0", 100, 400), ("c1", 200, 300)):
        (curve,) = shown.paths(f"line {css}")
        assert [ms(x) for x, _ in curve[1:5]] == pytest.approx([first] * 2 + [last] * 2, rel=0.01)
        assert [y for _, y in curve] == [1000, 1000, 500, 500, 0, 0]


def session_periods(ttft_ms: Callable[[Plan, int, int], float]) -> list[Period]:
    made: list[Period] = []
    for plan in PLANS:
        turns = [
            sample(
                6 * session + turn,
                ttft_ms(plan, session, turn),
                group="talk 2000",
                key=f"talk 2000/{session}/{turn}",
                unit=f"talk 2000/{session}",
                role="moved" if turn else "cold",
                turn=turn,
            )
            for session in range(5)
            for turn in range(4)
        ]
        made.append(period(plan, turns))
    return made


TALK = Sessions(
    name="talk",
    placement="alternate",
    initial_tokens=(2000,),
    sessions=5,
    turns=4,
    growth_tokens=1,
    output_tokens=1,
)


def test_sessions_show_the_median_of_each_turn_within_its_interval() -> None:
    def times(plan: Plan, session: int, turn: int) -> float:
        base = 400.0 if turn == 0 else 40.0 * turn if plan.cache == "millpond" else 500.0
        return base * (0.9 + 0.05 * session)

    shown = figures(page_of(session_periods(times), TALK), TURNS)["talk 2000"]
    ms = shown.scale("left", is_log=True)
    turn = shown.scale("below", is_log=False)
    for css, medians in (("c0", [400, 500, 500, 500]), ("c1", [400, 40, 80, 120])):
        (knots,) = shown.paths(f"knots {css}")
        assert [ms(y) for _, y in knots] == pytest.approx(medians, rel=0.01)
        assert [turn(x) for x, _ in knots] == pytest.approx([1, 2, 3, 4], abs=0.1)
        (span,) = [
            each for each in shown.plot.iter("path") if each.get("class") == f"line span {css}"
        ]
        bars = re.findall(r"M\d+ (\d+)V(\d+)", span.attrib["d"])
        assert len(bars) == 4
        for (_, y), (low, high) in zip(knots, bars, strict=True):
            assert float(high) < y < float(low)


MIX = Mixed(name="mix", moved_shares=(0.0, 0.5, 1.0), tokens=100, prompts=4)


def mixed_periods(gain: float) -> list[Period]:
    """Return periods in which the cache takes ``gain`` times the moved share off."""

    def both(plan: Plan, share: float, number: int) -> list[Sample]:
        saved = gain * share if plan.cache == "millpond" else 0.0
        wobble = 1 + 0.02 * ((number + plan.position) % 3 - 1)
        group = f"mix {share:g}"
        return [
            sample(
                number,
                100.0 * (1 - saved) * wobble,
                group=group,
                key=f"{group}/{number}/{turn}",
                unit=f"{group}/{number}",
                role="moved" if turn else "cold",
                turn=turn,
            )
            for turn in range(2)
        ]

    return [
        period(
            plan, [s for share in MIX.moved_shares for i in range(9) for s in both(plan, share, i)]
        )
        for plan in PLANS
    ]


def test_the_payoff_shows_what_is_saved_above_zero_and_noise() -> None:
    page = page_of(mixed_periods(0.4), MIX)
    shown = figures(page, PAYOFF)["mix"]
    percent = shown.scale("left", is_log=False)
    share = shown.scale("below", is_log=False)
    (knots,) = shown.paths("knots c1")
    assert [share(x) for x, _ in knots] == pytest.approx([0, 50, 100], abs=0.5)
    assert [percent(y) for _, y in knots] == pytest.approx([0, 20, 40], abs=2)
    (zero,) = shown.paths("line zero")
    assert [percent(y) for _, y in zero] == pytest.approx([0, 0], abs=0.2)
    (noise,) = shown.paths("area noise")
    heights = [percent(y) for _, y in noise]
    assert max(heights) == pytest.approx(4, abs=2.5)
    assert min(heights) == pytest.approx(-4, abs=2.5)
    assert "noise by A/A rounds" in shown.caption
    assert set(figures(page, OVER_TIME)) == {"mix, moved requests", "mix, cold requests"}


def test_a_loss_lies_below_zero() -> None:
    shown = figures(page_of(mixed_periods(-0.5), MIX), PAYOFF)["mix"]
    (knots,) = shown.paths("knots c1")
    (zero,) = shown.paths("line zero")
    assert knots[-1][1] > zero[0][1] > 0
    assert shown.scale("left", is_log=False)(knots[-1][1]) == pytest.approx(-50, abs=3)


# ---------------------------------------------------------------- the page as a whole


def test_the_page_begins_with_the_sentences_of_the_terminal() -> None:
    made = periods(PLANS, noisy(half_with_the_cache, share=0.02, seed=1), num_prompts=12)
    page = page_of(made)
    assert [text_of(each) for each in page.iter("li")] == headlines(scenario(), analyse(made))
    assert "2.0" in text_of(next(page.iter("li")))


def test_the_page_says_what_ran_and_how_to_run_it_again() -> None:
    made = periods(PLANS, half_with_the_cache, num_prompts=3)
    facts: dict[str, object] = {
        "version": "9.8.7",
        "commit": "abc123+",
        "command": "millpond bench run mine --rounds 2",
        "machine": {"cpu": "A Processor", "memory_bytes": 2**34, "gpus": []},
        "packages": {"vllm": "0.32.0"},
    }
    page = page_of(made, facts=facts, options={"switch": "live", "engine_args": ["--a", "1"]})
    assert page.findtext(".//pre") == facts["command"]
    rows = dict(zip(map(text_of, page.iter("dt")), map(text_of, page.iter("dd")), strict=True))
    assert (
        rows.items()
        >= {
            "version": "9.8.7",
            "commit": "abc123+",
            "cpu": "A Processor",
            "memory": "16.0 GiB",
            "vllm": "0.32.0",
            "switch": "live",
            "engine args": "--a 1",
            "seed": "1",
        }.items()
    )


def test_nothing_is_fetched_and_nothing_is_run() -> None:
    page = page_of(periods(PLANS, half_with_the_cache, num_prompts=3))
    assert not {each.tag for each in page.iter()} & {"script", "link", "img", "iframe", "object"}
    names = {name for each in page.iter() for name in each.attrib}
    assert not {name for name in names if name in ("src", "href") or name.startswith("on")}
    style = page.findtext(".//style") or ""
    assert "url(" not in style
    assert "@import" not in style


def test_what_a_record_says_is_text_and_never_markup() -> None:
    made = periods(PLANS, half_with_the_cache, num_prompts=12)
    plain = page_of(made)
    hostile = [
        period(
            each.plan,
            [
                sample(
                    i, s.ttft_ms, group=HOSTILE, unit=HOSTILE, key=f"{HOSTILE}{i}", replica=HOSTILE
                )
                for i, s in enumerate(each.samples)
            ],
        )
        for each in made
    ]
    hostile[0].started_at = HOSTILE
    hostile[4].samples[0] = sample(0, None, group=HOSTILE, error=HOSTILE)
    page = page_of(
        hostile,
        scenario=Scenario(name=HOSTILE, description=HOSTILE, workload=scenario().workload),
        options={HOSTILE: HOSTILE, "model": [HOSTILE], "device": {HOSTILE: None}},
        facts=dict.fromkeys(("version", "commit", "command", "packages"), HOSTILE)
        | {"machine": {HOSTILE: HOSTILE}},
    )
    assert {each.tag for each in page.iter()} == {each.tag for each in plain.iter()}
    assert text_of(page).count("<script>alert(1)</script>") >= 10


def test_a_cache_has_one_colour_throughout_and_others_have_others() -> None:
    plans = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond", "third"])
    made = periods(plans, half_with_the_cache, num_prompts=3)
    page = page_of(made)
    for title in (OVER_TIME, DISTRIBUTION):
        (shown,) = figures(page, title).values()
        for css in ("c0", "c1", "c2"):
            assert shown.paths(f"{'median' if title == OVER_TIME else 'line'} {css}")
    keys = [each for each in page.iter("span") if each.get("class") == "key"]
    colours = {(each.text or text_of(each)).split()[0]: each.find("svg/circle") for each in keys}
    assert {
        name: circle.get("class") for name, circle in colours.items() if circle is not None
    } == {"off": "c0", "millpond": "c1", "third": "c2"}


# ---------------------------------------------------------------- little, nothing, very much


@pytest.mark.parametrize("num_prompts", [0, 1, 2])
def test_one_period_alone_has_a_page(num_prompts: int) -> None:
    page = page_of(periods(PLANS[:1], half_with_the_cache, num_prompts=num_prompts), TALK, MIX)
    assert "nothing to compare yet" in text_of(next(page.iter("li")))
    assert section(page, TURNS) is None
    assert section(page, PAYOFF) is None
    assert (section(page, OVER_TIME) is None) == (num_prompts == 0)


def test_a_run_in_which_everything_failed_has_a_page() -> None:
    made = [period(plan, [sample(i, None, group="talk 1") for i in range(3)]) for plan in PLANS]
    page = page_of(made, TALK)
    (shown,) = figures(page, OVER_TIME).values()
    assert len(shown.words("cross")) == 24
    assert section(page, DISTRIBUTION) is None
    assert section(page, TURNS) is None


def test_a_record_without_periods_has_a_page() -> None:
    assert "nothing to compare yet" in text_of(page_of([]))


def test_times_that_are_all_equal_or_zero_have_a_place() -> None:
    made = [period(plan, [sample(i, 0.0 if i else 50.0) for i in range(3)]) for plan in PLANS[:1]]
    nothing = analyse([])
    (shown,) = figures(page_of(made, analysis=nothing), OVER_TIME).values()
    (dots,) = shown.paths("dots c0")
    assert [y for _, y in dots] == [500.0, 1000.0, 1000.0]


def test_very_many_requests_stay_below_a_megabyte_and_the_page_says_so() -> None:
    generate = noisy(half_with_the_cache, share=0.5, seed=1)
    made = periods(PLANS, generate, num_prompts=4_000)
    odd = [
        Outlier(
            key=f"g/{i}", metric="ttft_ms", period=0, cache="off", value_ms=1, median_ms=1, score=9
        )
        for i in range(0, 4_000, 2)
    ]
    record = Record(scenario=scenario(), options={}, facts={}, periods=made)
    nothing = analyse([])
    known = Analysis(
        **({name: getattr(nothing, name) for name in nothing.__struct_fields__} | {"outliers": odd})
    )
    text = report_html(record, known)
    assert 100_000 < len(text.encode()) < 1_000_000
    page = ET.fromstring(text)
    (shown,) = figures(page, OVER_TIME).values()
    said = re.search(r"([\d,]+) dots for ([\d,]+) requests", shown.caption)
    assert said is not None
    drawn, meant = (int(number.replace(",", "")) for number in said.groups())
    num_dots = sum(len(path) for css in ("c0", "c1") for path in shown.paths(f"dots {css}"))
    assert (drawn, meant) == (num_dots, 8 * 4_000 - 2_000)
    assert "outliers: 2,000" in shown.caption
    (curves,) = figures(page, DISTRIBUTION).values()
    assert "curves through" in curves.caption
    (curve,) = curves.paths("line c1")
    fastest = min(s.ttft_ms or 0.0 for p in made if p.plan.cache == "millpond" for s in p.samples)
    assert curves.scale("below", is_log=True)(curve[1][0]) == pytest.approx(fastest, rel=0.03)


def test_more_kinds_of_requests_than_dots_have_a_dot_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "_DOTS_MAX", 20)
    monkeypatch.setattr(plots, "_RINGS_MAX", 20)
    made = [period(PLANS[0], [sample(i, 10.0 + i, group=f"g{i}") for i in range(50)])]
    page = page_of(made, analysis=analyse([]))
    num_dots = sum(each.get("class") == "dots c0" for each in page.iter("path"))
    assert num_dots == 50


@pytest.mark.parametrize("low", [0.013, 0.99, 7.0, 123.0, 9_999.0])
@pytest.mark.parametrize("ratio", [1.0, 1.001, 1.3, 2.1, 9.0, 80.0, 1e3, 1e7])
@pytest.mark.parametrize("make", [log_axis, linear_axis])
def test_axes_have_a_few_round_ticks(
    make: Callable[[list[float]], Axis], low: float, ratio: float
) -> None:
    axis = make([low, low * ratio])
    ticks = axis.ticks(num_max=6)
    assert 2 <= len(ticks) <= 7
    assert ticks == sorted(set(ticks))
    assert all(axis.low <= tick <= axis.high for tick in ticks)
    assert 0 < axis.place(low) <= axis.place(low * ratio) < 1


# ---------------------------------------------------------------- the command


def saved(path: Path) -> str:
    made = periods(PLANS, half_with_the_cache, num_prompts=5)
    record = Record(scenario=scenario(), options={}, facts={}, periods=made)
    record.save(path, analyse(made))
    return str(path)


def test_the_command_makes_the_page_beside_its_record_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = saved(tmp_path / "bench.json")
    assert run(["bench", "report", record], {}) == Exit.OK
    shown = capsys.readouterr()
    assert "moved requests, g: TTFT" in shown.out
    assert str(tmp_path / "report.html") in shown.err
    page = (tmp_path / "report.html").read_text()
    ET.fromstring(page)
    other = tmp_path / "x.html"
    assert run(["bench", "report", record, "--out", str(other), "--json"], {}) == Exit.OK
    data = json.loads(capsys.readouterr().out)["data"]
    assert data["page"] == str(other)
    assert data["headlines"]
    assert other.read_text() == page, "the same record gives the same page"


def test_a_run_leaves_the_same_page_beside_its_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = periods(PLANS, half_with_the_cache, num_prompts=5)
    record = Record(scenario=scenario(), options={}, facts={}, periods=made)
    bench._publish(Context(environ={}, argv=[]), record, tmp_path, as_json=True)
    shown = capsys.readouterr()
    assert json.loads(shown.out)["data"]["page"] == str(tmp_path / "report.html")
    assert str(tmp_path / "report.html") in shown.err
    left = (tmp_path / "report.html").read_text()
    assert run(["bench", "report", str(tmp_path / "bench.json")], {}) == Exit.OK
    assert (tmp_path / "report.html").read_text() == left


def test_the_command_refuses_what_is_no_record_and_where_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert run(["bench", "report", str(tmp_path / "x.json")], {}) == Exit.USAGE
    assert "no record" in capsys.readouterr().err
    gone = str(tmp_path / "gone" / "x.html")
    assert run(["bench", "report", saved(tmp_path / "b.json"), "--out", gone], {}) == Exit.USAGE
    assert "--out" in capsys.readouterr().err
