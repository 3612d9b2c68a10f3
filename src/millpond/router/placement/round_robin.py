"""One after the other, whatever they hold."""

from collections.abc import Sequence

from millpond.router.placement.base import Asked, ReplicaLoad, available, next_after


class RoundRobin:
    """Goes round the available replicas in the order of their names."""

    def __init__(self) -> None:
        self._last: str | None = None

    def choose(self, asked: Asked, replicas: Sequence[ReplicaLoad]) -> str | None:  # noqa: ARG002 (interface)
        chosen = next_after(self._last, available(replicas))
        if chosen is not None:
            self._last = chosen
        return chosen
