"""What a reader wants first, in sentences: moved, cold, sessions, and when sharing pays."""

from collections.abc import Iterator, Sequence

from millpond.bench.analysis import Analysis
from millpond.bench.effects import Effect
from millpond.bench.observations import WHOLE
from millpond.bench.scenario import Mixed, Scenario, Sessions

_TTFT = "ttft_ms"
_TOTAL = "total_ttft_ms"
_PARTS = {"moved": "moved requests", "cold": "cold requests", "any": "requests"}


def headlines(scenario: Scenario, analysis: Analysis) -> list[str]:
    """Return the sentences, most wanted first; one that says so where nothing was compared."""
    lines: list[str] = []
    for part, name in _PARTS.items():
        lines += _requests(scenario, analysis, part, name)
    lines += _sessions(scenario, analysis)
    lines += _pays_from(scenario, analysis)
    if not lines:
        lines += [
            f"A/A, {e.group}: TTFT {_ratio(e)}" for e in analysis.noise_floor if e.metric == _TTFT
        ]
    if not lines:
        lines.append("nothing to compare yet: no prompt was answered with and without the cache")
    failed = sum(analysis.num_errors.values())
    if failed:
        lines.append(f"{failed} of {analysis.num_requests} requests FAILED and are in no figure")
    if analysis.num_incomplete_periods:
        lines.append("one period was interrupted: what it had answered is in the figures")
    return lines


def _requests(scenario: Scenario, analysis: Analysis, part: str, name: str) -> Iterator[str]:
    mixed = [each.name for each in scenario.workload if isinstance(each, Mixed)]
    for effect in analysis.effects:
        # Of a mixed workload the shares are of interest, and have a line of their own.
        is_mixed = _workload_of(effect.group) in mixed
        if (effect.part, effect.metric) == (part, _TTFT) and not is_mixed:
            yield f"{name}, {effect.group}: TTFT {_change(effect)}"


def _sessions(scenario: Scenario, analysis: Analysis) -> Iterator[str]:
    names = [each.name for each in scenario.workload if isinstance(each, Sessions)]
    for effect in analysis.effects:
        if effect.part == WHOLE and _workload_of(effect.group) in names:
            what = "sum of TTFT" if effect.metric == _TOTAL else "whole session"
            yield f"sessions, {effect.group}: {what} {_change(effect)}"


def _pays_from(scenario: Scenario, analysis: Analysis) -> Iterator[str]:
    for workload in scenario.workload:
        if not isinstance(workload, Mixed):
            continue
        for other in dict.fromkeys(effect.other for effect in analysis.effects):
            found = payoff(analysis.effects, workload.name, other)
            if not found:
                continue
            pays_from = None
            for share, effect in reversed(found):
                if effect.verdict != "faster":
                    break
                pays_from = share
            if pays_from is None:
                yield f"{other}: no gain beyond noise at a moved share of {found[-1][0]:.0%}"
            else:
                yield f"{other} pays from a moved share of {pays_from:.0%} on"


def payoff(effects: Sequence[Effect], workload: str, other: str) -> list[tuple[float, Effect]]:
    """Return the effect on both requests of a prompt together, by the share that moves."""
    found = [
        (float(effect.group.rpartition(" ")[2]), effect)
        for effect in effects
        if (effect.part, effect.metric, effect.other) == (WHOLE, _TOTAL, other)
        and _workload_of(effect.group) == workload
    ]
    return sorted(found, key=lambda pair: pair[0])


def _workload_of(group: str) -> str:
    return group.partition(" ")[0]


def _change(effect: Effect) -> str:
    times = f"{format_ms(effect.base_median_ms)} -> {format_ms(effect.other_median_ms)}"
    return f"{times}, {_ratio(effect)}, {_percent(effect)}: {_verdict(effect)}"


def _ratio(effect: Effect) -> str:
    interval = effect.ratio.interval
    known = "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f})"
    return f"{effect.ratio.value:.2f} times as fast{known}"


def _percent(effect: Effect) -> str:
    return f"{-100 * effect.gain_share:+.1f} % of the time"


def _verdict(effect: Effect) -> str:
    if effect.noise is None:
        return f"{effect.verdict}, noise not known"
    noise = f"{effect.noise.low:.2f} to {effect.noise.high:.2f} by {effect.noise_source}"
    if effect.verdict == "within noise":
        return f"within noise ({noise})"
    return f"{effect.verdict}, beyond noise ({noise})"


def format_ms(value_ms: float) -> str:
    """Return a time for people."""
    if value_ms >= 10_000:
        return f"{value_ms / 1000:.1f} s"
    if value_ms >= 1000:
        return f"{value_ms / 1000:.2f} s"
    return f"{value_ms:.0f} ms" if value_ms >= 100 else f"{value_ms:.1f} ms"
