"""Two records side by side: the same cache in both, paired by prompt."""

from collections.abc import Sequence

import msgspec

from millpond.bench.effects import Compared, Pair, Verdict, judge, noise_of, paired_effects
from millpond.bench.observations import cells_of, observe_all, values_by_key
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
    pairs: dict[Compared, list[Pair]] = {}
    for cell in cells_of(observed_a):
        for plan in shared:
            values = (values_by_key(each, plan.number, cell) for each in (observed_a, observed_b))
            row = Compared(cell, plan.cache, plan.cache)
            pairs.setdefault(row, []).append(Pair(plan.round, plan.position, *values))
    effects = paired_effects(pairs, seed=seed)
    noises = [noise_of(*each, seed=seed) for each in ((a, observed_a), (b, observed_b))]
    found: list[Difference] = []
    for row, effect in effects.items():
        noise = _wider(*(each.interval(row.cell, shared[0].base) for each in noises))
        found.append(
            Difference(
                group=row.cell.group,
                part=row.cell.part,
                metric=row.cell.metric,
                cache=row.other,
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
