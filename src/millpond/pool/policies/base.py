"""What the pool asks of an eviction policy, and of an admission policy.

An eviction policy orders the *evictable* slots of one size. Which slots are evictable is the
pool's business (committed, held by no lease, and for pages the end of their prefix); a policy
can therefore never free something in use or leave a hole in a prefix, whatever it prefers.

A prefix is used as a whole, but only its end is evictable. So uses are told for the end, with
the way up to its beginning, and what a policy knows of an end is handed up when that leaves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """What is known of the slots of one size, and an order of the evictable ones.

    Slots are small positive numbers. A slot is *resident* from ``enter`` to ``leave``; only
    then may it be added. ``discard``, ``touch``, ``hand_up`` and ``leave`` do nothing with
    slots that are absent. Times only ever order slots; they need not grow from call to call,
    because a block that becomes the end of its prefix may have been used long before others
    that are evictable already.
    """

    def enter(self, slot: int, key: bytes) -> None:
        """Take note that ``slot`` holds the committed block ``key``."""
        ...

    def leave(self, slot: int, evicted_key: bytes | None) -> None:
        """Forget ``slot``; ``evicted_key`` None if anything but this policy wanted it gone."""
        ...

    def add(self, slot: int, last_use_ns: int) -> None:
        """Take ``slot`` in as evictable; a second time moves it to its new place."""
        ...

    def discard(self, slot: int) -> None:
        """Note that ``slot`` is not evictable any more."""
        ...

    def touch(self, slots: Iterable[int], now_ns: int) -> None:
        """Note that a prefix was read: its slots from the end up, evictable or not.

        They are produced as they are asked for: only ask for as many as it takes.
        """
        ...

    def hand_up(self, slot: int, parent_slot: int) -> None:
        """Note that ``slot`` is leaving and ``parent_slot``, before it, was used as often."""
        ...

    def victim(self) -> int | None:
        """Return the slot to evict next, without removing it; None when none is evictable."""
        ...

    def clear(self) -> None:
        """Forget every slot."""
        ...

    def statistics(self) -> dict[str, int]:
        """Return the policy's own figures."""
        ...

    def __contains__(self, slot: int) -> bool:
        """Return whether ``slot`` is evictable."""
        ...

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


PolicyFactory = Callable[[], EvictionPolicy]
"""Makes an empty policy; called once for every slot size."""


class AdmissionPolicy(Protocol):
    """Decides which of the blocks that a request offers are stored."""

    def admit(self, keys: array[int], request: int) -> int:
        """Note that ``request`` offers new blocks; return how many of the first to store.

        ``keys`` are 64-bit numbers in the order of the prefix. Equal numbers ``request`` mean
        one request: engines offer the blocks of a long prompt again with each step.
        """
        ...

    def clear(self) -> None:
        """Forget every key."""
        ...

    def statistics(self) -> dict[str, int]:
        """Return the policy's own figures."""
        ...
