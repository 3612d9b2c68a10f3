"""Which blocks that a request offers are stored."""

from __future__ import annotations

from array import array
from typing import Final

NUM_KEYS_REMEMBERED: Final = 2**20
"""More blocks than a machine's memory holds: a million blocks of 256 tokens, at 12 KiB a token
(a model of half a billion weights), are 3 TiB."""


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

    A table with a cell for each remembered key and who offered it first; a key that falls into
    a cell that is taken replaces the one there. So the memory is bounded, 16 bytes a cell, and
    a key is remembered for about as many new ones as there are cells.
    """

    def __init__(self, num_cells: int = NUM_KEYS_REMEMBERED) -> None:
        self._num_cells = num_cells
        self.clear()

    def clear(self) -> None:
        self._keys: array[int] = array("Q", bytes(8 * self._num_cells))
        self._requests: array[int] = array("Q", bytes(8 * self._num_cells))

    def admit(self, keys: array[int], request: int) -> int:
        remembered, requests, num_cells = self._keys, self._requests, self._num_cells
        num_admitted = 0
        for number, key in enumerate(keys):
            cell = key % num_cells
            if remembered[cell] != key:
                remembered[cell] = key
                requests[cell] = request
            elif requests[cell] != request and num_admitted == number:
                num_admitted += 1
        return num_admitted

    def statistics(self) -> dict[str, int]:
        return {"num_cells": self._num_cells}
