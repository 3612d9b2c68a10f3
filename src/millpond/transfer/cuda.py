"""A GPU's streams: what the lanes enqueue on, and the ways to move pages that they choose from.

torch's streams are non-blocking: nothing is ordered by the legacy stream, and every edge is
one that ``streams.py`` or ``staging.py`` makes.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from millpond.arena.arena import Arena
from millpond.transfer import cudart
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import CopyFailed, Fence, Stream
from millpond.transfer.feed import CALLS_MAX, Feed
from millpond.transfer.kernel import PageTable, can_copy
from millpond.transfer.link import LinkReport, LinkSpeed
from millpond.transfer.measuring import Measured, Sample, log_measured, measure
from millpond.transfer.packing import HostRegion
from millpond.transfer.registration import Registration
from millpond.transfer.routes import Route, Routes, fallback
from millpond.transfer.staging import STAGED_BYTES_MAX, Stager
from millpond.transfer.streams import StreamCopyEngine

logger = logging.getLogger("vllm.millpond")

_UNDO_S = 60.0
_MEASURED_AGAIN_MAX: Final = 3
_QUICK_COPIES_MAX: Final = 3072
"""Copies that the driver takes within 2 ms (0.6 us each on an H200's host)."""
_BEHIND_A_FENCE_MAX: Final = 4096
"""Copies that are enqueued behind a fence while it is not passed; twice as many were fine."""
_KERNEL_PROGRAMS: Final = 32
"""Programs of the kernel over the link, each on one of the GPU's 132 multiprocessors (H200)."""
_PRIORITIES: Final = {Direction.LOAD: -1, Direction.STORE: 0}
"""Lower numbers go first: what a request waits for before what may be of use later."""


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
    """A non-blocking stream for one direction, and the ways to copy on it.

    ``routes`` and ``region`` are asked for with each submission: they change once the link
    has been measured, and with each arena.
    """

    def __init__(
        self,
        device: torch.device,
        direction: Direction,
        *,
        routes: Callable[[], Routes],
        region: Callable[[], HostRegion],
    ) -> None:
        self._direction = direction
        self._routes = routes
        self._region = region
        self._stream = torch.cuda.Stream(device=device, priority=_PRIORITIES[direction])
        self._fence: CudaEvent | None = None
        """What later work waits for on the device."""
        self._feed = Feed(self._stream)
        self._stager: Stager | None = Stager(device, direction, self._stream, self._feed)

    def wait_for(self, fence: Fence) -> None:
        """Let the device hold back later work; ``CopyFailed`` for a fence of another kind."""
        if not isinstance(fence, CudaEvent):
            raise CopyFailed(f"a fence of type {type(fence).__name__}, not of this device")
        try:
            self._stream.wait_event(fence.event)
        except RuntimeError as failure:
            raise CopyFailed(str(failure)) from failure
        self._fence = fence

    def is_quick(self, copies: Copies) -> bool:
        """Say whether the driver takes the copies within 2 ms, and no wait comes before."""
        num_copies = len(copies.lengths)
        if num_copies > _QUICK_COPIES_MAX or not self._feed.has_room(num_copies):
            return False
        routes = self._routes_of(copies)
        if _needs_calls(routes) and not self._feed.has_room(num_copies, CALLS_MAX):
            return False
        if Route.STAGED not in routes or self._stager is None:
            return True
        return self._stager.has_room(copies.num_bytes)

    def _routes_of(self, copies: Copies) -> dict[Route, list[int]]:
        """Return the routes of the copies, and the lengths that go each."""
        found: dict[Route, list[int]] = {}
        routes = self._routes()
        for length in np.unique(copies.lengths).tolist():
            found.setdefault(routes.of(self._direction, length), []).append(length)
        return found

    def copy(self, copies: Copies) -> object:
        """Enqueue the copies, each by the route of its size.

        So many that a stream may not hold them are enqueued when the fence has been passed.
        """
        by_route = self._routes_of(copies)
        num_max = CALLS_MAX if _needs_calls(by_route) else _BEHIND_A_FENCE_MAX
        if self._fence is not None and len(copies.lengths) > num_max:
            self._fence.wait()
        try:
            return [
                self._enqueue(route, _chosen(copies, lengths))
                for route, lengths in by_route.items()
            ]
        except (cudart.CudaFailed, RuntimeError) as failure:  # torch and Triton raise the latter
            raise CopyFailed(str(failure)) from failure

    def _enqueue(self, route: Route, copies: Copies) -> object:
        needs_kernel = route in (Route.STAGED, Route.KERNEL)
        arrays = (copies.sources, copies.targets, copies.lengths)
        is_too_long = route is Route.STAGED and int(copies.lengths.max()) > STAGED_BYTES_MAX
        if is_too_long or (needs_kernel and not can_copy(*arrays)):
            route = Route.BATCH
        if route is Route.STAGED:
            staged = self._stage(copies)
            if staged is not None:
                return staged
            route = Route.KERNEL if self._direction is Direction.LOAD else Route.BATCH
        if route is Route.KERNEL:
            table = PageTable(*arrays, self._stream)
            table.copy(slice(None), self._stream, _KERNEL_PROGRAMS)
            return table
        self._feed.copy(*arrays, one_by_one=route is Route.LOOP)
        return copies

    def _stage(self, copies: Copies) -> object:
        """Enqueue by way of the buffer; None where that does not pay or there is no memory."""
        if self._stager is None:
            return None
        try:
            return self._stager.enqueue(copies, self._region())
        except torch.OutOfMemoryError:
            logger.warning(
                "event=no_staging direction=%s reason=%r remedy=%r",
                self._direction.value,
                "no GPU memory is left for the buffer",
                "lower --gpu-memory-utilization a little: small pages are copied slower now",
            )
            self._stager = None
            return None

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


def _needs_calls(routes: Collection[Route]) -> bool:
    """Say whether some copies are handed over one by one."""
    return Route.LOOP in routes or not cudart.has_batch_copy()


def _chosen(copies: Copies, lengths: Sequence[int]) -> Copies:
    some = np.isin(copies.lengths, lengths)
    return Copies(copies.sources[some], copies.targets[some], copies.lengths[some])


class CudaDevice:
    """A ``Device`` for one GPU; memory in the arena must be registered first.

    ``routes`` None measures the link and the routes once the arena's first piece is
    registered; until then the usual ones serve. ``on_link`` is told what was found, and what
    cannot be registered, from threads of the device's own.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        routes: Routes | None = None,
        on_link: Callable[[LinkReport], None] | None = None,
    ) -> None:
        self._device = device
        self._routes = routes or fallback(has_batch=cudart.has_batch_copy())
        self._is_measured = routes is not None
        self._on_link = on_link
        self._report = LinkReport()
        self._telling = threading.Lock()
        """Taken to change the report and to tell of it: several threads do."""
        self._region = HostRegion(0, 1)
        self.registration: Registration | None = None

    def fence(self) -> Fence:
        """Return a fence behind all work on the calling thread's current stream."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream())
        return CudaEvent(event)

    def stream(self, direction: Direction) -> Stream:
        """Make a stream for one direction."""
        return CudaStream(
            self._device, direction, routes=lambda: self._routes, region=lambda: self._region
        )

    def enter_thread(self) -> None:
        """Put a new thread, which stands on device 0, on this device."""
        torch.cuda.set_device(self._device)
        cudart.relax_capture()

    def adopt(self, arena: Arena) -> None:
        """Register the arena with CUDA in the background; the earlier one is unregistered."""
        self.enter_thread()
        self.release(_UNDO_S)
        self._region = HostRegion(arena.address, arena.extent_bytes)
        self._tell(problem="")
        self.registration = Registration(
            arena,
            prepare=self.enter_thread,
            on_first=self._measure_once,
            on_failure=lambda problem: self._tell(problem=problem),
        )

    def is_ready(self, end_offset: int) -> bool:
        """Say whether the arena is registered up to ``end_offset``."""
        registration = self.registration
        return registration is not None and registration.covers(end_offset)

    def release(self, timeout_s: float) -> None:
        """Unregister the adopted arena; no copy is in flight."""
        registration, self.registration = self.registration, None
        if registration is not None:
            registration.undo(timeout_s)

    def measure(self) -> Measured:
        """Time the link and the routes on streams of their own; blocks for about 0.2 s.

        Raises ``RuntimeError`` (of torch) or ``CudaFailed`` where it cannot.
        """
        sample = Sample(self._device)
        region = HostRegion(sample.host.data_ptr(), sample.host.nbytes)
        only = [Routes.only(Route.LOOP)]
        streams = {
            direction: CudaStream(
                self._device, direction, routes=lambda: only[0], region=lambda: region
            )
            for direction in Direction
        }

        def copy(direction: Direction, route: Route, copies: Copies, num_times: int) -> None:
            only[0] = Routes.only(route)
            held = [streams[direction].copy(copies) for _ in range(num_times)]
            streams[direction].record().wait()
            del held  # until here it was in use

        return measure(self._device, copy, sample)

    def _measure_best(self) -> Measured:
        """Measure again where the link looks slow: others may have been using it."""
        best = self.measure()
        for _ in range(_MEASURED_AGAIN_MAX):
            if not best.link.is_slow:
                break
            again = self.measure()
            best = max(best, again, key=lambda each: each.link.slower_gb_s)
        return best

    def _measure_once(self) -> None:
        if self._is_measured:
            return
        self._is_measured = True
        try:
            measured = self._measure_best()
        except torch.OutOfMemoryError as failure:
            logger.warning("event=link_not_measured reason=%r", str(failure))
            return
        except Exception as failure:
            # Some way of copying does not work here: use the one that needs least.
            logger.warning("event=link_not_measured reason=%r", failure, exc_info=failure)
            self._routes = Routes.only(Route.LOOP)
            return
        self._routes = measured.routes
        log_measured(measured)
        self._tell(speed=measured.link)

    def _tell(self, **changes: LinkSpeed | str) -> None:
        with self._telling:
            self._report = replace(self._report, **changes)
            if self._on_link is not None:
                self._on_link(self._report)


class CudaCopyEngine(StreamCopyEngine):
    """A ``CopyEngine`` for one GPU; ``on_link`` as for its device."""

    def __init__(
        self, device: torch.device, *, on_link: Callable[[LinkReport], None] | None = None
    ) -> None:
        super().__init__(CudaDevice(device, on_link=on_link))
