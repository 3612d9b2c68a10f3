"""Pages by a kernel: the GPU's cores read and write GPU memory, or registered host memory.

The driver's batch copy costs about a microsecond a page. A kernel takes the same addresses as
a table and is launched once. Over the link it keeps some of the GPU's cores busy while it
runs; within the GPU's memory it is done in a fraction of the time that the link needs.
"""

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

WORD_BYTES: Final = 8
_BLOCK_WORDS: Final = 2048
_NUM_WARPS: Final = 8
_ALIGNMENT_BYTES: Final = 16


# Each variant would be compiled while somebody waits for a copy of just so many pages.
@triton.jit(do_not_specialize=["column", "first", "num_pages", "words_max"])
def _copy_pages(table, column, first, num_pages, words_max, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803, PLR0913, PLR0917
    """Copy ``num_pages`` pages from the ``first`` of the table on; programs share the pieces.

    The table has three columns of ``column`` entries: sources, targets, lengths in words.
    """
    num_pieces = tl.cdiv(words_max, BLOCK)
    for item in range(tl.program_id(0), num_pages * num_pieces, tl.num_programs(0)):
        page = first + item // num_pieces
        source = tl.multiple_of(tl.load(table + page), 16).to(tl.pointer_type(tl.int64))
        target = tl.multiple_of(tl.load(table + column + page), 16).to(tl.pointer_type(tl.int64))
        num_words = tl.load(table + 2 * column + page)
        word = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
        is_inside = word < num_words
        tl.store(target + word, tl.load(source + word, mask=is_inside), mask=is_inside)


def can_copy(*arrays: NDArray[np.uint64]) -> bool:
    """Say whether the kernel can move pages of such addresses and lengths: 16-byte aligned."""
    bits = np.bitwise_or.reduce([int(np.bitwise_or.reduce(array)) for array in arrays])
    return int(bits) % _ALIGNMENT_BYTES == 0


class PageTable:
    """Addresses and lengths of pages, on their way to the GPU; alive until the copies end."""

    def __init__(
        self,
        sources: NDArray[np.uint64],
        targets: NDArray[np.uint64],
        lengths: NDArray[np.uint64],
        stream: torch.cuda.Stream,
    ) -> None:
        """Enqueue the upload on ``stream``."""
        num_pages = len(sources)
        # One pinned buffer a submission: it must not be refilled while the device reads it.
        self._pinned = torch.empty(3 * num_pages, dtype=torch.int64, pin_memory=True)
        staged = self._pinned.numpy().view(np.uint64)
        staged[:num_pages] = sources
        staged[num_pages : 2 * num_pages] = targets
        staged[2 * num_pages :] = lengths // np.uint64(WORD_BYTES)
        self._num_pages = num_pages
        self._words_max = int(lengths.max()) // WORD_BYTES
        with torch.cuda.stream(stream):
            self._table = self._pinned.to(stream.device, non_blocking=True)

    def copy(self, pages: slice, stream: torch.cuda.Stream, num_programs: int) -> None:
        """Enqueue the copies of some pages of the table on ``stream``."""
        first, end, _ = pages.indices(self._num_pages)
        with torch.cuda.stream(stream):
            _copy_pages[(num_programs,)](
                self._table,
                self._num_pages,
                first,
                end - first,
                self._words_max,
                BLOCK=_BLOCK_WORDS,
                num_warps=_NUM_WARPS,
            )
