"""A GPU's streams: what the lanes enqueue on, and the ways to move pages that they choose from.

torch's streams are non-blocking: nothing is ordered by the legacy stream, and every edge is
one that ``streams.py`` or ``staging.py`` makes.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from millpond.arena.arena import Arena
from millpond.transfer import cudart
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import CopyFailed, Event, Fence, Stream
from millpond.transfer.feed import CALLS_MAX, COPIES_MAX, PORTION_COPIES, Feed
from millpond.transfer.kernel import PageTable, can_copy
from millpond.transfer.link import LinkReport, LinkSpeed
from millpond.transfer.measuring import Measured, Sample, log_measured, measure
from millpond.transfer.packing import HostRegion
from millpond.transfer.registration import Registration
from millpond.transfer.routes import Route, Routes, fallback
from millpond.transfer.staging import PIECE_BYTES, STAGED_BYTES_MAX, Stager
from millpond.transfer.streams import StreamCopyEngine

logger = logging.getLogger("vllm.millpond")

_UNDO_S = 60.0
_MEASURED_AGAIN_MAX: Final = 3
_BUSY_S: Final = 5.0
"""An engine that has not made a step for so long is idle: longer than a step of any prefill."""
_BEHIND_A_FENCE_MAX: Final = 4096
"""Copies on a stream behind a fence while it is not passed; twice as many were fine."""
_KERNEL_COPIES: Final = 4096
"""Copies of one launch."""
_STAGED_PORTION_BYTES: Final = 4 * PIECE_BYTES
"""Each portion has a table of its own, which costs about as much as a piece."""
_KERNEL_PROGRAMS: Final = 32
"""Programs of the kernel over the link, each on one of the GPU's 132 multiprocessors (H200)."""
_PRIORITIES: Final = {Direction.LOAD: -1, Direction.STORE: 0}
"""Lower numbers go first: what a request waits for before what may be of use later."""


