"""The few CUDA runtime calls that torch does not offer, through ctypes: no build step, no lists.

The library is the one that torch has loaded already, found among this process's mappings, so
that there is one runtime and one set of contexts.
"""

import ctypes
import functools
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from millpond.model.errors import SetupError

_SUCCESS: Final = 0
_HOST_REGISTER_PORTABLE: Final = 1
_HOST_REGISTER_MAPPED: Final = 2
_SOURCE_ORDER_STREAM: Final = 1
_DEFAULT_KIND: Final = 4
_CAPTURE_MODE_RELAXED: Final = 2
_BATCH_SIGNATURE_CHANGED: Final = 13000
_BATCH_DRIVER_MIN: Final = 12080


class CudaFailed(SetupError):
    """A call of the CUDA runtime failed; names the call and what the runtime said."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``cudaMemcpyAttributes``: in which order the sources are read; no location hints."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_location", _Location),
        ("dst_location", _Location),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def _library() -> ctypes.CDLL:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.rpartition(" ")[2]
        if "libcudart" in path:
            return ctypes.CDLL(path)
    raise CudaFailed("no CUDA runtime is loaded in this process: import a CUDA torch first")


def _check(call: str, status: int) -> None:
    if status == _SUCCESS:
        return
    library = _library()
    library.cudaGetErrorString.restype = ctypes.c_char_p
    reason = library.cudaGetErrorString(status).decode()
    library.cudaGetLastError()  # or the next unrelated call would report it
    raise CudaFailed(f"{call} failed: {reason} (error {status})")


@functools.cache
def runtime_version() -> int:
    """Return the runtime's version, as 13000 for 13.0."""
    version = ctypes.c_int()
    _check("cudaRuntimeGetVersion", _library().cudaRuntimeGetVersion(ctypes.byref(version)))
    return version.value


@functools.cache
def driver_version() -> int:
    """Return the newest version that the driver supports, as 13000 for 13.0."""
    version = ctypes.c_int()
    _check("cudaDriverGetVersion", _library().cudaDriverGetVersion(ctypes.byref(version)))
    return version.value


def has_batch_copy() -> bool:
    """Say whether runtime and driver copy many pages in one call (CUDA 12.8 and later)."""
    has_symbol = hasattr(_library(), "cudaMemcpyBatchAsync")
    return has_symbol and driver_version() >= _BATCH_DRIVER_MIN


def pci_bus_id(device: int) -> str:
    """Return where a device sits, as 0000:1b:00.0."""
    text = ctypes.create_string_buffer(32)
    status = _library().cudaDeviceGetPCIBusId(text, ctypes.c_int(32), ctypes.c_int(device))
    _check("cudaDeviceGetPCIBusId", status)
    return text.value.decode().lower()


def relax_capture() -> None:
    """Let this thread allocate, register and copy while another one captures a graph.

    Engines capture their graphs at start, while the arena is being registered; without this a
    call of ours in another thread would spoil a capture in the runtime's global mode.
    """
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    status = _library().cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    _check("cudaThreadExchangeStreamCaptureMode", status)


def register_host(address: int, num_bytes: int) -> None:
    """Page-lock memory of this process for all devices; blocks for about 0.06 s a GiB.

    Raises ``CudaFailed``.
    """
    flags = _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED
    status = _library().cudaHostRegister(
        ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(flags)
    )
    _check("cudaHostRegister", status)


def unregister_host(address: int) -> None:
    """Undo ``register_host``; no copy may be in flight."""
    _check("cudaHostUnregister", _library().cudaHostUnregister(ctypes.c_void_p(address)))


def copy_batch(
    sources: NDArray[np.uint64],
    targets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    stream: int,
) -> None:
    """Enqueue independent copies on ``stream`` (a raw handle, never the legacy stream).

    The arrays may be freed on return. Sources are read in stream order.
    """
    attributes = _Attributes(src_access_order=_SOURCE_ORDER_STREAM)
    first = ctypes.c_size_t(0)
    arguments: list[object] = [
        ctypes.c_void_p(targets.ctypes.data),
        ctypes.c_void_p(sources.ctypes.data),
        ctypes.c_void_p(lengths.ctypes.data),
        ctypes.c_size_t(len(lengths)),
        ctypes.byref(attributes),
        ctypes.byref(first),
        ctypes.c_size_t(1),
    ]
    if runtime_version() < _BATCH_SIGNATURE_CHANGED:
        arguments.append(ctypes.byref(ctypes.c_size_t()))  # index of the copy that failed
    status = _library().cudaMemcpyBatchAsync(*arguments, ctypes.c_void_p(stream))
    _check("cudaMemcpyBatchAsync", status)


def copy_each(
    sources: NDArray[np.uint64],
    targets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    stream: int,
) -> None:
    """Enqueue copies on ``stream`` with a call for each."""
    for source, target, length in zip(
        sources.tolist(), targets.tolist(), lengths.tolist(), strict=True
    ):
        copy_one(source, target, length, stream)


def copy_one(source: int, target: int, num_bytes: int, stream: int) -> None:
    """Enqueue one copy on ``stream``; the direction follows from the addresses."""
    status = _library().cudaMemcpyAsync(
        ctypes.c_void_p(target),
        ctypes.c_void_p(source),
        ctypes.c_size_t(num_bytes),
        _DEFAULT_KIND,
        ctypes.c_void_p(stream),
    )
    _check("cudaMemcpyAsync", status)
