"""The fewest requests, whatever they hold."""

from collections.abc import Sequence

from millpond.router.placement.base import Asked, ReplicaLoad, available, least_loaded


class LeastLoaded:
    """Takes the replica with the fewest requests, then the shortest queue, then by name."""

    def choose(self, asked: Asked, replicas: Sequence[ReplicaLoad]) -> str | None:  # noqa: ARG002 (interface)
        chosen = least_loaded(available(replicas))
        return None if chosen is None else chosen.name
