"""What a cache changed: the ratio of times without and with it, paired by prompt.

A pair is one period without the cache and its neighbour with it, OFF-ON or ON-OFF. For each
prompt that both have answered, the ratio is time without / time with: 2 means twice as fast.
The noise floor is the same figure between periods that do not differ: A/A rounds, or where
there are none the two OFF periods of each round, which lie furthest apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import msgspec
import numpy as np

from millpond.bench.observations import Cell, Observed, cells_of, values_by_key
from millpond.bench.records import Period
from millpond.bench.resampling import Values
from millpond.bench.statistics import Estimate, Interval, estimate_medians

Verdict = Literal["faster", "slower", "within noise", "too few prompts"]
BEYOND: Final[tuple[Verdict, ...]] = ("faster", "slower")
PROMPTS_MIN: Final = 6
"""The least n whose extremes hold the median between them with 95 %: with 1 - 2 / 2**n."""
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
    A prompt counts in each pair, and only once in ``num_distinct_prompts``.
    """

    group: str
    part: str
    metric: str
    base: str
    other: str
    num_prompts: int
    num_distinct_prompts: int
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


class Compared(NamedTuple):
    """A row of a report under two caches."""

    cell: Cell
    base: str
    other: str


class Pair(NamedTuple):
    """The half ``pair`` of a round: values by prompt without and with the cache."""

    round: int
    pair: int
    base: Mapping[str, float]
    other: Mapping[str, float]

    def prompts(self) -> set[tuple[int, str]]:
        """Return the prompts that both have; each round has its own."""
        return {(self.round, key) for key in self.base.keys() & self.other.keys()}

    def values(self) -> tuple[Values, Values]:
        """Return the values of prompts that both have, in the same order."""
        keys = [key for key in self.base if key in self.other]
        return (
            np.array([self.base[key] for key in keys]),
            np.array([self.other[key] for key in keys]),
        )


@dataclass(frozen=True, slots=True)
class Noise:
    """What periods differ by that all ran with the same cache.

    ``effects`` are those of the A/A rounds. ``known`` has the interval of a row under a base.
    """

    effects: Sequence[Effect]
    known: Mapping[tuple[Cell, str], tuple[Interval, NoiseSource]]

    def interval(self, cell: Cell, base: str) -> Interval | None:
        """Return the interval, or None where nothing tells."""
        found = self.known.get((cell, base))
        return None if found is None else found[0]


def effects_of(
    periods: Sequence[Period], observed: Observed, noise: Noise, *, seed: int
) -> list[Effect]:
    """Return the effect of each cache on everything that was measured with and without it."""
    cells = cells_of(observed)
    compared: dict[Compared, list[Pair]] = {}
    for base, other in dict.fromkeys(
        (period.plan.base, other)
        for period in periods
        for other in period.plan.others
        if not period.plan.is_aa
    ):
        mine = [p for p in periods if p.plan.base == base and p.plan.compares(other)]
        for cell in cells:
            compared[Compared(cell, base, other)] = _pairs(mine, observed, cell)
    return [
        _judged(effect, noise.known.get((row.cell, row.base)))
        for row, effect in paired_effects(compared, seed=seed).items()
    ]


def _judged(effect: Effect, noise: tuple[Interval, NoiseSource] | None) -> Effect:
    interval, source = noise or (None, "none")
    verdict = judge(effect, interval)
    return msgspec.structs.replace(effect, noise=interval, noise_source=source, verdict=verdict)


def judge(effect: Effect, noise: Interval | None) -> Verdict:
    """Return whether a ratio lies beyond noise with the whole of its interval."""
    interval = effect.ratio.interval
    if interval is None or effect.num_distinct_prompts < PROMPTS_MIN:
        return "too few prompts"
    bound = noise_bound(noise)
    if interval.low > bound:
        return "faster"
    return "slower" if interval.high < 1 / bound else "within noise"


