"""A GPU's streams: what the lanes enqueue on, and the copy engines and kernel behind it.

torch's streams are non-blocking: nothing is ordered by the legacy stream, and every edge is
one that ``streams.py`` makes.
"""

import logging
from typing import Final

import numpy as np
import torch

from millpond.arena.arena import Arena
from millpond.model.limits import KIB
from millpond.transfer import cudart
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import CopyFailed, Fence, Stream
from millpond.transfer.kernel import KernelCopier, can_copy
from millpond.transfer.registration import Registration
from millpond.transfer.streams import StreamCopyEngine

logger = logging.getLogger("vllm.millpond")

_UNDO_S = 60.0

LOAD_KERNEL_BELOW_BYTES: Final = 256 * KIB
STORE_KERNEL_BELOW_BYTES: Final = 32 * KIB
"""Smaller pages are moved by the kernel, larger ones by the copy engines.

Measured on an H200 (docs/RESULTS.md): the kernel leads below 256 KiB, but takes two thirds of
a matrix product's speed while it runs. A request waits for a load; nobody waits for a store.
"""
_KERNEL_PROGRAMS: Final = 32
"""Programs of the kernel, each on one of the GPU's 132 multiprocessors (H200)."""
_BATCH_COPIES_MAX: Final = 1024
"""Copies in one call of the driver: 0.6 ms, in which the engine's own launches may wait."""


class CudaEvent:
    """An event on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_passed(self) -> bool:
        """Say whether the device has come past the event."""
        return self.event.query()

    def wait(self) -> None:
        """Wait, asleep, until the device has come past it; ``CopyFailed`` if the device failed."""
        try:
            self.event.synchronize()
        except RuntimeError as failure:  # how torch reports a failed device
            raise CopyFailed(str(failure)) from failure


class CudaStream:
    """A non-blocking stream for one direction, and the ways to copy on it."""

    def __init__(self, device: torch.device, priority: int, kernel_below_bytes: int) -> None:
        self._kernel = KernelCopier(device, _KERNEL_PROGRAMS)
        self._kernel_below_bytes = kernel_below_bytes
        self._stream = torch.cuda.Stream(device=device, priority=priority)

    def wait_for(self, fence: Fence) -> None:
        """Let the device hold back later work; ``CopyFailed`` for a fence of another kind."""
        if not isinstance(fence, CudaEvent):
            raise CopyFailed(f"a fence of type {type(fence).__name__}, not of this device")
        self._stream.wait_event(fence.event)

    def copy(self, copies: Copies) -> object:
        """Enqueue the copies: small pages by the kernel, large ones by the copy engines."""
        staged: list[object] = []
        rest = np.ones(len(copies.lengths), np.bool_)
        try:
            for length in np.unique(copies.lengths).tolist():
                chosen = copies.lengths == length
                sources, targets = copies.sources[chosen], copies.targets[chosen]
                if length < self._kernel_below_bytes and can_copy(sources, targets, length):
                    staged.append(self._kernel.enqueue(sources, targets, length, self._stream))
                    rest &= ~chosen
            large = Copies(copies.sources[rest], copies.targets[rest], copies.lengths[rest])
            _enqueue_copies(large, self._stream.cuda_stream)
        except (cudart.CudaFailed, RuntimeError) as failure:  # torch and Triton raise the latter
            raise CopyFailed(str(failure)) from failure
        return staged

    def record(self) -> CudaEvent:
        """Return an event behind everything that was enqueued so far."""
        event = torch.cuda.Event(blocking=True)
        try:
            event.record(self._stream)
        except RuntimeError as failure:
            raise CopyFailed(str(failure)) from failure
        return CudaEvent(event)

    def close(self, timeout_s: float) -> bool:
        """Nothing to give up: torch keeps its streams."""
        return timeout_s >= 0


class CudaDevice:
    """A ``Device`` for one GPU; memory in the arena must be registered first."""

    def __init__(
        self,
        device: torch.device,
        *,
        load_kernel_below_bytes: int = LOAD_KERNEL_BELOW_BYTES,
        store_kernel_below_bytes: int = STORE_KERNEL_BELOW_BYTES,
    ) -> None:
        self._device = device
        self._kernel_below_bytes = {
            Direction.LOAD: load_kernel_below_bytes,
            Direction.STORE: store_kernel_below_bytes,
        }
        self.registration: Registration | None = None

    def fence(self) -> Fence:
        """Return a fence behind all work on the calling thread's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        return CudaEvent(event)

    def stream(self, direction: Direction) -> Stream:
        """Make a stream; lower priorities go first: what a request waits for before the rest."""
        priority = -1 if direction is Direction.LOAD else 0
        return CudaStream(self._device, priority, self._kernel_below_bytes[direction])

    def enter_thread(self) -> None:
        """Put a new thread, which stands on device 0, on this device."""
        torch.cuda.set_device(self._device)

    def adopt(self, arena: Arena) -> None:
        """Register the arena with CUDA in the background; the earlier one is unregistered."""
        self.enter_thread()
        self.release(_UNDO_S)
        self.registration = Registration(arena, self._device)

    def is_ready(self, end_offset: int) -> bool:
        """Say whether the arena is registered up to ``end_offset``."""
        registration = self.registration
        return registration is not None and registration.covers(end_offset)

    def release(self, timeout_s: float) -> None:
        """Unregister the adopted arena; no copy is in flight."""
        registration, self.registration = self.registration, None
        if registration is not None:
            registration.undo(timeout_s)


class CudaCopyEngine(StreamCopyEngine):
    """A ``CopyEngine`` for one GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(CudaDevice(device))


def _enqueue_copies(copies: Copies, stream: int) -> None:
    """Hand copies to the driver's copy engines, many in one call where it has one for many."""
    num_copies = len(copies.lengths)
    if cudart.has_batch_copy():
        for start in range(0, num_copies, _BATCH_COPIES_MAX):
            some = slice(start, start + _BATCH_COPIES_MAX)
            cudart.copy_batch(
                copies.sources[some], copies.targets[some], copies.lengths[some], stream
            )
        return
    for source, target, length in zip(
        copies.sources.tolist(), copies.targets.tolist(), copies.lengths.tolist(), strict=True
    ):
        cudart.copy_one(source, target, length, stream)
