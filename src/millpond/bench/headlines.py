"""What a reader wants first, in sentences: moved, cold, sessions, and when sharing pays.

First comes a sentence for each cache with the verdicts of all kinds of requests, then one for
each kind with its times, the noise, and what the tokens say about it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, get_args

from millpond.bench.analysis import Analysis
from millpond.bench.causes import cause_of
from millpond.bench.effects import BEYOND, PROMPTS_MIN, Effect, Verdict
from millpond.bench.observations import WHOLE
from millpond.bench.scenario import Mixed, Scenario, Sessions
from millpond.bench.workloads import mixed_groups, session_groups

_TTFT = "ttft_ms"
_TOTAL = "total_ttft_ms"
_SPAN = "span_ms"
_PARTS = {"moved": "moved requests", "cold": "cold requests", "any": "requests"}
_EXPECTED: Final[dict[str, Verdict]] = {"moved": "faster", "cold": "within noise"}
_OF_SESSIONS: Final[dict[str, Verdict]] = {"alternate": "faster", "fixed": "within noise"}
"""What sharing should do. A trace may have prefixes in common, or none."""
_PLACED: Final = {"alternate": "sessions that alternate", "fixed": "sessions that stay"}


def headlines(scenario: Scenario, analysis: Analysis) -> list[str]:
    """Return the sentences, most wanted first; one that says so where nothing was compared."""
    lines = list(_verdicts(scenario, analysis))
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


# ---------------------------------------------------------------- all in one sentence


def _verdicts(scenario: Scenario, analysis: Analysis) -> Iterator[str]:
    for base, other in dict.fromkeys((each.base, each.other) for each in analysis.effects):
        mine = [each for each in analysis.effects if (each.base, each.other) == (base, other)]
        kinds = {name: _of_part(scenario, mine, part) for part, name in _PARTS.items()}
        for placement, name in _PLACED.items():
            kinds[name] = [
                effect
                for effect in _of_sessions(scenario, mine, placement)
                if effect.metric == _TOTAL
            ]
        said = [f"{name} {_together(effects)}" for name, effects in kinds.items() if effects]
        if said:
            yield f"{other} against {base}: {'; '.join(said)}"


def _together(effects: Sequence[Effect]) -> str:
    """Return the range of the ratios and how many of them are beyond noise."""
    ratios = sorted(effect.ratio.value for effect in effects)
    low, high = f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"
    span = low if low == high else f"{low} to {high}"
    shares = [
        _share_of(verdict, mine, len(effects))
        for verdict in get_args(Verdict)
        if (mine := [effect for effect in effects if effect.verdict == verdict])
    ]
    return f"{span} times as fast ({', '.join(shares)})"


def _share_of(verdict: Verdict, mine: Sequence[Effect], num_effects: int) -> str:
    """Return how many effects have a verdict, and that they are beyond noise if that is known."""
    share = verdict if len(mine) == num_effects else f"{verdict} in {len(mine)} of {num_effects}"
    is_beyond = verdict in BEYOND and all(effect.noise is not None for effect in mine)
    return f"{share} beyond noise" if is_beyond else share


# ---------------------------------------------------------------- one by one


def _requests(scenario: Scenario, analysis: Analysis, part: str, name: str) -> Iterator[str]:
    for effect in _of_part(scenario, analysis.effects, part):
        said = f"{_named(analysis, effect)}{name}, {effect.group}: TTFT {_change(effect)}"
        yield said + _because(analysis, effect, _EXPECTED.get(part))


def _of_part(scenario: Scenario, effects: Iterable[Effect], part: str) -> list[Effect]:
    # Of a mixed workload the shares are of interest, and have a line of their own.
    mixes = (each for each in scenario.workload if isinstance(each, Mixed))
    mixed = {group for each in mixes for group in mixed_groups(each)}
    return [
        effect
        for effect in effects
        if (effect.part, effect.metric) == (part, _TTFT) and effect.group not in mixed
    ]


def _sessions(scenario: Scenario, analysis: Analysis) -> Iterator[str]:
    for placement, expected in _OF_SESSIONS.items():
        effects = _of_sessions(scenario, analysis.effects, placement)
        spans = {(each.group, each.other): each for each in effects if each.metric == _SPAN}
        for effect in (each for each in effects if each.metric == _TOTAL):
            span = spans[effect.group, effect.other]
            said = (
                f"{_named(analysis, effect)}sessions, {effect.group}: sum of TTFT "
                f"{_change(effect)}; whole session {_times(span)}, {_ratio(span)}"
            )
            yield said + _because(analysis, effect, expected)


def _of_sessions(scenario: Scenario, effects: Iterable[Effect], placement: str) -> list[Effect]:
    workloads = (each for each in scenario.workload if isinstance(each, Sessions))
    groups = {
        group for each in workloads if each.placement == placement for group in session_groups(each)
    }
    return [effect for effect in effects if effect.part == WHOLE and effect.group in groups]


def _named(analysis: Analysis, effect: Effect) -> str:
    """Return the cache's name where there are several."""
    return f"{effect.other}: " if len({each.other for each in analysis.effects}) > 1 else ""


def _because(analysis: Analysis, effect: Effect, expected: Verdict | None) -> str:
    """Return what the tokens say of an effect, and of one that was expected and is not there."""
    is_surprise = expected is not None and effect.verdict not in (expected, "too few prompts")
    if effect.verdict not in BEYOND and not is_surprise:
        return ""
    return f"{'. Not as expected' if is_surprise else ''}; {cause_of(effect, analysis.tokens)}"


def _pays_from(scenario: Scenario, analysis: Analysis) -> Iterator[str]:
    for workload in scenario.workload:
        if not isinstance(workload, Mixed):
            continue
        for other in dict.fromkeys(effect.other for effect in analysis.effects):
            found = payoff(analysis.effects, workload, other)
            if not found:
                continue
            if found[-1][1].verdict == "too few prompts":
                yield f"{other}: too few prompts to say from which moved share on it pays"
                continue
            pays_from = None
            for share, effect in reversed(found):
                if effect.verdict != "faster":
                    break
                pays_from = share
            if pays_from is None:
                yield f"{other}: no gain beyond noise at a moved share of {_share(found[-1][0])}"
            else:
                yield f"{other} pays from a moved share of {_share(pays_from)} on"


def _share(share: float) -> str:
    return f"{100 * share:g}%"


def payoff(effects: Sequence[Effect], workload: Mixed, other: str) -> list[tuple[float, Effect]]:
    """Return the effect on both requests of a prompt together, by the share that moves."""
    shares = mixed_groups(workload)
    found = [
        (shares[effect.group], effect)
        for effect in effects
        if (effect.part, effect.metric, effect.other) == (WHOLE, _TOTAL, other)
        and effect.group in shares
    ]
    return sorted(found, key=lambda pair: pair[0])


def _change(effect: Effect) -> str:
    return f"{_times(effect)}, {_ratio(effect)}, {_percent(effect)}: {_verdict(effect)}"


def _times(effect: Effect) -> str:
    return f"{format_ms(effect.base_median_ms)} → {format_ms(effect.other_median_ms)}"


def _ratio(effect: Effect) -> str:
    interval = effect.ratio.interval
    known = "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f})"
    return f"{effect.ratio.value:.2f} times as fast{known}"


def _percent(effect: Effect) -> str:
    return f"{-100 * effect.gain_share:+.1f} % of the time"


def _verdict(effect: Effect) -> str:
    if effect.verdict == "too few prompts":
        return f"no verdict below {PROMPTS_MIN} prompts"
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