def noise_bound(noise: Interval | None) -> float:
    """Return how many times faster or slower is no more than noise."""
    return 1.0 if noise is None else max(1.0, noise.high, 1 / noise.low)


def noise_of(periods: Sequence[Period], observed: Observed, *, seed: int) -> Noise:
    """Return the noise by the A/A rounds, and by the OFF periods of a row that has none."""
    cells = cells_of(observed)
    bases = dict.fromkeys(period.plan.base for period in periods)
    same: dict[Compared, list[Pair]] = {}
    outer: dict[Compared, list[Pair]] = {}
    for base in bases:
        in_aa = [p for p in periods if p.plan.is_aa and p.plan.base == base]
        for cell in cells:
            row = Compared(cell, base, base)
            same[row] = _pairs(in_aa, observed, cell)
            if not any(map(_has_prompts, same[row])):
                outer[row] = _outer_pairs(periods, observed, cell, base)
    by_aa = paired_effects(same, seed=seed)
    sources: tuple[tuple[NoiseSource, Mapping[Compared, Effect]], ...] = (
        ("A/A rounds", by_aa),
        ("OFF periods", paired_effects(outer, seed=seed)),
    )
    known: dict[tuple[Cell, str], tuple[Interval, NoiseSource]] = {
        (row.cell, row.base): (effect.ratio.interval, source)
        for source, effects in sources
        for row, effect in effects.items()
        if effect.ratio.interval is not None
    }
    return Noise(list(by_aa.values()), known)


def _has_prompts(pair: Pair) -> bool:
    return not pair.base.keys().isdisjoint(pair.other)


def _pairs(periods: Sequence[Period], observed: Observed, cell: Cell) -> list[Pair]:
    by_place = {(p.plan.round, p.plan.pair, p.plan.is_other): p.plan.number for p in periods}
    found: list[Pair] = []
    for (number, pair, is_other), base in by_place.items():
        other = by_place.get((number, pair, True))
        if not is_other and other is not None:
            values = (values_by_key(observed, each, cell) for each in (base, other))
            found.append(Pair(number, pair, *values))
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
        Pair(number, 0, *(values_by_key(observed, places[half], cell) for half in (0, 1)))
        for number, places in rounds.items()
        if places.keys() >= {0, 1}
    ]


def paired_effects(
    compared: Mapping[Compared, Iterable[Pair]], *, seed: int
) -> dict[Compared, Effect]:
    """Return pooled effects, without noise and verdict; none where no prompt is paired."""
    pairs = {row: list(filter(_has_prompts, each)) for row, each in compared.items()}
    values = {row: [pair.values() for pair in each] for row, each in pairs.items() if each}
    measures: dict[tuple[Compared, str | int], list[Values]] = {}
    for row, both in values.items():
        ratios = [base / other for base, other in both]
        measures[row, "ratio"] = ratios
        measures[row, "saved"] = [base - other for base, other in both]
        measures |= {(row, number): [ratio] for number, ratio in enumerate(ratios)}
    estimates = estimate_medians(measures, seed=seed)
    return {
        row: Effect(
            group=row.cell.group,
            part=row.cell.part,
            metric=row.cell.metric,
            base=row.base,
            other=row.other,
            num_prompts=sum(len(base) for base, _ in both),
            num_distinct_prompts=len({key for pair in pairs[row] for key in pair.prompts()}),
            base_median_ms=float(np.median(np.concatenate([base for base, _ in both]))),
            other_median_ms=float(np.median(np.concatenate([other for _, other in both]))),
            ratio=estimates[row, "ratio"],
            saved_ms=estimates[row, "saved"],
            pairs=[
                PairEffect(
                    round=pair.round,
                    pair=pair.pair,
                    num_prompts=len(both[number][0]),
                    ratio=estimates[row, number],
                )
                for number, pair in enumerate(pairs[row])
            ],
            noise=None,
            noise_source="none",
            verdict="too few prompts",
        )
        for row, both in values.items()
    }
