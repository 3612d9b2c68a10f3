"""Taking the arena's memory from the kernel before it is used, on all cores.

A page that is missing later would be taken in the middle of somebody's copy, or kill the
process that touches it. Populating fails with an error instead.
"""

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator
from typing import Final

from millpond.arena.arena import Arena
from millpond.model.errors import ArenaTooLarge
from millpond.model.limits import ARENA_HEADER_BYTES, MIB

_PIECE_BYTES: Final = 4 * MIB
"""What one call populates: a millisecond, or sixteen beside as many others. Meanwhile the kernel
lets no thread of the process change its mappings, such as the one that serves: it may need more
memory for itself, or fork."""
_THREADS_MAX: Final = 16
_POLL_S: Final = 0.05
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14; not in Python's mmap module before 3.15, whose madvise also keeps the GIL."""
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Touching:
    """The touching of an arena by threads of its own, from its first slot to its last.

    The checksums come before all slots. Touched memory counts once there is none missing before
    it: then every process that maps the arena sees it (``Arena.usable_bytes``). ``news_fd``, of
    this object, is readable when another extent counts, and at the end, whatever that is.
    """

    def __init__(self, arena: Arena, fd: int) -> None:
        self.news_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._arena = arena
        self._fd = fd
        arena.tell_usable(0)
        self._pieces = (
            *_pieces(arena.size_bytes, arena.total_bytes),
            *_pieces(0, arena.size_bytes),
        )
        self._changed = threading.Condition()
        """Guards all below."""
        self._num_taken = 0
        self._populated: set[int] = set()
        self._num_whole = 0
        """Pieces without one missing before them."""
        self._error: OSError | None = None
        self._is_halted = False
        self._num_running = min(len(os.sched_getaffinity(0)), _THREADS_MAX, len(self._pieces))
        self._threads = [
            threading.Thread(target=self._run, name="millpond-touch")
            for _ in range(self._num_running)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def touched_bytes(self) -> int:
        """How much of the slot area is there, from its start."""
        return self._arena.usable_bytes

    @property
    def failure(self) -> ArenaTooLarge | None:
        """Why no more will come: the kernel has no memory left; None while it has."""
        with self._changed:
            is_over = not self._num_running
            error = self._error
        # What other threads had begun before it failed still counts.
        return _no_memory(self._arena, error) if error is not None and is_over else None

    def wait(
        self, num_bytes: int, *, stop: threading.Event, on_progress: Callable[[int], None]
    ) -> bool:
        """Wait until ``num_bytes`` are touched; return False if ``stop`` was set meanwhile.

        ``on_progress(touched_bytes)`` is called from the calling thread. Raises
        ``ArenaTooLarge`` when the kernel has no memory left before.
        """
        touched_bytes = 0
        while not stop.is_set() and touched_bytes < num_bytes:
            failure = self.failure
            with self._changed:
                if failure is None and self.touched_bytes == touched_bytes:
                    self._changed.wait(_POLL_S)
            if self.touched_bytes > touched_bytes:
                touched_bytes = self.touched_bytes
                on_progress(touched_bytes)
            elif failure is not None:
                raise failure
        return not stop.is_set()

    def take_news(self) -> None:
        """Make ``news_fd`` unreadable until there is something new."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.news_fd)

    def close(self) -> None:
        """Stop: returns when each thread has ended its piece. What was taken goes with the arena.

        To be called before the arena is closed.
        """
        with self._changed:
            self._is_halted = True
        for thread in self._threads:
            thread.join()
        os.close(self.news_fd)

    def _run(self) -> None:
        error: OSError | None = None
        try:
            while error is None and (index := self._take()) is not None:
                error = self._touch(index)
        finally:
            with self._changed:
                self._error = self._error or error
                self._num_running -= 1
                self._changed.notify_all()
                os.eventfd_write(self.news_fd, 1)

    def _take(self) -> int | None:
        with self._changed:
            if self._is_halted or self._error or self._num_taken == len(self._pieces):
                return None
            self._num_taken += 1
            return self._num_taken - 1

    def _touch(self, index: int) -> OSError | None:
        piece = self._pieces[index]
        try:
            _populate(self._arena, self._fd, piece.start, len(piece))
        except OSError as error:
            return error
        with self._changed:
            self._populated.add(index)
            while self._num_whole in self._populated:
                self._populated.remove(self._num_whole)
                self._num_whole += 1
            self._tell(self._pieces[self._num_whole - 1].stop if self._num_whole else 0)
        return None

    def _tell(self, stop: int) -> None:
        """Let all know that the pieces before ``stop`` are there."""
        if stop > self._arena.size_bytes:  # checksums, as yet
            return
        before = self.touched_bytes
        self._arena.tell_usable(stop)
        self._changed.notify_all()
        if stop // self._arena.extent_bytes > before // self._arena.extent_bytes:
            os.eventfd_write(self.news_fd, 1)


def touch(
    arena: Arena,
    fd: int,
    *,
    stop: threading.Event,
    on_progress: Callable[[int], None],
) -> bool:
    """Populate every page of the slots and their checksums; see ``Touching`` and its ``wait``."""
    with contextlib.closing(Touching(arena, fd)) as touching:
        return touching.wait(arena.size_bytes, stop=stop, on_progress=on_progress)


def map_touched(arena: Arena, start: int, num_bytes: int) -> None:
    """Map slots that are touched, by whomever, into this process as well, at once.

    A driver that pins them would make the kernel map one page with each fault; where one reads,
    as here, it maps sixteen (H200's host: 0.03 s a GiB, and pinning then takes 0.04 instead of
    0.10). Never fails: what is not mapped here is mapped when it is used.
    """
    for piece in _pieces(start, start + num_bytes):
        while _LIBC.madvise(arena.address + piece.start, len(piece), _MADV_POPULATE_READ):
            if ctypes.get_errno() != errno.EINTR:  # a kernel before 5.14, say
                return


def _pieces(start: int, stop: int) -> Iterator[range]:
    return (
        range(first, min(first + _PIECE_BYTES, stop)) for first in range(start, stop, _PIECE_BYTES)
    )


def _populate(arena: Arena, fd: int, start: int, num_bytes: int) -> None:
    while _LIBC.madvise(arena.address + start, num_bytes, _MADV_POPULATE_WRITE):
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # a kernel before 5.14: allocate without mapping
            os.posix_fallocate(fd, ARENA_HEADER_BYTES + start, num_bytes)
            return
        if code not in (errno.EINTR, errno.EAGAIN):
            raise OSError(code, os.strerror(code))


def _no_memory(arena: Arena, error: OSError) -> ArenaTooLarge:
    done_bytes = arena.usable_bytes
    message = (
        f"the kernel gave {done_bytes // MIB} MiB of {arena.total_bytes // MIB} MiB for the "
        f"arena ({error.strerror}); choose a smaller size or free memory"
    )
    return ArenaTooLarge(message, wanted_bytes=arena.total_bytes, available_bytes=done_bytes)
