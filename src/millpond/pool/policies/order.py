"""Slots in the order of a time: the bookkeeping that all policies share."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator

_SLOT_BITS = 32
_SLOT_MASK = 2**_SLOT_BITS - 1
_GARBAGE_MIN = 1024
"""Stale heap entries that are not worth a rebuild."""


class Order:
    """A set of slots, of which the one with the earliest time can be had; of equals, the lowest.

    A heap of ``last_use_ns << 32 | slot`` with lazy deletion: one int for an entry instead of a
    tuple of two keeps a million slots at about 60 bytes each. An entry counts only while the
    slot is a member with just that time. All operations are O(log n) amortised.
    """

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._is_member = bytearray()
        self._last_use_ns: array[int] = array("Q")
        self._num_members = 0

    def add(self, slot: int, last_use_ns: int) -> None:
        """Make ``slot`` a member, or move it to another time."""
        missing = slot + 1 - len(self._is_member)
        if missing > 0:
            self._is_member.extend(bytes(missing))
            self._last_use_ns.frombytes(bytes(8 * missing))
        if self._is_member[slot]:
            if self._last_use_ns[slot] == last_use_ns:
                return
        else:
            self._is_member[slot] = 1
            self._num_members += 1
        self._last_use_ns[slot] = last_use_ns
        heapq.heappush(self._heap, last_use_ns << _SLOT_BITS | slot)
        if len(self._heap) > 2 * self._num_members + _GARBAGE_MIN:
            self._rebuild()

    def discard(self, slot: int) -> None:
        """Take ``slot`` out, if it is a member."""
        if slot < len(self._is_member) and self._is_member[slot]:
            self._is_member[slot] = 0
            self._num_members -= 1

    def first(self) -> int | None:
        """Return the member with the earliest time, None where there is no member."""
        heap = self._heap
        while heap:
            slot = heap[0] & _SLOT_MASK
            if self._is_member[slot] and self._last_use_ns[slot] == heap[0] >> _SLOT_BITS:
                return slot
            heapq.heappop(heap)
        return None

    def clear(self) -> None:
        """Take every slot out."""
        self._heap.clear()
        self._is_member = bytearray(len(self._is_member))
        self._num_members = 0

    def __contains__(self, slot: int) -> bool:
        return slot < len(self._is_member) and self._is_member[slot] == 1

    def __iter__(self) -> Iterator[int]:
        return (slot for slot, is_member in enumerate(self._is_member) if is_member)

    def __len__(self) -> int:
        return self._num_members

    def _rebuild(self) -> None:
        self._heap = [self._last_use_ns[slot] << _SLOT_BITS | slot for slot in self]
        heapq.heapify(self._heap)
