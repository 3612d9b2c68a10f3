"""What a cache changed: the ratio of times without and with it, paired by prompt.

A pair is one period without the cache and its neighbour with it, OFF-ON or ON-OFF. For each
prompt that both have answered, the ratio is time without / time with: 2 means twice as fast.
The noise floor is the same figure between periods that do not differ: A/A rounds, or where
there are none the two OFF periods of each round, which lie furthest apart.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np

from millpond.bench.observations import Cell, Observation, observe_all
from millpond.bench.records import Period
from millpond.bench.statistics import Estimate, Interval, Values, estimate_median

Verdict = Literal["faster", "slower", "within noise"]
NoiseSource = Literal["A/A rounds", "OFF periods", "none"]


class PairEffect(msgspec.Struct, frozen=True, kw_only=True):
    """The effect in one pair of periods."""

    round: int
    pair: int
    num_prompts: int
    ratio: Estimate


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """The effect on one group, role and metric over all pairs.

    ``ratio`` is the median over prompts of time without / time with; ``saved_ms`` that of
    their difference. ``noise`` is the interval of the same ratio where nothing was changed.
    """

    group: str
    part: str
    metric: str
    base: str
    other: str
    num_prompts: int
    base_median_ms: float
    other_median_ms: float
    ratio: Estimate
    saved_ms: Estimate
    pairs: list[PairEffect]
    noise: Interval | None
    noise_source: NoiseSource
    verdict: Verdict

    @property
    def gain_share(self) -> float:
        """Share of the time that the cache takes off; negative where it adds to it."""
        return 1 - 1 / self.ratio.value


Pair = tuple[int, int, Mapping[str, float], Mapping[str, float]]
"""Round, number in it, values by prompt without and with the cache."""

Observed = Mapping[int, Mapping[Cell, Sequence[Observation]]]


def effects_of(periods: Sequence[Period], *, seed: int) -> list[Effect]:
    """Return the effect of each cache on everything that was measured with and without it."""
    observed = observe_all(periods)
    found: list[Effect] = []
    compared = dict.fromkeys(
        (period.plan.base, other)
        for period in periods
        for other in period.plan.others
        if not period.plan.is_aa
    )
    cells = dict.fromkeys(cell for by_cell in observed.values() for cell in by_cell)
    for base, other in compared:
        mine = [p for p in periods if p.plan.base == base and p.plan.compares(other)]
        for cell in cells:
            effect = paired_effect(_pairs(mine, observed, cell), cell, seed)
            if effect is not None:
                noise, source = noise_of(periods, observed, cell, base=base, seed=seed)
                found.append(
                    msgspec.structs.replace(
                        effect,
                        base=base,
                        other=other,
                        noise=noise,
                        noise_source=source,
                        verdict=judge(effect.ratio, noise),
                    )
                )
    return found


def noise_floor(periods: Sequence[Period], *, seed: int) -> list[Effect]:
    """Return the same figures for the A/A rounds, in which nothing was changed."""
    observed = observe_all(periods)
    found: list[Effect] = []
    for base in dict.fromkeys(period.plan.base for period in periods):
        mine = [p for p in periods if p.plan.is_aa and p.plan.base == base]
        for cell in dict.fromkeys(cell for p in mine for cell in observed[p.plan.number]):
            effect = paired_effect(_pairs(mine, observed, cell), cell, seed)
            if effect is not None:
                found.append(msgspec.structs.replace(effect, base=base, other=base))
    return found


def judge(ratio: Estimate, noise: Interval | None) -> Verdict:
    """Return whether a ratio lies beyond noise with the whole of its interval."""
    interval = ratio.interval
    if interval is None:
        return "within noise"
    bound = 1.0 if noise is None else max(1.0, noise.high, 1 / noise.low)
    if interval.low > bound:
        return "faster"
    return "slower" if interval.high < 1 / bound else "within noise"


def noise_of(
    periods: Sequence[Period], observed: Observed, cell: Cell, *, base: str, seed: int
) -> tuple[Interval | None, NoiseSource]:
    """Return the interval of the ratio between periods that all ran with ``base``."""
    same = [p for p in periods if p.plan.is_aa and p.plan.base == base]
    effect = paired_effect(_pairs(same, observed, cell), cell, seed)
    source: NoiseSource = "A/A rounds"
    if effect is None:
        effect = paired_effect(_outer_pairs(periods, observed, cell, base), cell, seed)
        source = "OFF periods"
    if effect is None or effect.ratio.interval is None:
        return None, "none"
    return effect.ratio.interval, source


def _pairs(periods: Sequence[Period], observed: Observed, cell: Cell) -> list[Pair]:
    by_place = {(p.plan.round, p.plan.pair, p.plan.is_other): p.plan.number for p in periods}
    found: list[Pair] = []
    for (number, pair, is_other), base in by_place.items():
        other = by_place.get((number, pair, True))
        if not is_other and other is not None:
            found.append(
                (
                    number,
                    pair,
                    values_by_key(observed, base, cell),
                    values_by_key(observed, other, cell),
                )
            )
    return found


def _outer_pairs(
    periods: Sequence[Period], observed: Observed, cell: Cell, base: str
) -> list[Pair]:
    """Return the first and the last period of each round that compares ``base``."""
    rounds: dict[int, dict[int, int]] = {}
    for period in periods:
        if period.plan.base == base and not period.plan.is_other:
            rounds.setdefault(period.plan.round, {})[period.plan.pair] = period.plan.number
    return [
        (
            number,
            0,
            values_by_key(observed, places[0], cell),
            values_by_key(observed, places[1], cell),
        )
        for number, places in rounds.items()
        if places.keys() >= {0, 1}
    ]


def values_by_key(observed: Observed, number: int, cell: Cell) -> dict[str, float]:
    """Return one period's values of a cell by prompt."""
    return {each.key: each.value for each in observed[number].get(cell, ())}


def paired_effect(pairs: Sequence[Pair], cell: Cell, seed: int) -> Effect | None:
    """Return the pooled effect, without noise and verdict; None where no prompt is paired."""
    with_prompts = [pair for pair in pairs if pair[2].keys() & pair[3].keys()]
    if not with_prompts:
        return None
    values = [_paired(pair) for pair in with_prompts]
    ratios = [base / other for base, other in values]
    return Effect(
        group=cell.group,
        part=cell.part,
        metric=cell.metric,
        base="",
        other="",
        num_prompts=sum(map(len, ratios)),
        base_median_ms=float(np.median(np.concatenate([base for base, _ in values]))),
        other_median_ms=float(np.median(np.concatenate([other for _, other in values]))),
        ratio=estimate_median(ratios, seed=seed),
        saved_ms=estimate_median([base - other for base, other in values], seed=seed),
        pairs=[
            PairEffect(
                round=pair[0],
                pair=pair[1],
                num_prompts=len(ratio),
                ratio=estimate_median([ratio], seed=seed),
            )
            for pair, ratio in zip(with_prompts, ratios, strict=True)
        ],
        noise=None,
        noise_source="none",
        verdict="within noise",
    )


def _paired(pair: Pair) -> tuple[Values, Values]:
    _, _, base, other = pair
    keys = [key for key in base if key in other]
    return np.array([base[key] for key in keys]), np.array([other[key] for key in keys])
