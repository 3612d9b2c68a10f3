"""Adaptive replacement: between what was used last and what was used often.

N. Megiddo and D. S. Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
The slots are in two lists: *recent*, used once, and *frequent*, used again since; each gives up
what was used the longest ago. The share that the recent ones may have is not a setting: keys
that were evicted are remembered for a while by list, and each that comes back says that its
list was too short.

Differences, all because of prefixes: only their ends can be evicted, the use of an end counts
for all before it, and the number of slots changes as extents move. The share therefore is a
ratio, and starts in the middle instead of at 0: docs/decisions/0005-eviction.md has figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from millpond.pool.policies.ghosts import Ghosts, short_key
from millpond.pool.policies.order import Order

_ABSENT: Final = 0
_RECENT: Final = 1
_FREQUENT: Final = 2
_RECENT_RATIO_AT_START: Final = 0.5


class ArcPolicy:
    """Evicts the oldest of the recent slots while they have more than their share."""

    def __init__(self) -> None:
        self._recent = Order()
        self._frequent = Order()
        self._recent_ghosts = Ghosts()
        self._frequent_ghosts = Ghosts()
        self._list = bytearray()
        self.clear()

    def clear(self) -> None:
        for each in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            each.clear()
        self._list = bytearray(len(self._list))
        self._num_recent = 0
        self._num_frequent = 0
        self._num_slots = 0
        self._recent_ratio = _RECENT_RATIO_AT_START
        self._num_ghost_hits = 0

    # ------------------------------------------------------------ resident

    def enter(self, slot: int, key: bytes) -> None:
        missing = slot + 1 - len(self._list)
        if missing > 0:
            self._list.extend(bytes(missing))
        short = short_key(key)
        # While room is made for several at once there are fewer for a moment.
        self._num_slots = num_slots = self._num_recent + self._num_frequent + 1
        num_recent, num_frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if self._recent_ghosts.take(short):
            step = max(1.0, num_frequent / num_recent) / num_slots
            self._recent_ratio = min(1.0, self._recent_ratio + step)
        elif self._frequent_ghosts.take(short):
            step = max(1.0, num_recent / num_frequent) / num_slots
            self._recent_ratio = max(0.0, self._recent_ratio - step)
        else:
            self._list[slot] = _RECENT
            self._num_recent += 1
            return
        self._num_ghost_hits += 1
        self._list[slot] = _FREQUENT
        self._num_frequent += 1

    def leave(self, slot: int, evicted_key: bytes | None) -> None:
        kind = self._kind(slot)
        if kind == _ABSENT:
            return
        self.discard(slot)
        self._list[slot] = _ABSENT
        if kind == _RECENT:
            self._num_recent -= 1
        else:
            self._num_frequent -= 1
        if evicted_key is None:
            return
        ghosts = self._recent_ghosts if kind == _RECENT else self._frequent_ghosts
        ghosts.make_room(self._num_slots)
        ghosts.put(short_key(evicted_key))
        # Recent ones and their ghosts are at most as many as there are slots; all, twice that.
        self._recent_ghosts.trim(max(0, self._num_slots - self._num_recent))
        num_others = self._num_recent + self._num_frequent + len(self._recent_ghosts)
        self._frequent_ghosts.trim(max(0, 2 * self._num_slots - num_others))

    def touch(self, slots: Iterable[int], now_ns: int) -> None:
        is_end = True
        for slot in slots:
            kind = self._kind(slot)
            if kind == _RECENT:
                self._promote(slot, now_ns)
            elif kind == _FREQUENT and is_end and slot in self._frequent:
                self._frequent.add(slot, now_ns)
            if kind == _FREQUENT:
                return  # what is before it was used as often
            is_end = False

    def hand_up(self, slot: int, parent_slot: int) -> None:
        if self._kind(slot) == _FREQUENT and self._kind(parent_slot) == _RECENT:
            self._promote(parent_slot, 0)

    def _kind(self, slot: int) -> int:
        return self._list[slot] if slot < len(self._list) else _ABSENT

    def _promote(self, slot: int, now_ns: int) -> None:
        if slot in self._recent:
            self._recent.discard(slot)
            self._frequent.add(slot, now_ns)
        self._list[slot] = _FREQUENT
        self._num_recent -= 1
        self._num_frequent += 1

    # ------------------------------------------------------------ evictable

    def add(self, slot: int, last_use_ns: int) -> None:
        kind = self._kind(slot)
        if kind == _ABSENT:
            raise ValueError(f"slot {slot} was added without having entered")
        (self._recent if kind == _RECENT else self._frequent).add(slot, last_use_ns)

    def discard(self, slot: int) -> None:
        self._recent.discard(slot)
        self._frequent.discard(slot)

    def victim(self) -> int | None:
        num_slots = self._num_recent + self._num_frequent
        if self._num_recent > self._recent_ratio * num_slots:
            slot = self._recent.first()
            return slot if slot is not None else self._frequent.first()
        slot = self._frequent.first()
        return slot if slot is not None else self._recent.first()

    def statistics(self) -> dict[str, int]:
        return {
            "num_recent": self._num_recent,
            "num_frequent": self._num_frequent,
            "recent_permille": round(1000 * self._recent_ratio),
            "num_ghosts": len(self._recent_ghosts) + len(self._frequent_ghosts),
            "num_ghost_hits": self._num_ghost_hits,
        }

    def __contains__(self, slot: int) -> bool:
        return slot in self._recent or slot in self._frequent

    def __iter__(self) -> Iterator[int]:
        yield from self._recent
        yield from self._frequent

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)
