"""Taking the arena's memory from the kernel up front, on all cores.

A page that is missing later would be taken in the middle of somebody's copy, or kill the
process that touches it. Populating fails with an error instead.
"""

import contextlib
import ctypes
import errno
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

from millpond.arena.arena import Arena
from millpond.model.errors import ArenaTooLarge
from millpond.model.limits import ARENA_HEADER_BYTES, MIB

_PIECE_BYTES: Final = 16 * MIB
"""What one call populates: a few milliseconds, so that a stop is prompt."""
_THREADS_MAX: Final = 16
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; not in Python's mmap module before 3.15, whose madvise also keeps the GIL."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def touch(
    arena: Arena,
    fd: int,
    *,
    stop: threading.Event,
    on_progress: Callable[[int], None],
) -> bool:
    """Populate every page of the slots and their checksums; return False if it was stopped.

    ``on_progress(done_bytes)`` is called from the calling thread, which blocks. Raises
    ``ArenaTooLarge`` when the kernel has no memory left; what was taken goes with the arena.
    """
    pieces: queue.SimpleQueue[int] = queue.SimpleQueue()
    for start in range(0, arena.total_bytes, _PIECE_BYTES):
        pieces.put(start)
    num_pieces = pieces.qsize()
    done: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
    num_threads = min(len(os.sched_getaffinity(0)), _THREADS_MAX, num_pieces)
    halt = threading.Event()
    threads = [
        threading.Thread(
            target=_populate_pieces, args=(arena, fd, pieces, done, halt), name="millpond-touch"
        )
        for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    done_bytes = 0
    try:
        for _ in range(num_pieces):
            result = _next_result(done, stop)
            if result is None:
                return False
            if isinstance(result, OSError):
                raise _no_memory(arena, done_bytes, result)
            done_bytes += result
            on_progress(done_bytes)
    finally:
        halt.set()
        for thread in threads:
            thread.join()
    return True


def _next_result(
    done: "queue.SimpleQueue[int | OSError]", stop: threading.Event
) -> int | OSError | None:
    """Wait for a piece or for ``stop``, whichever comes first (None)."""
    while not stop.is_set():
        with contextlib.suppress(queue.Empty):
            return done.get(timeout=0.05)
    return None


def _populate_pieces(
    arena: Arena,
    fd: int,
    pieces: "queue.SimpleQueue[int]",
    done: "queue.SimpleQueue[int | OSError]",
    halt: threading.Event,
) -> None:
    while not halt.is_set():
        try:
            start = pieces.get_nowait()
        except queue.Empty:
            return
        num_bytes = min(_PIECE_BYTES, arena.total_bytes - start)
        try:
            _populate(arena, fd, start, num_bytes)
        except OSError as error:
            done.put(error)
            return
        done.put(num_bytes)


def _populate(arena: Arena, fd: int, start: int, num_bytes: int) -> None:
    while _LIBC.madvise(arena.address + start, num_bytes, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # a kernel before 5.14: allocate without mapping
            os.posix_fallocate(fd, ARENA_HEADER_BYTES + start, num_bytes)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))


def _no_memory(arena: Arena, done_bytes: int, error: OSError) -> ArenaTooLarge:
    message = (
        f"the kernel gave {done_bytes // MIB} MiB of {arena.total_bytes // MIB} MiB for the "
        f"arena ({error.strerror}); choose a smaller size or free memory"
    )
    return ArenaTooLarge(message, wanted_bytes=arena.total_bytes, available_bytes=done_bytes)
