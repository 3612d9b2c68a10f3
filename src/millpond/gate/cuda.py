"""A GPU under test: torch's streams, which are non-blocking, and a kernel that holds one up."""

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.gate.device import Hold, Size, Where
from millpond.gate.errors import NoGpu, NoPackage, TooLittleMemory
from millpond.model.limits import KIB, MIB
from millpond.transfer.device import CopyFailed, Device, Fence
from millpond.transfer.routes import Route

_ROUTES: Final = (
    (Route.BATCH, Size(64, 256 * KIB)),
    # So many that the last portion finds room only once the fence is passed.
    (Route.BATCH, Size(6912, 16 * KIB)),
    # Several portions, some of which wait for those before them.
    (Route.LOOP, Size(1152, 64 * KIB)),
    # Two portions, and more than two pieces of the staging buffer, so that each is used again.
    (Route.STAGED, Size(768, 192 * KIB)),
    (Route.KERNEL, Size(256, 64 * KIB)),
)

_FREE_BYTES_MIN: Final = 1024 * MIB
"""Three times the pages of the largest test, buffers of our own engine, and what kernels take."""
_CONNECTIONS: Final = "32"


def open_cuda() -> "CudaGateDevice":
    """Return this process's current GPU, warmed up; raises a kind of ``CannotTest``."""
    # Streams that share a hardware queue wait for each other by accident, which hides races.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", _CONNECTIONS)
    if not torch.cuda.is_available():
        raise NoGpu("torch finds no CUDA device here: use --device emulated for the logic alone")
    try:
        from millpond.gate import spin
    except ImportError as error:
        raise NoPackage(f"the kernels of this test need triton: {error}") from error
    del spin
    free, total = torch.cuda.mem_get_info()
    if free < _FREE_BYTES_MIN:
        raise TooLittleMemory(
            f"{free // MIB} MiB of the GPU's {total // MIB} MiB are free, and the test needs "
            f"{_FREE_BYTES_MIN // MIB}: stop what uses it, or choose another one "
            "(CUDA_VISIBLE_DEVICES)"
        )
    return CudaGateDevice(torch.device("cuda", torch.cuda.current_device()))


class CudaEvent:
    """A fence of torch's."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def is_passed(self) -> bool:
        """Say whether the device has come past it."""
        return self._event.query()


class CudaGateDevice:
    """A ``GateDevice`` for one GPU."""

    is_emulated = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.name = f"cuda: {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
        self._streams = {
            Where.WORK: torch.cuda.Stream(device),
            Where.OTHER: torch.cuda.Stream(device),
            Where.LEGACY: torch.cuda.default_stream(device),
        }
        self._looking = torch.cuda.Stream(device)
        self._holds: list[Hold] = []
        """Their memory is read by kernels that may still run, whoever has forgotten them."""
        self._warm_up()

    @property
    def routes(self) -> Sequence[tuple[Route, Size]]:
        """All routes that this driver has."""
        from millpond.transfer import cudart

        has_batch = cudart.has_batch_copy()
        return tuple(each for each in _ROUTES if has_batch or each[0] is not Route.BATCH)

    def copier(self, route: Route) -> Device:
        """Make the device of our own copy engine."""
        from millpond.transfer.cuda import CudaDevice
        from millpond.transfer.routes import Routes

        return CudaDevice(self._device, routes=Routes.only(route))

    def make_pages(self, size: Size) -> torch.Tensor:
        """Return zeroed pages."""
        try:
            pages = torch.zeros(
                (size.num_pages, size.page_bytes), dtype=torch.uint8, device=self._device
            )
        except torch.OutOfMemoryError as error:
            raise TooLittleMemory(
                f"the GPU has no {size.num_pages * size.page_bytes // MIB} MiB for pages"
            ) from error
        torch.cuda.synchronize(self._device)
        return pages

    def make_host(self, num_bytes: int) -> torch.Tensor:
        """Return page-locked memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    @contextmanager
    def on(self, where: Where) -> Generator[None]:
        """Make a stream the current one of the calling thread."""
        with torch.cuda.stream(self._streams[where]):
            yield

    def hold(self, limit_s: float) -> Hold:
        """Hold the current stream up."""
        from millpond.gate.spin import SpinHold

        hold = SpinHold(limit_s)
        hold.enqueue()
        self._holds.append(hold)
        return hold

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Enqueue a copy on the current stream."""
        target.copy_(source, non_blocking=True)

    def point(self) -> Fence:
        """Return an event behind all work on the current stream."""
        event = torch.cuda.Event()
        event.record()
        return CudaEvent(event)

    def recycle(self, num_bytes: int) -> None:
        """Take memory of both kinds from torch's allocators, and write into it."""
        host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        host.fill_(0x55)
        for stream in (self._streams[Where.OTHER], self._looking):
            with torch.cuda.stream(stream):
                torch.empty(num_bytes, dtype=torch.uint8, device=self._device).fill_(0x55)

    def write(self, pages: torch.Tensor, data: NDArray[np.uint8]) -> None:
        """Write pages, and wait for that."""
        with torch.cuda.stream(self._looking):
            pages.copy_(torch.as_tensor(data))
        self._looking.synchronize()

    def read(self, pages: torch.Tensor) -> NDArray[np.uint8]:
        """Return the bytes of pages, read on a stream of its own."""
        with torch.cuda.stream(self._looking):
            return pages.cpu().numpy()

    def synchronize(self) -> None:
        """Wait for the device; every hold has a limit, and so has this."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as failure:  # how torch reports a failed device
            raise CopyFailed(str(failure)) from failure
        self._holds.clear()

    def close(self) -> None:
        """Give back what torch keeps for later."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _warm_up(self) -> None:
        """Load every kernel and take every kind of memory once: doing so may order streams."""
        pages = self.make_pages(Size(2, 4 * KIB))
        host = self.make_host(pages.nbytes)
        for where in Where:
            with self.on(where):
                hold = self.hold(0.0)
                self.copy(host, pages.reshape(-1))
                self.copy(pages.reshape(-1), host)
                self.copy(pages, pages.clone())
                self.point()
            self.synchronize()
            if not hold.is_open():
                raise CopyFailed("the kernel that holds a stream up did not say that it ended")
        self.recycle(pages.nbytes)
        self.write(pages, self.read(pages))
        self.synchronize()
