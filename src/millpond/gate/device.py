"""What the gate needs of a device: streams that it can hold up, and bytes that it can look at.

Real on CUDA (``cuda.py``), threads elsewhere (``emulated.py``). The tests are the same.
"""

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.transfer.device import Device, Fence
from millpond.transfer.routes import Route

SETTLE_S_MAX = 60.0
"""Longest wait for a device to finish what was enqueued, once nothing is held up any more."""


class Where(enum.Enum):
    """Streams of the gate: none of the first two waits for another unless told to.

    ``WORK``: where kernels run that write and read pages, and what is held up. ``OTHER``: an
    idle one. ``LEGACY``: CUDA's default stream, for which the other two do not wait.
    """

    WORK = "work"
    OTHER = "other"
    LEGACY = "legacy"


class Hold(Protocol):
    """A kernel that keeps a stream from going on until it is released, or its time is over."""

    def is_open(self) -> bool:
        """Say whether the stream has come past it; once true, it stays so."""
        ...

    def release(self) -> None:
        """Let the stream go on."""
        ...


@dataclass(frozen=True, slots=True)
class Size:
    """How many pages a test uses, and how large they are; a row more on the host than needed."""

    num_pages: int
    page_bytes: int


class GateDevice(Protocol):
    """A device under test; used by one thread at a time. ``on`` must be in force to enqueue."""

    @property
    def name(self) -> str:
        """What the first line of the output says."""
        ...

    @property
    def is_emulated(self) -> bool:
        """Whether its streams are threads."""
        ...

    @property
    def routes(self) -> Sequence[tuple[Route, Size]]:
        """Ways of our own engine to copy here, each with a size that goes this way."""
        ...

    def copier(self, route: Route) -> Device:
        """Make the device of our own copy engine, all of whose copies take this route."""
        ...

    def make_pages(self, size: Size) -> torch.Tensor:
        """Return zeroed pages on the device, uint8, one a row; raises ``TooLittleMemory``."""
        ...

    def make_host(self, num_bytes: int) -> torch.Tensor:
        """Return host memory, uint8, that the device copies from and to without a host block."""
        ...

    def on(self, where: Where) -> AbstractContextManager[None]:
        """Make a stream the current one of the calling thread."""
        ...

    def hold(self, limit_s: float) -> Hold:
        """Enqueue a kernel that holds the current stream up, for ``limit_s`` at most."""
        ...

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue a copy on the current stream; both contiguous, and kept alive by the caller."""
        ...

    def point(self) -> Fence:
        """Return a fence behind all work on the current stream."""
        ...

    def recycle(self, num_bytes: int) -> None:
        """Take memory of the host and the device that was given up, write into it, free it.

        Waits for nothing that is enqueued, once it has been called for the same size.
        """
        ...

    def write(self, pages: torch.Tensor, data: NDArray[np.uint8]) -> None:
        """Write pages now, and wait for that; the device must be idle."""
        ...

    def read(self, pages: torch.Tensor) -> NDArray[np.uint8]:
        """Return the bytes of pages as they are now, whatever else the device does."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has done everything; raises ``CopyFailed`` after a minute."""
        ...

    def close(self) -> None:
        """Give up streams and memory; nothing is enqueued any more."""
        ...
