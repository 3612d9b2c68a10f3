"""What the pool asks of an eviction policy.

A policy orders the *evictable* slots of one size. Which slots are evictable is the pool's
business (committed, held by no lease, and for pages the end of their prefix); a policy can
therefore never free something in use or leave a hole in a prefix, whatever it prefers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """An order of the evictable slots of one size; slots are small positive numbers.

    ``discard`` of an absent slot and ``touch`` of one do nothing. Times only ever order
    slots; they need not grow from call to call, because a block that becomes the end of its
    prefix may have been used long before others that are evictable already.
    """

    def add(self, slot: int, last_use_ns: int) -> None:
        """Take ``slot`` in as evictable; a second time moves it to its new place."""
        ...

    def discard(self, slot: int) -> None:
        """Forget ``slot``: it is in use, or gone."""
        ...

    def touch(self, slot: int, now_ns: int) -> None:
        """Note that ``slot`` was read, evictable or not."""
        ...

    def victim(self) -> int | None:
        """Return the slot to evict next, without removing it; None when none is evictable."""
        ...

    def clear(self) -> None:
        """Forget every slot."""
        ...

    def __contains__(self, slot: int) -> bool: ...

    def __iter__(self) -> Iterator[int]: ...

    def __len__(self) -> int: ...


PolicyFactory = Callable[[], EvictionPolicy]
"""Makes an empty policy; called once for every slot size."""
