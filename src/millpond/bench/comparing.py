"""Two records side by side: the same cache in both, paired by prompt."""

from collections.abc import Sequence

import msgspec

from millpond.bench.effects import Pair, Verdict, judge, noise_of, paired_effect, values_by_key
from millpond.bench.observations import observe_all
from millpond.bench.records import Period
from millpond.bench.statistics import Estimate, Interval
from millpond.model.errors import ConfigError


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Time of A over time of B: above 1, B is faster. ``noise`` is the wider of both runs'."""

    group: str
    part: str
    metric: str
    cache: str
    num_prompts: int
    a_median_ms: float
    b_median_ms: float
    ratio: Estimate
    noise: Interval | None
    verdict: Verdict


def compare(a: Sequence[Period], b: Sequence[Period], *, seed: int = 1) -> list[Difference]:
    """Return all differences; raises ``ConfigError`` where the two asked no prompt alike.

    Periods of the same number and cache are paired: a run and its repetition.
    """
    observed_a, observed_b = observe_all(a), observe_all(b)
    plans_b = [period.plan for period in b]
    shared = [period.plan for period in a if period.plan in plans_b]
    found: list[Difference] = []
    cells = dict.fromkeys(cell for by_cell in observed_a.values() for cell in by_cell)
    for cell in cells:
        for cache in dict.fromkeys(plan.cache for plan in shared):
            pairs: list[Pair] = [
                (
                    plan.round,
                    plan.position,
                    values_by_key(observed_a, plan.number, cell),
                    values_by_key(observed_b, plan.number, cell),
                )
                for plan in shared
                if plan.cache == cache
            ]
            effect = paired_effect(pairs, cell, seed)
            if effect is None:
                continue
            noise = _wider(
                noise_of(a, observed_a, cell, base=shared[0].base, seed=seed)[0],
                noise_of(b, observed_b, cell, base=shared[0].base, seed=seed)[0],
            )
            found.append(
                Difference(
                    group=cell.group,
                    part=cell.part,
                    metric=cell.metric,
                    cache=cache,
                    num_prompts=effect.num_prompts,
                    a_median_ms=effect.base_median_ms,
                    b_median_ms=effect.other_median_ms,
                    ratio=effect.ratio,
                    noise=noise,
                    verdict=judge(effect.ratio, noise),
                )
            )
    if not found:
        raise ConfigError(
            "the two records have no prompt in common: compare runs of the same scenario, seed "
            "and design"
        )
    return found


def _wider(one: Interval | None, other: Interval | None) -> Interval | None:
    return other if one is None else one.union(other)
