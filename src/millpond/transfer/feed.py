"""Hands copies to the driver in portions, never more than it takes without blocking.

A stream holds some thousands of copies. Who enqueues more waits inside of the driver, with a
lock that everybody's launches need: with 32,768 copies behind a fence that was not passed, a
launch in another thread took as long as the fence (0.5 s on an H200). So a portion is handed
over once few enough are before it, and the wait for that is outside of the driver.
"""

from collections import deque
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.transfer import cudart

PORTION_COPIES: Final = 1024
"""Copies in one call: 0.6 ms, in which the engine's own launches may have to wait."""
COPIES_MAX: Final = 8192
"""On a stream at a time: 9 ms of pages of 64 KiB."""
CALLS_MAX: Final = 512
"""The same where each copy is a call of its own: a stream holds about a thousand of them."""


class Feed:
    """The way onto one stream; used by one thread at a time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._portions: deque[tuple[torch.cuda.Event, int]] = deque()
        """The end of each portion that may be on the stream, and its copies."""
        self._num_copies = 0

    def awaited(self, num_copies: int, num_max: int) -> torch.cuda.Event | None:
        """Return what to wait for until so many copies, ``num_max`` in all, can be enqueued."""
        while self._portions and self._portions[0][0].query():
            self._num_copies -= self._portions.popleft()[1]
        if not self._portions or self._num_copies + num_copies <= num_max:
            return None
        return self._portions[0][0]

    def copy(
        self,
        sources: NDArray[np.uint64],
        targets: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        *,
        one_by_one: bool = False,
    ) -> None:
        """Enqueue a portion; with ``one_by_one``, or an old driver, a call for each copy."""
        is_batched = cudart.has_batch_copy() and not one_by_one
        enqueue = cudart.copy_batch if is_batched else cudart.copy_each
        enqueue(sources, targets, lengths, self._stream.cuda_stream)
        end = torch.cuda.Event(blocking=True)
        end.record(self._stream)
        self._portions.append((end, len(lengths)))
        self._num_copies += len(lengths)
