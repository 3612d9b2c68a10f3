"""A path: code that copies pages between a device and the host, as the gate calls it.

The gate fills the device's pages and the host's with patterns, makes the producer of a page,
or its last reader, late on a stream of its own, calls ``copy`` with that stream current, waits
as the path promises, and compares every byte. A path of one's own needs these few methods:
docs/ORDERING.md has a complete example.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from millpond.gate.errors import CannotTest
from millpond.transfer.copies import Direction

__all__ = ["CannotTest", "Completion", "Path", "Promise", "Room"]


class Promise(enum.StrEnum):
    """When the bytes of a copy may be used.

    ``HOST``: by anyone, once the completion is done. ``STREAM``: by what is enqueued
    afterwards to the stream that was current in the call; by the host, once that stream has
    been synchronized.
    """

    HOST = "host"
    STREAM = "stream"


class Completion(Protocol):
    """What a path says of one copy."""

    def is_done(self) -> bool:
        """Say whether the copy has ended, as far as the path tells; does not block."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, as the path's users do; False when the time ran out."""
        ...


@dataclass(frozen=True, slots=True)
class Room:
    """Where a path works: ``pages`` is uint8 on the device, one row a page, contiguous."""

    pages: torch.Tensor
    num_host_pages: int

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the length of a row."""
        return int(self.pages.shape[1])


class Path(Protocol):
    """One way to copy, in both directions or in one."""

    @property
    def name(self) -> str:
        """What the table of verdicts calls it."""
        ...

    @property
    def directions(self) -> Sequence[Direction]:
        """What it can copy."""
        ...

    @property
    def promise(self) -> Promise:
        """When its bytes may be used."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """The packages under test, by name."""
        ...

    def open(self, room: Room) -> torch.Tensor:
        """Prepare for copies of the room's pages; raises ``CannotTest``.

        Returns the host's side: uint8 on the CPU, ``num_host_pages`` rows of one page, in the
        memory that the path really uses.
        """
        ...

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> Completion:
        """Copy between page i of the device and row j of the host, for each (i, j).

        Called as the path's users call it: on their thread, with their stream current.
        """
        ...

    def close(self) -> None:
        """Give up what ``open`` took; no copy is in flight."""
        ...
