"""A conversation stays where it is, for as long as its replica is there."""

from collections.abc import Sequence

from millpond.router.placement.base import (
    Asked,
    ReplicaLoad,
    available,
    least_loaded,
    rendezvous,
)


class Pinned:
    """Places by what the client names (header, cookie or ``user``), and nothing else.

    Without a name a request goes to the least loaded replica. Nothing is remembered: a
    restarted router places as before.
    """

    def choose(self, asked: Asked, replicas: Sequence[ReplicaLoad]) -> str | None:
        candidates = available(replicas)
        if asked.conversation is not None:
            return rendezvous(asked.conversation, candidates)
        chosen = least_loaded(candidates)
        return None if chosen is None else chosen.name
