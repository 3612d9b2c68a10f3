"""Starting and stopping the daemon: its place, its memory, its signals, its loop.

Why one thread and no asyncio: docs/decisions/0003-daemon-loop.md.
"""

import contextlib
import logging
import os
import resource
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType
from typing import Final

from millpond.arena.arena import Arena
from millpond.arena.memory import ensure_available
from millpond.arena.touch import touch
from millpond.model.errors import ConfigError
from millpond.model.limits import CLIENTS_MAX, POOL_BYTES_MIN, SLOT_ALIGNMENT_BYTES
from millpond.model.retention import DEFAULT_RETENTION, Retention
from millpond.pool.pool import Pool, default_extent_bytes
from millpond.service.loop import Loop
from millpond.service.socket_path import claim

_LOG: Final = logging.getLogger(__name__)
_DESCRIPTORS_WANTED: Final = 4 * CLIENTS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a daemon is started with.

    ``extent_bytes`` None lets the pool choose. ``retention`` says what it keeps.
    ``on_progress(done_bytes, total_bytes)`` is called from the serving thread while the arena
    is being touched.
    """

    socket_path: str
    size_bytes: int
    extent_bytes: int | None = None
    retention: Retention = DEFAULT_RETENTION
    on_progress: Callable[[int, int], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A daemon that accepts clients now."""

    socket_path: str
    pid: int
    epoch: int
    arena_bytes: int
    extent_bytes: int


def serve(options: ServeOptions, *, on_ready: Callable[[Serving], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT; must run in the main thread, whose signals it takes.

    Returns after an orderly stop (also one during the touching of memory, before
    ``on_ready``). Raises ``SocketUnusable``, ``ArenaTooLarge`` or ``ConfigError`` before
    anything is served, and ``InvariantBroken`` when the pool contradicts itself.
    """
    size_bytes = options.size_bytes // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES
    if size_bytes < POOL_BYTES_MIN:
        raise ConfigError(f"size {options.size_bytes} is below {POOL_BYTES_MIN} bytes")
    extent_bytes = options.extent_bytes or default_extent_bytes(size_bytes)
    with _stop_signals() as (stop, wake_fd), contextlib.ExitStack() as held:
        place = claim(options.socket_path)
        held.callback(place.release)
        ensure_available(size_bytes)
        epoch = secrets.randbits(63)
        pool = Pool(
            epoch=epoch,
            arena_bytes=size_bytes,
            extent_bytes=extent_bytes,
            retention=options.retention,
        )
        arena, arena_fd = Arena.create(
            size_bytes=size_bytes, extent_bytes=extent_bytes, epoch=epoch
        )
        held.callback(os.close, arena_fd)
        held.callback(arena.close)

        def report_progress(done_bytes: int) -> None:
            if options.on_progress is not None:
                options.on_progress(min(done_bytes, size_bytes), size_bytes)  # sums: not counted

        if not touch(arena, arena_fd, stop=stop, on_progress=report_progress):
            _LOG.info("pool stopped before it was ready")
            return
        _raise_descriptor_limit()
        listener = held.enter_context(place.listen())
        loop = Loop(pool, arena, arena_fd, listener)
        held.callback(loop.close)
        serving = Serving(
            socket_path=options.socket_path,
            pid=os.getpid(),
            epoch=epoch,
            arena_bytes=size_bytes,
            extent_bytes=extent_bytes,
        )
        _LOG.info("pool ready socket=%s arena_bytes=%d", options.socket_path, size_bytes)
        if on_ready is not None:
            on_ready(serving)
        loop.run(stop, wake_fd)
        _LOG.info("pool stopped socket=%s", options.socket_path)


@contextlib.contextmanager
def _stop_signals() -> Generator[tuple[threading.Event, int]]:
    """Turn SIGTERM and SIGINT into an event and a readable descriptor."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    wake, waker = socket.socketpair()
    with wake, waker:
        waker.setblocking(False)  # noqa: FBT003
        earlier_fd = signal.set_wakeup_fd(waker.fileno())
        earlier = {
            number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield stop, wake.fileno()
        finally:
            signal.set_wakeup_fd(earlier_fd)
            for number, action in earlier.items():
                signal.signal(number, action)


def _raise_descriptor_limit() -> None:
    """Each client takes two descriptors; the usual soft limit of 1024 is too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        _DESCRIPTORS_WANTED if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_WANTED)
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
