"""One sentence on whether sharing pays, from requests whose tokens the pool has told.

*Held* tokens are those of a prompt that were not computed: local hits and loads from the pool.
They were *needed elsewhere* if another replica than the one that served had computed them,
which only loads can be.

What that saves is measured, not predicted: a line through the first-token times of requests
that loaded nothing says what the others would have taken had they computed what they loaded.
A slope by medians (Theil and Sen), each pair weighted by its distance: a few requests that sat
in a queue do not bend it, and many short ones do not hide what long ones say.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from millpond.router.page.window import Sample

_REQUESTS_MIN: Final = 20
_TIMED_MIN: Final = 5
_MOVED_MIN: Final = 0.05
"""A smaller share of requests that seem to have moved may be the router's error: it guesses."""
_SPREAD_MIN: Final = 2.0
"""Between the shortest and the longest prompt; below it a slope would be noise."""
_REACH_MAX: Final = 4.0
"""How far beyond the longest prompt a slope holds. Attention makes it steeper: what is saved
there is more than the line says."""
_REACH_FLAT_MAX: Final = 1.25
_DIFFERENCE_MIN: Final = 0.05
"""A smaller share of the time says nothing."""


class Finding(enum.StrEnum):
    """What kind of verdict it is."""

    NO_POOL = "no-pool"
    TOO_FEW = "too-few"
    NOTHING_HELD = "nothing-held"
    NOTHING_MOVED = "nothing-moved"
    NOT_LOADED = "not-loaded"
    UNTIMED = "untimed"
    PAYS = "pays"
    NO_DIFFERENCE = "no-difference"
    COSTS = "costs"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``counted`` says what the sentence rests on. ``saved_s`` is per request that needed it."""

    finding: Finding
    sentence: str
    counted: str
    saved_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Totals:
    num_requests: int
    num_moved: int
    prompt_tokens: int
    held_tokens: int
    elsewhere_tokens: int


@dataclass(frozen=True, slots=True)
class _Times:
    """``saved_s`` and ``computing_s``, what computing would have taken, for each request."""

    saved_s: Sequence[float]
    computing_s: Sequence[float]
    num_elsewhere: int
    num_without: int


def judge(samples: Sequence[Sample], *, has_pool: bool, num_unreported: int) -> Verdict:
    """Return the verdict on these requests.

    ``has_pool`` says whether a pool answers now; ``num_unreported`` is of requests that are
    not among these, for nobody said where their tokens came from.
    """
    totals = _totals(samples)
    if totals.num_requests < _REQUESTS_MIN:
        return _too_few(totals.num_requests, num_unreported, has_pool=has_pool)
    counted = (
        f"The last {totals.num_requests:,} requests that replicas have reported: "
        f"{totals.prompt_tokens:,} prompt tokens, {totals.held_tokens:,} of them held somewhere, "
        f"{totals.elsewhere_tokens:,} needed elsewhere."
    )
    if not has_pool:
        counted += " The pool is away: what came since is not among them."
    if not totals.elsewhere_tokens:
        return _nothing_shared(totals, counted)
    return _timed(totals, counted, _times(samples))


def _totals(samples: Sequence[Sample]) -> _Totals:
    tokens = [each.tokens for each in samples]
    return _Totals(
        num_requests=len(samples),
        num_moved=sum(each.is_moved for each in samples),
        prompt_tokens=sum(each.prompt_tokens for each in tokens),
        held_tokens=sum(each.local_tokens + each.loaded_tokens for each in tokens),
        elsewhere_tokens=sum(each.other_tokens for each in tokens),
    )


def _too_few(num_requests: int, num_unreported: int, *, has_pool: bool) -> Verdict:
    reported = f"{num_requests} of the {_REQUESTS_MIN} requests that it takes"
    if has_pool:
        finding = Finding.TOO_FEW
        sentence = f"Too few requests for a verdict: replicas have reported {reported}."
        counted = ""
    else:
        finding = Finding.NO_POOL
        sentence = "No verdict: no pool answers, so where tokens come from is a guess."
        counted = f"Replicas have reported {reported}. "
    counted += f"Without a report, and so not counted: {num_unreported:,}."
    return Verdict(finding, sentence, counted)


def _nothing_shared(totals: _Totals, counted: str) -> Verdict:
    moved_ratio = totals.num_moved / totals.num_requests
    if moved_ratio >= _MOVED_MIN:
        return Verdict(
            Finding.NOT_LOADED,
            f"{_percent(moved_ratio)} of requests went to another replica than the one thought to "
            "hold their prefix, and nothing was loaded that another one had computed: "
            "see whether the pool is switched on.",
            counted,
        )
    if totals.held_tokens:
        return Verdict(
            Finding.NOTHING_MOVED,
            "No prefix was needed on another replica than the one that holds it: "
            "sharing has nothing to do.",
            counted,
        )
    return Verdict(
        Finding.NOTHING_HELD,
        "No prompt began with tokens that were held anywhere: there is nothing to share.",
        counted,
    )


def _timed(totals: _Totals, counted: str, times: _Times) -> Verdict:
    share = _percent(totals.elsewhere_tokens / totals.held_tokens)
    needed = (
        f"{share} of prefix tokens were needed on another replica than the one that computed them"
    )
    if len(times.saved_s) < _TIMED_MIN:
        return Verdict(
            Finding.UNTIMED,
            f"{needed}; what sharing saves is not known yet.",
            f"{counted} To compare first tokens takes {_TIMED_MIN} streams that needed such tokens "
            f"(there are {times.num_elsewhere}) and {_TIMED_MIN} of about their size that loaded "
            f"nothing (of any size {times.num_without}).",
        )
    saved_s = median(times.saved_s)
    counted += (
        f" The first tokens of {len(times.saved_s):,} streams that needed such tokens are compared "
        f"with those of {times.num_without:,} that loaded nothing; the time is the median."
    )
    if abs(saved_s) < _DIFFERENCE_MIN * median(times.computing_s):
        finding = Finding.NO_DIFFERENCE
        effect = "that sharing saves time cannot be seen"
    elif saved_s > 0:
        finding = Finding.PAYS
        effect = f"sharing saves a request that needs them about {_duration(saved_s)}"
    else:
        finding = Finding.COSTS
        effect = (
            f"sharing does not pay: a request that needs them waits about {_duration(-saved_s)} "
            "longer for its first token than if it computed them"
        )
    return Verdict(finding, f"{needed}; {effect}.", counted, saved_s)


# ---------------------------------------------------------------- what it saves


@dataclass(frozen=True, slots=True)
class _Line:
    """Time to the first token by computed tokens; None outside of what it was drawn through."""

    base_s: float
    s_per_token: float
    tokens_min: float
    tokens_max: float

    def at(self, num_tokens: int) -> float | None:
        if not self.tokens_min <= num_tokens <= self.tokens_max:
            return None
        return self.base_s + self.s_per_token * num_tokens


def _times(samples: Sequence[Sample]) -> _Times:
    without: list[tuple[int, float]] = []
    elsewhere: list[tuple[int, float]] = []
    for each in samples:
        tokens = each.tokens
        if each.ttft_s is None:
            continue
        if tokens.other_tokens:
            elsewhere.append((tokens.computed_tokens + tokens.other_tokens, each.ttft_s))
        elif not tokens.loaded_tokens:
            without.append((tokens.computed_tokens, each.ttft_s))
    saved: list[float] = []
    computing: list[float] = []
    line = _draw_line(without) if len(without) >= _TIMED_MIN else None
    for num_tokens, ttft_s in elsewhere:
        computing_s = None if line is None else line.at(num_tokens)
        if computing_s is not None:
            computing.append(computing_s)
            saved.append(computing_s - ttft_s)
    return _Times(saved, computing, len(elsewhere), len(without))


def _draw_line(points: Sequence[tuple[int, float]]) -> _Line:
    ordered = sorted(points)
    shortest, longest = ordered[0][0], ordered[-1][0]
    if longest < _SPREAD_MIN * max(shortest, 1):
        return _Line(
            base_s=median(seconds for _, seconds in ordered),
            s_per_token=0.0,
            tokens_min=shortest / _REACH_FLAT_MAX,
            tokens_max=longest * _REACH_FLAT_MAX,
        )
    half = len(ordered) // 2  # pairs far from each other: the others say little, and are many
    slopes = [
        ((high_s - low_s) / (high - low), high - low)
        for (low, low_s), (high, high_s) in zip(ordered, ordered[half:], strict=False)
        if high > low
    ]
    slope = max(0.0, _weighted_median(slopes))
    base_s = max(0.0, median(seconds - slope * tokens for tokens, seconds in ordered))
    return _Line(base_s, slope, tokens_min=0, tokens_max=longest * _REACH_MAX)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the value at which half of the weight is reached; pairs are (value, weight)."""
    left = sum(weight for _, weight in pairs) / 2
    for value, weight in sorted(pairs):
        left -= weight
        if left <= 0:
            return value
    raise ValueError("no pairs")


# ---------------------------------------------------------------- words


def _percent(ratio: float) -> str:
    percent = int(100 * ratio)  # 99.9 % is not all of them
    return f"{percent} %" if percent else "Less than 1 %"


def _duration(seconds: float) -> str:
    if seconds < 0.995:
        return f"{max(1, round(1000 * seconds))} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
