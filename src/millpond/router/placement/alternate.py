"""Each turn of a conversation on another replica: the worst case for private caches."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from millpond.router.placement.base import Asked, ReplicaLoad, available, next_after
from millpond.router.placement.round_robin import RoundRobin

CONVERSATIONS_MAX: Final = 100_000


class Alternate:
    """Moves a conversation on with each request; new ones begin one after the other.

    A request that names no conversation is told apart by how its prompt opens. Remembers the
    latest CONVERSATIONS_MAX conversations.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, str] = OrderedDict()
        self._first = RoundRobin()

    def choose(self, asked: Asked, replicas: Sequence[ReplicaLoad]) -> str | None:
        conversation = asked.conversation or asked.opening
        last = None if conversation is None else self._last.get(conversation)
        if last is None:
            chosen = self._first.choose(asked, replicas)
        else:
            chosen = next_after(last, available(replicas))
        if chosen is not None and conversation is not None:
            self._last[conversation] = chosen
            self._last.move_to_end(conversation)
            if len(self._last) > CONVERSATIONS_MAX:
                self._last.popitem(last=False)
        return chosen
