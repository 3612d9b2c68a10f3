"""Where the longest prefix is, unless that replica has more than its share of the load."""

from collections.abc import Sequence
from typing import Final

from millpond.router.placement.base import Asked, ReplicaLoad, available, within_bound

LOAD_BOUND_RATIO: Final = 1.25


class PrefixAffinity:
    """Takes the longest local prefix among the replicas within the load bound.

    After its choice no replica that it chose has more than ``bound_ratio`` of the mean number
    of requests, rounded up: without a bound, one popular prefix draws everything to one replica.
    """

    def __init__(self, bound_ratio: float = LOAD_BOUND_RATIO) -> None:
        if bound_ratio < 1:
            raise ValueError(f"a load bound of {bound_ratio} leaves no replica, at least 1")
        self._bound_ratio = bound_ratio

    def choose(self, asked: Asked, replicas: Sequence[ReplicaLoad]) -> str | None:
        candidates = within_bound(available(replicas), self._bound_ratio)
        chosen = min(
            candidates,
            key=lambda each: (
                -asked.local_tokens.get(each.name, 0),
                each.num_running,
                each.queued_tokens,
                each.name,
            ),
            default=None,
        )
        return None if chosen is None else chosen.name
