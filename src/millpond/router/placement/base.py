"""What a policy is asked and what it knows of the replicas; what several policies share."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

_NONE: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to place.

    ``conversation`` is who the client says it belongs to; ``opening`` is what its prompt begins
    with and stands in for that where a policy can do with a guess. ``local_tokens`` are those
    of its prefix that each replica is thought to hold, ``pooled_tokens`` those in the pool.
    """

    num_tokens: int
    conversation: str | None = None
    opening: str | None = None
    local_tokens: Mapping[str, int] = field(default_factory=lambda: _NONE)
    pooled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica at the moment of asking.

    ``is_available``: ready, and neither draining nor left out for this request.
    ``queued_tokens`` are still to be computed for requests that wait for their first token.
    """

    name: str
    is_available: bool
    num_running: int = 0
    queued_tokens: int = 0


class Placement(Protocol):
    """Chooses replicas. The same calls in the same order make the same choices."""

    def choose(self, asked: Asked, replicas: Sequence[ReplicaLoad]) -> str | None:
        """Return the name of an available replica; None if there is none.

        The order of ``replicas`` does not matter; their names differ.
        """
        ...


def available(replicas: Sequence[ReplicaLoad]) -> list[ReplicaLoad]:
    """Return those that may get a request, by name."""
    return sorted((each for each in replicas if each.is_available), key=lambda each: each.name)


def least_loaded(candidates: Sequence[ReplicaLoad]) -> ReplicaLoad | None:
    """Return the one with the fewest requests, of equals the one with the shortest queue."""
    return min(
        candidates, key=lambda each: (each.num_running, each.queued_tokens, each.name), default=None
    )


def next_after(name: str | None, candidates: Sequence[ReplicaLoad]) -> str | None:
    """Return the name that follows ``name`` in the circle of names; the first after None."""
    if not candidates:
        return None
    names = [each.name for each in candidates]
    return next((each for each in names if name is not None and each > name), names[0])


def within_bound(candidates: Sequence[ReplicaLoad], bound_ratio: float) -> list[ReplicaLoad]:
    """Return those who, with this request, have at most ``bound_ratio`` of the mean requests.

    The mean counts this request and is rounded up, so with ``bound_ratio`` >= 1 the least
    loaded replica is always one of them. (Mirrokni et al., Consistent Hashing with Bounded
    Loads, 2016.)
    """
    num_requests = 1 + sum(each.num_running for each in candidates)
    # Of integers and one product: -(-x // 1) rounds up.
    limit = -(-(bound_ratio * num_requests / len(candidates)) // 1) if candidates else 0
    return [each for each in candidates if each.num_running + 1 <= limit]


def rendezvous(key: str, candidates: Sequence[ReplicaLoad]) -> str | None:
    """Return the replica that ``key`` belongs to; only keys of a replica that leaves move.

    Highest random weight: Thaler and Ravishankar, 1998.
    """
    return max(
        (each.name for each in candidates),
        key=lambda name: hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest(),
        default=None,
    )
