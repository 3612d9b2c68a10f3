"""A bounded memory of keys that have left."""

from __future__ import annotations

from array import array
from typing import Final

_CAPACITY_MIN: Final = 1024
_CELLS_PER_KEY: Final = 2


def short_key(key: bytes) -> int:
    """Return the 64-bit number, never 0, that stands for a key in memories of keys."""
    return int.from_bytes(key[:8], "little") or 1


class Ghosts:
    """The keys put in last, in order, as 64-bit numbers that are not 0; 16 bytes for each.

    A ring of keys, and a table of cells that say where in the ring a key should be. Two keys
    that share a cell hide each other: then the earlier one is forgotten too soon, which costs
    a policy some accuracy and nobody anything else.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget every key."""
        self._resize(_CAPACITY_MIN)

    def make_room(self, num_keys: int) -> None:
        """Be able to remember ``num_keys``; without it, the oldest go to make room."""
        if num_keys > len(self._ring):
            ring, start, end = self._ring, self._start, self._end
            self._resize(max(num_keys, 2 * len(ring)))
            for place in range(start, end):
                if key := ring[place % len(ring)]:
                    self.put(key)

    def put(self, key: int) -> None:
        """Remember ``key`` as the youngest."""
        if self._end - self._start == len(self._ring):
            self._drop_oldest()
        place = self._end % len(self._ring)
        self._ring[place] = key
        self._cells[key % len(self._cells)] = place
        self._end += 1
        self._num_keys += 1

    def take(self, key: int) -> bool:
        """Forget ``key``; return whether it was remembered."""
        place = self._cells[key % len(self._cells)]
        if self._ring[place] != key:
            return False
        self._ring[place] = 0
        self._num_keys -= 1
        return True

    def trim(self, num_max: int) -> None:
        """Forget the oldest keys beyond ``num_max``."""
        while self._num_keys > num_max:
            self._drop_oldest()

    def __len__(self) -> int:
        return self._num_keys

    def _drop_oldest(self) -> None:
        place = self._start % len(self._ring)
        if self._ring[place]:
            self._ring[place] = 0
            self._num_keys -= 1
        self._start += 1

    def _resize(self, capacity: int) -> None:
        self._ring: array[int] = array("Q", bytes(8 * capacity))
        self._cells: array[int] = array("I", bytes(4 * _CELLS_PER_KEY * capacity))
        self._start = self._end = self._num_keys = 0