class CudaEvent:
    """An event on a CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_passed(self) -> bool:
        """Say whether the device has come past the event, or failed: ``wait`` tells which."""
        try:
            return self.event.query()
        except RuntimeError:  # how torch reports a failed device
            return True

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
        self._stager = Stager(device, direction, self._stream, self._feed)
        self._can_stage = True

    def wait_for(self, fence: Fence) -> None:
        """Let the device hold back later work; ``CopyFailed`` for a fence of another kind."""
        if not isinstance(fence, CudaEvent):
            raise CopyFailed(f"a fence of type {type(fence).__name__}, not of this device")
        try:
            self._stream.wait_event(fence.event)
            self._stager.wait_for(fence.event)
        except RuntimeError as failure:
            raise CopyFailed(str(failure)) from failure
        self._fence = fence

    def portion(self, copies: Copies) -> int:
        """Return how many are handed over at a time: those that take half a millisecond or so."""
        portions = [
            _portion(route, max(lengths)) for route, lengths in self._routes_of(copies).items()
        ]
        return min(portions, default=1)

    def awaited(self, copies: Copies) -> CudaEvent | None:
        """Return the end of earlier copies where there would be too many with these."""
        routes = self._routes_of(copies)
        is_held = self._fence is not None and not self._fence.is_passed()
        num_max = _BEHIND_A_FENCE_MAX if is_held else COPIES_MAX
        if any(_is_by_calls(route) for route in routes):
            num_max = CALLS_MAX
        # Staged pages are few copies; how few is known when they are packed.
        num_copies = 1 if set(routes) <= {Route.STAGED} else len(copies.lengths)
        event = self._feed.awaited(num_copies, num_max)
        if event is None and Route.STAGED in routes:
            event = self._stager.awaited(copies.num_bytes)
        return None if event is None else CudaEvent(event)

    def copy(self, copies: Copies) -> object:
        """Enqueue a portion, each page by the route of its size."""
        try:
            by_route = self._routes_of(copies)
            if len(by_route) == 1:
                (route,) = by_route
                return self._enqueue(route, copies)
            return [
                self._enqueue(route, copies.part(np.isin(copies.lengths, lengths)))
                for route, lengths in by_route.items()
            ]
        except (cudart.CudaFailed, RuntimeError) as failure:  # torch and Triton raise the latter
            raise CopyFailed(str(failure)) from failure

    def _routes_of(self, copies: Copies) -> dict[Route, list[int]]:
        """Return the routes that copies take, and the lengths that go each."""
        found: dict[Route, list[int]] = {}
        routes = self._routes()
        for length in copies.distinct_lengths():
            route = self._possible(routes.of(self._direction, length), length, copies)
            found.setdefault(route, []).append(length)
        return found

    def _possible(self, route: Route, length: int, copies: Copies) -> Route:
        """Return ``route``, or the one that is left where these copies cannot take it."""
        if route is Route.STAGED and not self._can_stage:
            route = Route.KERNEL if self._direction is Direction.LOAD else Route.BATCH
        is_too_long = route is Route.STAGED and length > STAGED_BYTES_MAX
        needs_kernel = route in (Route.STAGED, Route.KERNEL)
        if is_too_long or (
            needs_kernel and not can_copy(copies.sources, copies.targets, copies.lengths)
        ):
            return Route.BATCH
        return route

    def _enqueue(self, route: Route, copies: Copies) -> object:
        arrays = (copies.sources, copies.targets, copies.lengths)
        if route is Route.STAGED:
            return self._stage(copies)
        if route is Route.KERNEL:
            table = PageTable(*arrays, self._stream)
            table.copy(slice(None), self._stream, _KERNEL_PROGRAMS)
            return table
        self._feed.copy(*arrays, one_by_one=route is Route.LOOP)
        return copies

    def _stage(self, copies: Copies) -> object:
        """Enqueue by way of the buffer; where there is no memory for it, later ones do not."""
        try:
            return self._stager.enqueue(copies, self._region())
        except torch.OutOfMemoryError as failure:
            self._can_stage = False
            logger.warning(
                "event=no_staging direction=%s reason=%r remedy=%r",
                self._direction.value,
                "no GPU memory is left for the buffer",
                "lower --gpu-memory-utilization a little: small pages are copied slower now",
            )
            raise CopyFailed("no GPU memory is left for the staging buffer") from failure

    def record(self) -> CudaEvent:
        """Return an event behind everything that was enqueued so far."""
        event = torch.cuda.Event(blocking=True)
        try:
            self._stager.join()
            event.record(self._stream)
        except RuntimeError as failure:
            raise CopyFailed(str(failure)) from failure
        return CudaEvent(event)

    def close(self, timeout_s: float) -> bool:
        """Nothing to give up: torch keeps its streams."""
        return timeout_s >= 0


def hand_over(stream: CudaStream, copies: Copies) -> object:
    """Enqueue all portions of some copies, waiting where there is no room."""
    held: list[object] = []
    size = stream.portion(copies)
    for start in range(0, len(copies.lengths), size):
        some = copies.part(slice(start, start + size))
        while (awaited := stream.awaited(some)) is not None:
            awaited.wait()
        held.append(stream.copy(some))
    return held


def _portion(route: Route, page_bytes: int) -> int:
    if _is_by_calls(route):
        return CALLS_MAX // 2
    if route is Route.STAGED:
        return max(1, _STAGED_PORTION_BYTES // page_bytes)
    return _KERNEL_COPIES if route is Route.KERNEL else PORTION_COPIES


def _is_by_calls(route: Route) -> bool:
    return route is Route.LOOP or (route is Route.BATCH and not cudart.has_batch_copy())


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
        self._stepped_s = -_BUSY_S

    def note_step(self) -> None:
        """Take note that the engine is at work."""
        self._stepped_s = time.monotonic()

    def fence(self) -> Fence:
        """Return a fence behind all work on the calling thread's current stream."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream())
        return CudaEvent(event)

    @property
    def can_hold_back(self) -> bool:
        """Return True."""
        return True

    def hold_back(self, end: Event) -> None:
        """Let the calling thread's current stream wait for an event."""
        if not isinstance(end, CudaEvent):
            raise CopyFailed(f"an event of type {type(end).__name__}, not of this device")
        try:
            torch.cuda.current_stream().wait_event(end.event)
        except RuntimeError as failure:
            raise CopyFailed(str(failure)) from failure

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
            is_busy=lambda: time.monotonic() - self._stepped_s < _BUSY_S,
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
            stream = streams[direction]
            held = [hand_over(stream, copies) for _ in range(num_times)]
            stream.record().wait()
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
        self._cuda = CudaDevice(device, on_link=on_link)
        super().__init__(self._cuda)

    def step(self, *, early: bool = False) -> None:
        """As every engine's; and the registration of an arena lets this one go first."""
        self._cuda.note_step()
        super().step(early=early)
