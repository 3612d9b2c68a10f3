"""LMCache's host memory: objects of one page each, from its own allocators.

Written for LMCache 0.5.2 and 0.5.3.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch

from millpond.gate.paths import CannotTest, Room
from millpond.gate.targets.foreign import expect_parameters, expect_registered, symbol

DISTRIBUTIONS: Final = ("lmcache",)
KNOWN_VERSIONS: Final = ("0.5.2", "0.5.3")
_ALLOCATORS: Final = "lmcache.v1.memory_allocators"
_ALIGN_BYTES: Final = 4096
"""``AddressManager.ALIGN_BYTES`` (v1/memory_management.py, 0.5.3)."""


def lazy_allocator_class() -> Any:  # noqa: ANN401
    """Return LMCache's class that registers memory piece by piece (the server's default)."""
    allocator = symbol(f"{_ALLOCATORS}.lazy_memory_allocator", "LazyMemoryAllocator")
    expect_parameters(allocator, "init_size", "final_size")
    return allocator


def mixed_allocator_class() -> Any:  # noqa: ANN401
    """Return LMCache's class whose memory is registered at once."""
    allocator = symbol(f"{_ALLOCATORS}.mixed_memory_allocator", "MixedMemoryAllocator")
    expect_parameters(allocator, "size")
    return allocator


def python_operations(version: str) -> str:
    """Return the module of the operations that are written in Python."""
    old = version.startswith("0.5.2")
    return "lmcache.python_ops_fallback" if old else "lmcache.v1.platform.torch_ops"


def expect_runtime_library(version: str) -> None:
    """Raise ``CannotTest`` where the operations written in Python find no CUDA runtime.

    Without one they read and write device addresses on the CPU, and the process dies.
    """
    if not hasattr(symbol(python_operations(version), "_get_copy_lib")(), "cudaMemcpy"):
        raise CannotTest(
            "LMCache finds no libcudart.so: put its folder, for example /usr/local/cuda/lib64,"
            " into LD_LIBRARY_PATH"
        )


class PageObjects:
    """As many memory objects of one page as the room has host pages, side by side."""

    def __init__(self, allocator: Any, room: Room) -> None:  # noqa: ANN401
        self._allocator = allocator
        size = torch.Size([room.page_bytes])
        objects = allocator.batched_allocate(size, torch.uint8, room.num_host_pages)
        if objects is None:
            allocator.close()
            raise CannotTest(f"no room for {room.num_host_pages} pages of {room.page_bytes} bytes")
        self.objects: Sequence[Any] = objects

    @staticmethod
    def size_bytes(room: Room) -> int:
        """Return what an allocator needs for the room's host pages, its alignment included."""
        aligned = -(-room.page_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        return aligned * room.num_host_pages

    def rows(self, page_bytes: int) -> torch.Tensor:
        """Return the objects' memory, one row a page; raises ``CannotTest``."""
        first: torch.Tensor = self.objects[0].raw_tensor
        starts = [int(one.data_ptr) for one in self.objects]
        strides = {after - before for before, after in itertools.pairwise(starts)}
        if len(strides) > 1:
            raise CannotTest("LMCache's allocator gave pages that are not evenly spaced")
        stride = strides.pop() if strides else page_bytes
        host = torch.as_strided(first, (len(starts), page_bytes), (stride, 1))
        return expect_registered(host)

    def close(self) -> None:
        """Give the memory back; nothing may touch the rows any more."""
        for one in self.objects:
            one.ref_count_down()
        self.objects = ()
        self._allocator.close()
