"""A kernel that holds a CUDA stream up until the host releases it, or its time is over."""

# Triton is not installed on machines without a GPU, and has no types.
# pyright: reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportIndexIssue=false

from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

_RELEASED: Final = 0
_LEFT: Final = 1
_LIMIT_NS: Final = 2
_NUM_WORDS: Final = 8


@triton.jit
def _spin(address):  # noqa: ANN001, ANN202
    """Wait for word 0 of the host's memory at ``address``, for word 2 ns at most; set word 1."""
    words = address.to(tl.pointer_type(tl.int64))
    limit = tl.load(words + 2, volatile=True)
    start = tl.extra.cuda.globaltimer()
    released = tl.load(words, volatile=True)
    now = start
    while (released == 0) & (now - start < limit):
        released = tl.load(words, volatile=True)
        now = tl.extra.cuda.globaltimer()
    tl.store(words + 1, 1)


class SpinHold:
    """See ``Hold``. Its words lie in page-locked memory, which must outlive the kernel."""

    def __init__(self, limit_s: float) -> None:
        self._memory = torch.zeros(_NUM_WORDS, dtype=torch.int64, pin_memory=True)
        self._words: NDArray[np.int64] = self._memory.numpy()
        self._words[_LIMIT_NS] = int(limit_s * 1e9)

    def is_open(self) -> bool:
        """Say whether the kernel has ended."""
        return bool(self._words[_LEFT])

    def release(self) -> None:
        """Let the kernel end."""
        self._words[_RELEASED] = 1

    def enqueue(self) -> None:
        """Launch the kernel on the current stream."""
        _spin[(1,)](self._memory.data_ptr(), num_warps=1)
