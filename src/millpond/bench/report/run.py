"""A run as its plots need it: which requests go together, in which colour, and where."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from millpond.bench.analysis import Analysis
from millpond.bench.records import Period, Record, Sample
from millpond.bench.scenario import Mixed
from millpond.bench.workloads import Role

ROLES: Final[Mapping[Role, str]] = {
    "moved": "moved requests",
    "cold": "cold requests",
    "local": "requests that stayed",
    "any": "requests",
}
_COLOURS: Final = 4
"""That the style has."""
_MS_PER_S: Final = 1000
_GAP: Final = 0.05
_ROUND_GAP: Final = 0.25
"""Between two periods and between two rounds, as shares of a period's width."""

Request = tuple[Period, Sample]


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of the x axis of length 1, which stands for ``length_ms``."""

    begin: float
    length_ms: float

    @property
    def ends(self) -> tuple[float, float]:
        """Begin and end."""
        return self.begin, self.begin + 1

    def place(self, at_ms: float) -> float:
        """Return where a time since the period's begin is."""
        return self.begin + at_ms / self.length_ms


@dataclass(frozen=True)
class Run:
    """A record and its analysis, as the plots need them."""

    record: Record
    analysis: Analysis

    @cached_property
    def colours(self) -> dict[str, str]:
        """A class of colour for each cache."""
        caches = dict.fromkeys(
            cache
            for period in self.record.periods
            for cache in (period.plan.base, *period.plan.others)
        )
        return {cache: f"c{number % _COLOURS}" for number, cache in enumerate(caches)}

    @cached_property
    def panels(self) -> dict[tuple[str, Role], list[Request]]:
        """All requests by what is plotted together, moved ones first; shares of a mix are one."""
        mixed = {each.name for each in self.record.scenario.workload if isinstance(each, Mixed)}
        found: dict[tuple[str, Role], list[Request]] = {}
        for period in self.record.periods:
            for sample in period.samples:
                workload = workload_of(sample.group)
                group = workload if workload in mixed else sample.group
                found.setdefault((group, sample.role), []).append((period, sample))
        order = list(ROLES)
        return dict(sorted(found.items(), key=lambda item: order.index(item[0][1])))

    @cached_property
    def bands(self) -> dict[int, Band]:
        """Where each period is drawn: side by side, each as wide as the next.

        Those with a cache that answers faster are shorter, and would be slits. Of one cache all
        have the same scale, so that one that was interrupted fills its part only.
        """
        longest: dict[str, float] = {}
        for period in self.record.periods:
            begins = (sample.start_ms for sample in period.samples)
            length = max([_MS_PER_S * period.duration_s, *begins, 1.0])
            longest[period.plan.cache] = max(length, longest.get(period.plan.cache, 0.0))
        found: dict[int, Band] = {}
        at, last_round = 0.0, None
        for period in self.record.periods:
            plan = period.plan
            at += 0.0 if last_round is None else _GAP if last_round == plan.round else _ROUND_GAP
            found[plan.number] = Band(at, longest[plan.cache])
            at, last_round = at + 1, plan.round
        return found


def workload_of(group: str) -> str:
    """Return the workload's name, which has no space in it."""
    return group.partition(" ")[0]


def ttft_of(sample: Sample) -> float | None:
    """Return the TTFT that is in figures; None for a failed request and one without a token."""
    return None if sample.error is not None else sample.ttft_ms
