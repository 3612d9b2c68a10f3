"""Which blocks that a request offers are stored."""

from __future__ import annotations

from array import array
from typing import Final

NUM_KEYS_REMEMBERED: Final = 2**18
"""As many blocks as 4 TiB of memory hold of a model with 64 KiB a token; at most twice as many
are remembered, in 100 bytes each."""


class AlwaysAdmit:
    """Stores whatever there is room for."""

    def admit(self, keys: array[int], request: int) -> int:  # noqa: ARG002 (interface)
        return len(keys)

    def clear(self) -> None:
        pass

    def statistics(self) -> dict[str, int]:
        return {}


class SecondTouch:
    """Stores a block when another request had offered it before.

    Remembers who offered a key first, in two generations: when the young one has ``num_keys``
    it becomes the old one, and what was old is forgotten unless it was asked for meanwhile.
    So the memory is bounded, and of a long prefix either all is remembered or none: a single
    key that went lost would end the prefix there.
    """

    def __init__(self, num_keys: int = NUM_KEYS_REMEMBERED) -> None:
        self._num_keys = num_keys
        self.clear()

    def clear(self) -> None:
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def admit(self, keys: array[int], request: int) -> int:
        if len(self._young) + len(keys) > self._num_keys:
            self._young, self._old = {}, self._young
        young, old = self._young, self._old
        num_admitted = 0
        for number, key in enumerate(keys):
            first_request = young.get(key)
            if first_request is None:
                first_request = young[key] = old.get(key, request)
            if first_request != request and num_admitted == number:
                num_admitted += 1
        return num_admitted

    def statistics(self) -> dict[str, int]:
        return {"num_remembered": len(self._young) + len(self._old)}
