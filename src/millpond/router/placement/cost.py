"""The earliest first token: queue, and the cheapest way to the prefix."""

from collections.abc import Sequence

from millpond.router.placement.base import Asked, ReplicaLoad, available
from millpond.router.placement.estimates import Estimates, Work


def work_of(asked: Asked, replica: ReplicaLoad, estimates: Estimates) -> Work:
    """Return the work of a request on a replica, by the cheapest of local hit, load, prefill."""
    local = min(asked.local_tokens.get(replica.name, 0), asked.num_tokens)
    pooled = max(local, min(asked.pooled_tokens, asked.num_tokens))
    computing = Work(replica.queued_tokens, asked.num_tokens - local, 0)
    loading = Work(replica.queued_tokens, asked.num_tokens - pooled, pooled - local)
    return min(computing, loading, key=estimates.predict_s)


class Cost:
    """Takes the replica whose first token is predicted to come first.

    Of equals, the one with the fewest requests. ``estimates`` may be shared with whoever
    measures: what they learn counts for the next choice.
    """

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates

    def choose(self, asked: Asked, replicas: Sequence[ReplicaLoad]) -> str | None:
        chosen = min(
            available(replicas),
            key=lambda each: (
                self._estimates.predict_s(work_of(asked, each, self._estimates)),
                each.num_running,
                each.name,
            ),
            default=None,
        )
        return None if chosen is None else chosen.name
