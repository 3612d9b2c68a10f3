"""Two records side by side: the same cache in both, paired by prompt."""

from collections.abc import Iterable, Sequence

import msgspec

from millpond.bench.effects import Compared, Pair, Verdict, judge, noise_of, paired_effects
from millpond.bench.observations import cells_of, observe_all, values_by_key
from millpond.bench.records import Period, Plan
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

    Periods of the same cache in the same place of a round are paired, whichever other caches
    either run had beside it. A cache that only one of them had is left out.
    """
    observed_a, observed_b = observe_all(a), observe_all(b)
    places = {_place(period.plan): period.plan.number for period in b}
    shared = [(each.plan, places[place]) for each in a if (place := _place(each.plan)) in places]
    pairs: dict[Compared, list[Pair]] = {}
    for cell in cells_of(observed_a):
        for plan, number in shared:
            values_a = values_by_key(observed_a, plan.number, cell)
            values_b = values_by_key(observed_b, number, cell)
            row = Compared(cell, plan.cache, plan.cache)
            pairs.setdefault(row, []).append(Pair(plan.round, plan.pair, values_a, values_b))
    effects = paired_effects(pairs, seed=seed)
    noises = [
        (noise_of(periods, observed, seed=seed), periods[0].plan.base)
        for periods, observed in ((a, observed_a), (b, observed_b))
        if periods
    ]
    found: list[Difference] = []
    for row, effect in effects.items():
        noise = _widest(each.interval(row.cell, base) for each, base in noises)
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
                verdict=judge(effect, noise),
            )
        )
    if not found:
        raise ConfigError(
            "the two records have no prompt in common: compare runs of the same scenario, seed "
            "and design"
        )
    return found


def _place(plan: Plan) -> tuple[int, int, bool, str]:
    """Return where a period stands, whichever caches its round has beside its own."""
    return plan.round, plan.pair, plan.is_other, plan.cache


def _widest(intervals: Iterable[Interval | None]) -> Interval | None:
    widest: Interval | None = None
    for interval in intervals:
        widest = interval if widest is None else widest.union(interval)
    return widest
