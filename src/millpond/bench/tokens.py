"""Where prompts came from, and whose word that is.

The router's access log is asked first, for it saw the request: but only where it says that a
replica reported it. Else the replica's report to the pool counts, else the engine's own count.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from millpond.bench.records import OFF, Period, Sample, Sources

Teller = Literal["router", "pool", "engine", "nobody"]
TELLERS: Final[Mapping[Teller, str]] = {
    "router": "the router's access log",
    "pool": "the replicas' reports to the pool",
    "engine": "the engines' own count",
    "nobody": "nobody",
}


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompts of one group and role came from under one cache.

    ``own`` and ``other`` were loaded from the pool: what the reader itself had written, and
    what another replica had. ``found`` an engine did not compute and does not say where it was,
    its own cache or another one. ``unknown`` are those of requests that nobody told of. Of
    ``num_routed`` requests the router says whether another replica held the longest prefix:
    ``num_moved`` of them.
    """

    group: str
    part: str
    cache: str
    computed: int = 0
    local: int = 0
    own: int = 0
    other: int = 0
    found: int = 0
    unknown: int = 0
    num_routed: int = 0
    num_moved: int = 0

    @property
    def total(self) -> int:
        """All tokens."""
        return self.computed + self.local + self.own + self.other + self.found + self.unknown


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Who told of how many requests, and whether the router and the pool agree.

    Of ``num_both`` requests both have told, of ``num_different`` not the same; the differences
    are of tokens, summed up without their signs.
    """

    requests: dict[Teller, int]
    num_both: int
    num_different: int
    computed_difference: int
    loaded_difference: int


def tokens_of(periods: Sequence[Period]) -> list[Tokens]:
    """Return the tokens of each group and role under each cache, of requests that were answered."""
    totals: dict[tuple[str, str, str], Counter[str]] = {}
    for period in periods:
        cache = period.plan.cache
        for sample in period.samples:
            if sample.error is not None:
                continue
            total = totals.setdefault((sample.group, sample.role, cache), Counter())
            total.update(_counts(sample, cache))
            if sample.routed is not None:
                total["num_routed"] += 1
                total["num_moved"] += sample.routed.is_moved
    return [
        Tokens(group=group, part=part, cache=cache, **counts)
        for (group, part, cache), counts in totals.items()
    ]


def told_of(samples: Iterable[Sample]) -> Told:
    """Return who told, of requests that were answered."""
    requests: Counter[Teller] = Counter()
    both: list[tuple[Sources, Sources]] = []
    for sample in samples:
        if sample.error is not None:
            continue
        requests[_teller(sample)] += 1
        routed = _routed(sample)
        if routed is not None and sample.sources is not None:
            both.append((routed, sample.sources))
    return Told(
        requests=dict(requests),
        num_both=len(both),
        num_different=sum(one != other for one, other in both),
        computed_difference=sum(abs(r.computed_tokens - p.computed_tokens) for r, p in both),
        loaded_difference=sum(abs(r.loaded_tokens - p.loaded_tokens) for r, p in both),
    )


def _routed(sample: Sample) -> Sources | None:
    return None if sample.routed is None else sample.routed.sources


def _teller(sample: Sample) -> Teller:
    if _routed(sample) is not None:
        return "router"
    if sample.sources is not None:
        return "pool"
    return "nobody" if sample.cached_tokens is None else "engine"


def _counts(sample: Sample, cache: str) -> Mapping[str, int]:
    sources, cached = _routed(sample) or sample.sources, sample.cached_tokens
    if sources is None and cached is None:
        return {"unknown": sample.input_tokens}
    if sources is None:
        # With no other cache all that an engine has found is its own.
        where = "local" if cache == OFF else "found"
        return {"computed": sample.input_tokens - (cached or 0), where: cached or 0}
    own = sources.writers.get(sample.replica, 0)
    return {
        "computed": sources.computed_tokens,
        "local": sources.local_tokens,
        "own": own,
        "other": sources.loaded_tokens - own,
    }
