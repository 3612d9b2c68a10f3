"""LMCache's copies between a page and a memory object, and its record of their end.

Written for LMCache 0.5.2 and 0.5.3, whose ``v1/gpu_connector/gpu_ops.py`` is the same text.
The operations under test are those written in Python (``v1/platform/torch_ops.py``; before
0.5.3 ``python_ops_fallback.py``): they run where the compiled ``lmcache.c_ops`` is missing or
cannot be loaded. ``gpu_ops`` promises copies that do not block and are ordered by the stream
that is current, as its callers make them inside ``with stream(...)``.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import torch

from millpond.gate.paths import Promise, Room
from millpond.gate.targets.foreign import (
    AskedCompletion,
    Target,
    behind_current_stream,
    expect_cuda,
    expect_parameters,
    known_version,
    symbol,
)
from millpond.gate.targets.lmcache_memory import (
    DISTRIBUTIONS,
    KNOWN_VERSIONS,
    PageObjects,
    expect_runtime_library,
    lazy_allocator_class,
    mixed_allocator_class,
    python_operations,
)
from millpond.transfer.copies import Direction

_COPIES: Final = "lmcache.v1.gpu_connector.gpu_ops"


def raw_pointer() -> "RawPointer":
    """Make ``lmcache-raw-pointer``; raises ``CannotTest``."""
    return RawPointer(known_version(DISTRIBUTIONS, KNOWN_VERSIONS))


def mixed_allocator() -> "MixedAllocator":
    """Make ``lmcache-mixed-allocator``; raises ``CannotTest``."""
    return MixedAllocator(known_version(DISTRIBUTIONS, KNOWN_VERSIONS))


def completion_recorder() -> "CompletionRecorder":
    """Make ``lmcache-completion-recorder``; raises ``CannotTest``."""
    return CompletionRecorder(known_version(DISTRIBUTIONS, KNOWN_VERSIONS))


class _ObjectCopies(Target, ABC):
    """One memory object for each host page; copies are made one page at a time."""

    def __init__(self, name: str, promise: Promise, version: str) -> None:
        super().__init__(name, promise, {"lmcache": version})
        self._pages = torch.empty((0, 0), dtype=torch.uint8)
        self._objects: PageObjects | None = None

    def _take(self, room: Room, allocator: Any) -> torch.Tensor:  # noqa: ANN401
        self._pages = room.pages
        self._objects = PageObjects(allocator, room)
        return self._objects.rows(room.page_bytes)

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> AskedCompletion:
        """As ``Path.copy``."""
        assert self._objects is not None
        for i, j in pairs:
            self._copy_page(direction, self._pages[i], self._objects.objects[j])
        return behind_current_stream()

    @abstractmethod
    def _copy_page(self, direction: Direction, page: torch.Tensor, memory: Any) -> None:  # noqa: ANN401
        """Enqueue, or make, one copy between a page and a memory object."""

    def close(self) -> None:
        """As ``Path.close``."""
        self._pages = torch.empty((0, 0), dtype=torch.uint8)
        if self._objects is not None:
            self._objects.close()
            self._objects = None


class RawPointer(_ObjectCopies):
    """``lmcache_memcpy_async`` with addresses, as ``gpu_ops`` calls it for lazy objects."""

    def __init__(self, version: str) -> None:
        super().__init__("lmcache-raw-pointer", Promise.STREAM, version)
        operations = python_operations(version)
        self._copy = symbol(operations, "lmcache_memcpy_async")
        self._directions = symbol(operations, "TransferDirection")
        self._make_allocator = lazy_allocator_class()

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        expect_cuda(room)
        expect_parameters(
            self._copy,
            *("dest", "src", "nbytes", "direction", "host_buffer_offset", "host_buffer_alignments"),
        )
        expect_runtime_library(self.versions["lmcache"])
        size_bytes = PageObjects.size_bytes(room)
        return self._take(room, self._make_allocator(size_bytes, size_bytes))

    def _copy_page(self, direction: Direction, page: torch.Tensor, memory: Any) -> None:  # noqa: ANN401
        # Arguments as in lmcache_memcpy_async_h2d and _d2h (gpu_ops.py, 0.5.3).
        store = direction is Direction.STORE
        ends = (memory.data_ptr, page.data_ptr()) if store else (page.data_ptr(), memory.data_ptr)
        self._copy(
            *ends,
            memory.get_size(),
            self._directions.D2H if store else self._directions.H2D,
            memory.meta.address,
            self._make_allocator.PIN_CHUNK_SIZE,
        )


class MixedAllocator(_ObjectCopies):
    """``gpu_ops`` with objects of the mixed allocator: torch's ``copy_``, not blocking."""

    def __init__(
        self,
        version: str,
        name: str = "lmcache-mixed-allocator",
        promise: Promise = Promise.STREAM,
    ) -> None:
        super().__init__(name, promise, version)
        self._store = symbol(_COPIES, "lmcache_memcpy_async_d2h")
        self._load = symbol(_COPIES, "lmcache_memcpy_async_h2d")
        self._make_allocator = mixed_allocator_class()

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        expect_cuda(room)
        expect_parameters(self._store, "gpu_buffer", "memory_obj")
        expect_parameters(self._load, "memory_obj", "gpu_buffer")
        return self._take(room, self._make_allocator(PageObjects.size_bytes(room)))

    def _copy_page(self, direction: Direction, page: torch.Tensor, memory: Any) -> None:  # noqa: ANN401
        if direction is Direction.STORE:
            self._store(page, memory)
        else:
            self._load(memory, page)


class CompletionRecorder(MixedAllocator):
    """Stores that are reported by ``record_completion_on_stream``.

    As ``store`` does (v1/multiprocess/modules/lmcache_driven_transfer.py, 0.5.3): the copies,
    then "finish_write" recorded on the same stream; the server commits what it drains.
    """

    def __init__(self, version: str) -> None:
        super().__init__(version, "lmcache-completion-recorder", Promise.HOST)
        self.directions = (Direction.STORE,)
        operations = python_operations(version)
        self._record = symbol(operations, "record_completion_on_stream")
        self._drain = symbol(operations, "drain_recorded_completions")
        self._numbers = itertools.count()
        self._finished: set[bytes] = set()

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        expect_parameters(self._record, "cuda_stream_ptr", "kind", "payload")
        expect_parameters(self._drain)
        return super().open(room)

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> AskedCompletion:
        """As ``Path.copy``."""
        super().copy(direction, pairs)
        payload = next(self._numbers).to_bytes(8, "little")
        self._record(torch.cuda.current_stream().cuda_stream, "finish_write", payload)
        return AskedCompletion(lambda: self._is_finished(payload))

    def _is_finished(self, payload: bytes) -> bool:
        self._finished.update(drained for _, drained in self._drain())
        return payload in self._finished
