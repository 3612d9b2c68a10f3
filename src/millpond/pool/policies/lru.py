"""Least recently used first."""

from __future__ import annotations

from collections.abc import Iterable

from millpond.pool.policies.order import Order


class LruPolicy(Order):
    """Evicts the slot whose last use is the longest ago; of equals, the lowest number.

    It needs to know nothing of slots that are not evictable: the pool keeps the times.
    """

    def enter(self, slot: int, key: bytes) -> None:
        pass

    def leave(self, slot: int, evicted_key: bytes | None) -> None:  # noqa: ARG002 (interface)
        self.discard(slot)

    def touch(self, slots: Iterable[int], now_ns: int) -> None:
        for slot in slots:
            if slot in self:
                self.add(slot, now_ns)
            return

    def hand_up(self, slot: int, parent_slot: int) -> None:
        pass

    def victim(self) -> int | None:
        return self.first()

    def statistics(self) -> dict[str, int]:
        return {}
