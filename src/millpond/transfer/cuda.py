"""Copies between a GPU and the arena, on streams of their own.

    engine's thread   fence: an event on its current stream
                      submit: the lane's stream waits for the event, copies are enqueued, an
                      event marks their end; returns without waiting for the device
    lane's thread     waits for the end event (releasing the interpreter lock), then on_done

torch's streams are non-blocking: nothing is ordered by the legacy stream, every edge is here.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from millpond.arena.arena import Arena
from millpond.model.limits import KIB
from millpond.transfer import cudart
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.engine import Fence, Ticket
from millpond.transfer.kernel import KernelCopier, can_copy
from millpond.transfer.registration import Registration

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


class CudaFence:
    """An event behind all work that was on a stream when it was taken."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_passed(self) -> bool:
        """Say whether the device has come past the event."""
        return self.event.query()


@dataclass(frozen=True, slots=True)
class _InFlight:
    direction: Direction
    num_bytes: int
    started_ns: int
    end: torch.cuda.Event
    error: str | None
    keep_alive: object
    on_done: Callable[[Ticket], None]


class _Lane:
    """One direction: its stream, and the thread that waits for what was enqueued on it."""

    def __init__(
        self, direction: Direction, device: torch.device, priority: int, kernel_below_bytes: int
    ) -> None:
        self._kernel = KernelCopier(device, _KERNEL_PROGRAMS)
        self._kernel_below_bytes = kernel_below_bytes
        self.stream = torch.cuda.Stream(device=device, priority=priority)
        self._device = device
        self._direction = direction
        self._in_flight: deque[_InFlight] = deque()
        self._changed = threading.Condition()
        self._num_unfinished = 0
        self._closed = False
        self._thread = threading.Thread(
            target=self._run, name=f"millpond-{direction.value}", daemon=True
        )
        self._thread.start()

    def submit(
        self,
        copies: Copies,
        after: torch.cuda.Event,
        keep_alive: object,
        on_done: Callable[[Ticket], None],
    ) -> None:
        with self._changed:
            if self._closed:
                raise ValueError("submit to a closed copy engine")
            self._num_unfinished += 1
        started_ns = time.monotonic_ns()
        end = torch.cuda.Event(blocking=True)
        # guards: a store must not read before the kernels that write its pages (E1); a load
        # must not write before the kernels that read or zero its pages (E3).
        self.stream.wait_event(after)
        error: str | None = None
        staged: list[object] = []
        try:
            staged = self._enqueue(copies)
        except (cudart.CudaFailed, RuntimeError) as failure:  # torch and Triton raise the latter
            error = str(failure)
        # guards: "done" must not precede the last byte (E2, E4): the event stands behind the
        # last copy, on the same stream. guards: arrays and mapping must outlive it (E6).
        end.record(self.stream)
        item = _InFlight(
            direction=self._direction,
            num_bytes=copies.num_bytes,
            started_ns=started_ns,
            end=end,
            error=error,
            keep_alive=(keep_alive, copies, staged),
            on_done=on_done,
        )
        with self._changed:
            self._in_flight.append(item)
            self._changed.notify_all()

    def _enqueue(self, copies: Copies) -> list[object]:
        """Enqueue the copies on the lane's stream; keep what is returned until they end."""
        staged: list[object] = []
        rest = np.ones(len(copies.lengths), np.bool_)
        for length in np.unique(copies.lengths).tolist():
            chosen = copies.lengths == length
            sources, targets = copies.sources[chosen], copies.targets[chosen]
            if length < self._kernel_below_bytes and can_copy(sources, targets, length):
                staged.append(self._kernel.enqueue(sources, targets, length, self.stream))
                rest &= ~chosen
        large = Copies(copies.sources[rest], copies.targets[rest], copies.lengths[rest])
        if len(large.lengths):
            _enqueue_copies(large, self.stream.cuda_stream)
            staged.append(large)
        return staged

    def wait_idle(self, deadline_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._num_unfinished == 0, max(0.0, deadline_s - time.monotonic())
            )

    def close(self, deadline_s: float) -> bool:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._in_flight) or self._closed)
                if not self._in_flight:
                    return
                item = self._in_flight.popleft()
            error = item.error
            try:
                item.end.synchronize()
            except RuntimeError as failure:  # how torch reports a failed device
                error = str(failure)
            elapsed_ns = time.monotonic_ns() - item.started_ns
            item.on_done(Ticket(item.direction, item.num_bytes, elapsed_ns, error))
            with self._changed:
                self._num_unfinished -= 1
                self._changed.notify_all()


class CudaCopyEngine:
    """A ``CopyEngine`` for one GPU; memory in the arena must be registered first."""

    def __init__(
        self,
        device: torch.device,
        *,
        load_kernel_below_bytes: int = LOAD_KERNEL_BELOW_BYTES,
        store_kernel_below_bytes: int = STORE_KERNEL_BELOW_BYTES,
    ) -> None:
        self._device = device
        self._registration: Registration | None = None
        # Lower numbers go first: what a request waits for before what may be of use later.
        self._lanes = {
            Direction.LOAD: _Lane(Direction.LOAD, device, -1, load_kernel_below_bytes),
            Direction.STORE: _Lane(Direction.STORE, device, 0, store_kernel_below_bytes),
        }

    def fence(self) -> Fence:
        """Return a fence behind all work on the calling thread's current stream."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream())
        return CudaFence(event)

    def adopt(self, arena: Arena) -> None:
        """Register the arena with CUDA in the background; the earlier one is unregistered."""
        torch.cuda.set_device(self._device)  # a new thread stands on device 0
        earlier, self._registration = self._registration, None
        if earlier is not None:
            earlier.undo(_UNDO_S)
        self._registration = Registration(arena, self._device)

    def is_ready(self, end_offset: int) -> bool:
        """Say whether the arena is registered up to ``end_offset``."""
        registration = self._registration
        return registration is not None and registration.covers(end_offset)

    def submit(
        self,
        direction: Direction,
        copies: Copies,
        *,
        after: Fence,
        keep_alive: object,
        on_done: Callable[[Ticket], None],
    ) -> None:
        """Enqueue the copies behind the fence; ``ValueError`` for a fence of another engine."""
        if not isinstance(after, CudaFence):
            raise ValueError(f"a fence of type {type(after).__name__}, not of this engine")
        self._lanes[direction].submit(copies, after.event, keep_alive, on_done)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; False when the time ran out."""
        deadline_s = time.monotonic() + timeout_s
        return all([lane.wait_idle(deadline_s) for lane in self._lanes.values()])

    def close(self, timeout_s: float) -> bool:
        """Refuse new work and wait for what is in flight; False when the time ran out."""
        deadline_s = time.monotonic() + timeout_s
        is_closed = all([lane.close(deadline_s) for lane in self._lanes.values()])
        registration, self._registration = self._registration, None
        if is_closed and registration is not None:
            registration.undo(max(0.0, deadline_s - time.monotonic()))
        return is_closed


def _enqueue_copies(copies: Copies, stream: int) -> None:
    """Hand copies to the driver's copy engines, in one call where it has one for many."""
    if cudart.has_batch_copy():
        cudart.copy_batch(copies.sources, copies.targets, copies.lengths, stream)
        return
    for source, target, length in zip(
        copies.sources.tolist(), copies.targets.tolist(), copies.lengths.tolist(), strict=True
    ):
        cudart.copy_one(source, target, length, stream)
