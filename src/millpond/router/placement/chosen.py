"""The policies by the names under which they are configured."""

import enum
from collections.abc import Callable
from typing import Final

from millpond.router.placement.alternate import Alternate
from millpond.router.placement.base import Placement
from millpond.router.placement.cost import Cost
from millpond.router.placement.estimates import Estimates
from millpond.router.placement.least_loaded import LeastLoaded
from millpond.router.placement.pinned import Pinned
from millpond.router.placement.prefix_affinity import PrefixAffinity
from millpond.router.placement.round_robin import RoundRobin


class Policy(enum.StrEnum):
    """Names of the policies."""

    ROUND_ROBIN = "round-robin"
    ALTERNATE = "alternate"
    PINNED = "pinned"
    LEAST_LOADED = "least-loaded"
    PREFIX_AFFINITY = "prefix-affinity"
    COST = "cost"


_FACTORIES: Final[dict[Policy, Callable[[Estimates], Placement]]] = {
    Policy.ROUND_ROBIN: lambda _: RoundRobin(),
    Policy.ALTERNATE: lambda _: Alternate(),
    Policy.PINNED: lambda _: Pinned(),
    Policy.LEAST_LOADED: lambda _: LeastLoaded(),
    Policy.PREFIX_AFFINITY: lambda _: PrefixAffinity(),
    Policy.COST: Cost,
}


def make_placement(policy: Policy, estimates: Estimates) -> Placement:
    """Return a new policy; ``estimates`` are what ``cost`` predicts with."""
    return _FACTORIES[policy](estimates)
