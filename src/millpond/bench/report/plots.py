"""The plots of a run: TTFT over time, its distribution, turn by turn, and where sharing pays."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from millpond.bench.effects import Effect, noise_bound
from millpond.bench.headlines import format_ms, payoff
from millpond.bench.records import Period
from millpond.bench.report.charts import Axis, Chart, linear_axis, log_axis
from millpond.bench.report.run import ROLES, Request, Run, ttft_of, workload_of
from millpond.bench.scenario import Mixed, Sessions
from millpond.bench.statistics import Estimate, Interval, estimate_median

_DOTS_MAX: Final = 24_000
"""Of a page, about 13 bytes each."""
_RINGS_MAX: Final = 3_000
_STEPS_MAX: Final = 300
"""Of one curve of a distribution."""
_LABELS_MAX: Final = 16
_ROUND_LABELS_MAX: Final = 4
"""Caches have long names, and a phone is 280 pixels wide."""
_SEED: Final = 1
_PERCENT: Final = 100
_MS_PER_S: Final = 1000


@dataclass(frozen=True, slots=True)
class Figure:
    """A chart with its words. ``legend`` has colour, name and figure of each cache."""

    title: str
    chart: Chart
    legend: Sequence[tuple[str, str, str]]
    notes: Sequence[str] = ()


def name_ms(value_ms: float) -> str:
    """Return a round time for an axis."""
    return f"{value_ms / _MS_PER_S:g} s" if value_ms >= _MS_PER_S else f"{value_ms:g} ms"


# ---------------------------------------------------------------- over time


def over_time(run: Run) -> list[Figure]:
    """Return TTFT of all requests by period, one chart for each kind of request."""
    share = max(1, len(run.panels))
    return [
        _over_time(run, f"{group}, {ROLES[role]}", requests, num_max=_DOTS_MAX // share)
        for (group, role), requests in run.panels.items()
    ]


@dataclass(slots=True)
class _Times:
    """One cache's requests as points (time, TTFT), apart those that are far from the median."""

    usual: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    outliers: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])


