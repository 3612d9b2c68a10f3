"""Hands copies to the driver in portions, never more than it takes without blocking.

A stream holds some thousands of copies. Who enqueues more waits inside of the driver, with a
lock that everybody's launches need: with 32,768 copies behind a fence that was not passed, a
launch in another thread took as long as the fence (0.5 s on an H200). So a portion is only
handed over when few enough are before it; the wait for that is outside of the driver.
"""

from collections import deque
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.transfer import cudart

PORTION_COPIES: Final = 512
"""Copies in one call: 0.3 ms, in which the engine's own launches may have to wait."""
COPIES_MAX: Final = 1024
"""Copies on a stream at a time: enough to keep the copy engines busy for a millisecond."""


class Feed:
    """The way onto one stream; used by one thread, which it may block until copies end."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._portions: deque[tuple[torch.cuda.Event, int]] = deque()
        self._num_copies = 0

    def copy(
        self,
        sources: NDArray[np.uint64],
        targets: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        *,
        one_by_one: bool = False,
    ) -> None:
        """Enqueue independent copies; with ``one_by_one``, or an old driver, a call for each."""
        is_batched = cudart.has_batch_copy() and not one_by_one
        enqueue = cudart.copy_batch if is_batched else cudart.copy_each
        for start in range(0, len(lengths), PORTION_COPIES):
            some = slice(start, start + PORTION_COPIES)
            portion = sources[some], targets[some], lengths[some]
            num_copies = len(portion[0])
            self._make_room(num_copies)
            enqueue(*portion, self._stream.cuda_stream)
            self._note(num_copies)

    def _make_room(self, num_copies: int) -> None:
        while self._portions and self._num_copies + num_copies > COPIES_MAX:
            end, num_ended = self._portions.popleft()
            end.synchronize()
            self._num_copies -= num_ended

    def _note(self, num_copies: int) -> None:
        end = torch.cuda.Event(blocking=True)
        end.record(self._stream)
        self._portions.append((end, num_copies))
        self._num_copies += num_copies
