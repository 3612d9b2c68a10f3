"""Small pages by a kernel: the GPU's cores read and write registered host memory themselves.

The driver's batch copy costs about a microsecond a page, which halves the link's speed at
64 KiB. A kernel takes the same addresses as two arrays and is launched once. It keeps some of
the GPU's cores busy while it runs, so it has few programs and larger pages do not use it.
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


@triton.jit
def _copy_pages(sources, targets, num_pages, num_words, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803
    """Copy ``num_pages`` pages of ``num_words`` words each; the programs share the pieces."""
    num_pieces = tl.cdiv(num_words, BLOCK)
    for item in range(tl.program_id(0), num_pages * num_pieces, tl.num_programs(0)):
        page = item // num_pieces
        source = tl.multiple_of(tl.load(sources + page), 16).to(tl.pointer_type(tl.int64))
        target = tl.multiple_of(tl.load(targets + page), 16).to(tl.pointer_type(tl.int64))
        word = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
        is_inside = word < num_words
        tl.store(target + word, tl.load(source + word, mask=is_inside), mask=is_inside)


def can_copy(sources: NDArray[np.uint64], targets: NDArray[np.uint64], page_bytes: int) -> bool:
    """Say whether the kernel can move these pages: whole words, addresses 16-byte aligned."""
    addresses = np.bitwise_or.reduce(sources) | np.bitwise_or.reduce(targets)
    return page_bytes % WORD_BYTES == 0 and int(addresses) % _ALIGNMENT_BYTES == 0


class KernelCopier:
    """Launches the kernel on a stream; one for each lane, used by one thread."""

    def __init__(self, device: torch.device, num_programs: int) -> None:
        self._device = device
        self._num_programs = num_programs

    def enqueue(
        self,
        sources: NDArray[np.uint64],
        targets: NDArray[np.uint64],
        page_bytes: int,
        stream: torch.cuda.Stream,
    ) -> object:
        """Enqueue copies of pages of one size; keep what is returned alive until they end."""
        num_pages = len(sources)
        # One pinned buffer a submission: it must not be refilled while the device reads it.
        pinned = torch.empty(2 * num_pages, dtype=torch.int64, pin_memory=True)
        staged = pinned.numpy().view(np.uint64)
        staged[:num_pages] = sources
        staged[num_pages:] = targets
        with torch.cuda.stream(stream):
            addresses = pinned.to(self._device, non_blocking=True)
            _copy_pages[(self._num_programs,)](
                addresses,
                addresses[num_pages:],
                num_pages,
                page_bytes // WORD_BYTES,
                BLOCK=_BLOCK_WORDS,
                num_warps=_NUM_WARPS,
            )
        return pinned, addresses