def _over_time(run: Run, title: str, requests: Sequence[Request], *, num_max: int) -> Figure:
    odd = {(each.period, each.key) for each in run.analysis.outliers}
    times: dict[str, _Times] = {}
    failed: list[float] = []
    for period, sample in requests:
        at = run.bands[period.plan.number].place(sample.start_ms)
        ttft_ms = ttft_of(sample)
        if ttft_ms is None:
            failed.append(at)
            continue
        mine = times.setdefault(period.plan.cache, _Times())
        is_odd = (period.plan.number, sample.key) in odd
        (mine.outliers if is_odd else mine.usual).append((at, ttft_ms))
    values = [ttft for each in times.values() for _, ttft in (*each.usual, *each.outliers)]
    chart = Chart(
        f"{title}: time to first token by period",
        linear_axis(end for band in run.bands.values() for end in band.ends),
        log_axis(values),
    )
    chart.y_ticks((value, name_ms(value)) for value in chart.y.ticks())
    _draw_periods(run, chart)
    num_drawn = 0
    for cache, mine in times.items():
        colour = run.colours[cache]
        num_drawn += chart.dots(mine.usual, colour, num_max=num_max // len(times))
        chart.rings(mine.outliers, colour, num_max=_RINGS_MAX // len(run.panels))
    _draw_medians(run, chart, requests)
    chart.crosses_on_top(failed, num_max=_RINGS_MAX // len(run.panels))
    num_usual = sum(len(each.usual) for each in times.values())
    num_odd = sum(len(each.outliers) for each in times.values())
    notes = [f"outliers: {num_odd:,} (open circles)"] if num_odd else []
    if failed:
        notes.append(f"failed: {len(failed):,} (× at the top)")
    if num_drawn < num_usual > num_max:
        notes.append(f"{num_drawn:,} dots for {num_usual:,} requests: close ones are drawn as one")
    return Figure(title, chart, _medians(run, _compared(requests)), notes)


def _draw_periods(run: Run, chart: Chart) -> None:
    periods = run.record.periods
    rounds: dict[int, list[Period]] = {}
    for period in periods:
        rounds.setdefault(period.plan.round, []).append(period)
        low, high = run.bands[period.plan.number].ends
        corners = ((low, chart.y.low), (low, chart.y.high), (high, chart.y.high))
        colour = run.colours[period.plan.cache]
        chart.area([*corners, (high, chart.y.low)], f"band {colour}")
        if len(periods) <= _LABELS_MAX:
            mark = "" if period.is_complete else "*"
            chart.write_below((low + high) / 2, f"{period.plan.number}{mark}")
    every = -(-len(rounds) // _ROUND_LABELS_MAX)
    for members in list(rounds.values())[::every]:
        plan = members[0].plan
        first, last = run.bands[plan.number], run.bands[members[-1].plan.number]
        middle = (first.begin + last.begin + 1) / 2
        if len(periods) > _LABELS_MAX:
            chart.write_below(middle, f"{plan.number}…")
        chart.write_below(middle, "A/A" if plan.is_aa else ", ".join(plan.others), row=1)


def _draw_medians(run: Run, chart: Chart, requests: Sequence[Request]) -> None:
    for period in run.record.periods:
        values = [ttft_of(sample) for each, sample in requests if each is period]
        known = [value for value in values if value is not None]
        if known:
            middle = float(np.median(known))
            ends = run.bands[period.plan.number].ends
            chart.line([(end, middle) for end in ends], f"median {run.colours[period.plan.cache]}")


def _medians(run: Run, requests: Sequence[Request]) -> list[tuple[str, str, str]]:
    return [
        (run.colours[cache], cache, f"median {format_ms(float(np.median(values)))}")
        for cache, values in _by_cache(requests).items()
    ]


def _by_cache(requests: Sequence[Request]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for period, sample in requests:
        ttft_ms = ttft_of(sample)
        if ttft_ms is not None:
            found.setdefault(period.plan.cache, []).append(ttft_ms)
    return found


# ---------------------------------------------------------------- distributions


def distributions(run: Run) -> list[Figure]:
    """Return how many requests had their first token after how long, as curves by cache.

    A/A rounds are left out where others are: theirs are other prompts.
    """
    found: list[Figure] = []
    for (group, role), requests in run.panels.items():
        compared = _compared(requests)
        by_cache = {cache: sorted(values) for cache, values in _by_cache(compared).items()}
        if not by_cache:
            continue
        title = f"{group}, {ROLES[role]}"
        chart = Chart(
            f"{title}: share of requests with a first token by then",
            log_axis(value for values in by_cache.values() for value in values),
            Axis(0.0, 1.0),
        )
        chart.x_ticks((value, name_ms(value)) for value in chart.x.ticks(num_max=5))
        chart.y_ticks(
            (share, f"{_PERCENT * share:g} %") for share in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
        )
        for cache, values in by_cache.items():
            chart.line(_steps(chart.x, values), run.colours[cache])
        longest = max(map(len, by_cache.values()))
        notes = [f"curves through {_STEPS_MAX} values each"] if longest > _STEPS_MAX else []
        found.append(Figure(title, chart, _medians(run, compared), notes))
    return found


def _compared(requests: Sequence[Request]) -> Sequence[Request]:
    return [each for each in requests if not each[0].plan.is_aa] or requests


def _steps(x: Axis, values: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Yield the corners of the empirical distribution, through the first and the last value."""
    yield x.low, 0.0
    share = 0.0
    chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), _STEPS_MAX)).round())
    for number in chosen.astype(int).tolist():
        yield values[number], share
        share = (number + 1) / len(values)
        yield values[number], share
    yield x.high, 1.0


# ---------------------------------------------------------------- sessions


def turn_by_turn(run: Run) -> list[Figure]:
    """Return median TTFT by turn with its interval, a chart for each group of sessions."""
    names = {each.name for each in run.record.scenario.workload if isinstance(each, Sessions)}
    groups: dict[str, list[Request]] = {}
    for requests in run.panels.values():
        for period, sample in _compared(requests):
            if workload_of(sample.group) in names:
                groups.setdefault(sample.group, []).append((period, sample))
    return [
        figure
        for group, requests in groups.items()
        if (figure := _turns(run, group, requests)) is not None
    ]


def _turns(run: Run, group: str, requests: Sequence[Request]) -> Figure | None:
    medians = {
        cache: estimates
        for cache in dict.fromkeys(period.plan.cache for period, _ in requests)
        if (estimates := _by_turn([each for each in requests if each[0].plan.cache == cache]))
    }
    if not medians:
        return None
    every = [estimate for turns in medians.values() for estimate in turns.values()]
    turns = sorted({turn for estimates in medians.values() for turn in estimates})
    chart = Chart(
        f"{group}: median time to first token by turn",
        Axis(turns[0] - 0.5, turns[-1] + 0.5),
        log_axis(end for each in every for end in (each.value, *_ends(each.interval))),
    )
    chart.y_ticks((value, name_ms(value)) for value in chart.y.ticks())
    step = -(-len(turns) // _LABELS_MAX)
    chart.x_ticks([(turn, str(turn + 1)) for turn in turns[::step]], with_lines=False)
    chart.write_below((turns[0] + turns[-1]) / 2, "turn", row=1)
    for number, (cache, estimates) in enumerate(medians.items()):
        aside = 0.1 * (number - (len(medians) - 1) / 2)  # bars of two caches don't cover each other
        places = {turn + aside: estimate for turn, estimate in sorted(estimates.items())}
        _draw_estimates(chart, places, run.colours[cache])
    legend = [
        (
            run.colours[cache],
            cache,
            " → ".join(format_ms(each.value) for each in _first_last(found)),
        )
        for cache, found in medians.items()
    ]
    return Figure(group, chart, legend, ["medians of the first and the last turn"])


def _first_last(estimates: Mapping[int, Estimate]) -> Sequence[Estimate]:
    return [estimates[turn] for turn in dict.fromkeys((min(estimates), max(estimates)))]


def _by_turn(requests: Sequence[Request]) -> dict[int, Estimate]:
    by_turn: dict[int, dict[int, list[float]]] = {}
    for period, sample in requests:
        ttft_ms = ttft_of(sample)
        if ttft_ms is not None:
            periods = by_turn.setdefault(sample.turn, {})
            periods.setdefault(period.plan.number, []).append(ttft_ms)
    return {
        turn: estimate_median([np.array(values) for values in periods.values()], seed=_SEED)
        for turn, periods in by_turn.items()
    }


def _draw_estimates(chart: Chart, places: Mapping[float, Estimate], colour: str) -> None:
    known = [(x, each.interval) for x, each in places.items() if each.interval is not None]
    chart.bars([(x, interval.low, interval.high) for x, interval in known], f"span {colour}")
    points = [(x, each.value) for x, each in places.items()]
    chart.line(points, colour)
    chart.knots(points, colour)


def _ends(interval: Interval | None) -> tuple[float, ...]:
    return () if interval is None else (interval.low, interval.high)


# ---------------------------------------------------------------- pay-off


def payoffs(run: Run) -> list[Figure]:
    """Return the time saved by the share of requests that moved, a chart for each mix."""
    found: list[Figure] = []
    for workload in run.record.scenario.workload:
        if isinstance(workload, Mixed):
            others = dict.fromkeys(effect.other for effect in run.analysis.effects)
            lines = {
                other: shares
                for other in others
                if (shares := payoff(run.analysis.effects, workload, other))
            }
            if lines:
                found.append(_payoff(run, workload.name, lines))
    return found


def _payoff(run: Run, name: str, lines: Mapping[str, Sequence[tuple[float, Effect]]]) -> Figure:
    saved = {
        other: {_PERCENT * share: _saved(effect.ratio) for share, effect in shares}
        for other, shares in lines.items()
    }
    noise = [
        (_PERCENT * share, noise_bound(effect.noise), effect.noise_source)
        for share, effect in next(iter(lines.values()))
        if effect.noise is not None
    ]
    upper = [(share, _saved_percent(bound)) for share, bound, _ in noise]
    lower = [(share, _saved_percent(1 / bound)) for share, bound, _ in noise]
    values = [
        value
        for places in saved.values()
        for each in places.values()
        for value in (each.value, *_ends(each.interval))
    ]
    chart = Chart(
        f"{name}: time saved by the share of moved requests",
        Axis(-4.0, 104.0),
        linear_axis([0.0, *values, *(value for _, value in (*upper, *lower))]),
        height=260,
    )
    chart.x_ticks([(share, f"{share:g} %") for share in chart.x.ticks(num_max=5)])
    chart.write_below(chart.x.high / 2, "second requests that moved", row=1)
    chart.y_ticks([(value, f"{value:+g} %" if value else "0") for value in chart.y.ticks()])
    if noise:
        chart.area(_widened([*upper, *reversed(lower)]), "noise")
    chart.line([(chart.x.low, 0.0), (chart.x.high, 0.0)], "zero")
    for other, places in saved.items():
        _draw_estimates(chart, places, run.colours[other])
    notes = [f"grey: noise by {noise[0][2]}"] if noise else ["noise is not known"]
    legend = [
        (run.colours[other], other, f"{each.value:+.0f} % with {share:g} % moved")
        for other, places in saved.items()
        for share, each in (max(places.items()),)
    ]
    return Figure(name, chart, legend, notes)


def _saved(ratio: Estimate) -> Estimate:
    return Estimate(
        _saved_percent(ratio.value),
        *(
            None
            if interval is None
            else Interval(_saved_percent(interval.low), _saved_percent(interval.high))
            for interval in (ratio.over_requests, ratio.over_periods)
        ),
    )


def _saved_percent(ratio: float) -> float:
    return _PERCENT * (1 - 1 / ratio)


def _widened(outline: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Return the outline; around a single share it would have no width."""
    if len(outline) != 2:
        return outline
    (x, high), (_, low) = outline
    return [(x - 2, high), (x + 2, high), (x + 2, low), (x - 2, low)]
