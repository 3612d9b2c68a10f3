"""Hands copies to the driver in portions, never more than it takes without blocking.

A stream holds some thousands of copies. Who enqueues more waits inside of the driver, with a
lock that everybody's launches need: with 32,768 copies behind a fence that was not passed, a
launch in another thread took as long as the fence (0.5 s on an H200). So many copies are only
handed over once their fence is passed (``cuda.py``), and each portion once few enough are
before it; the wait for that is outside of the driver.
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
"""On a stream at a time: 9 ms of pages of 64 KiB. Each wait for an end needs the interpreter
lock, for which a busy engine lets wait for 5 ms."""
CALLS_MAX: Final = 512
"""The same where each copy is a call of its own: a stream holds about a thousand of them."""


class Feed:
    """The way onto one stream; used by one thread at a time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._portions: deque[tuple[torch.cuda.Event, int]] = deque()
        """The end of each portion that may be on the stream, and its copies."""
        self._num_copies = 0

    def has_room(self, num_copies: int, num_max: int = COPIES_MAX) -> bool:
        """Say whether so many copies can be enqueued without a wait: ``num_max`` in all."""
        while self._portions and self._portions[0][0].query():
            self._num_copies -= self._portions.popleft()[1]
        return self._num_copies + num_copies <= num_max

    def copy(
        self,
        sources: NDArray[np.uint64],
        targets: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        *,
        one_by_one: bool = False,
    ) -> None:
        """Enqueue independent copies; with ``one_by_one``, or an old driver, a call for each.

        Blocks, outside of the driver, until earlier copies end where there is no room.
        """
        is_batched = cudart.has_batch_copy() and not one_by_one
        enqueue = cudart.copy_batch if is_batched else cudart.copy_each
        num_max = COPIES_MAX if is_batched else CALLS_MAX
        portion = min(PORTION_COPIES, num_max)
        for start in range(0, len(lengths), portion):
            some = slice(start, start + portion)
            num_copies = len(lengths[some])
            while not self.has_room(num_copies, num_max):
                self._portions[0][0].synchronize()
            enqueue(sources[some], targets[some], lengths[some], self._stream.cuda_stream)
            end = torch.cuda.Event(blocking=True)
            end.record(self._stream)
            self._portions.append((end, num_copies))
            self._num_copies += num_copies
