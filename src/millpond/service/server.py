"""Starting and stopping the daemon: its place, its memory, its signals, its loop.

It serves as soon as the first of its memory is there, and takes the rest beside serving.

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
from millpond.arena.touch import Touching
from millpond.model.errors import ConfigError
from millpond.model.limits import (
    CLIENTS_MAX,
    POOL_BYTES_MIN,
    REGISTERED_BYTES,
    SLOT_ALIGNMENT_BYTES,
)
from millpond.model.retention import DEFAULT_RETENTION, Retention
from millpond.pool.pool import Pool, default_extent_bytes
from millpond.service.growing import Growth
from millpond.service.loop import Loop
from millpond.service.socket_path import claim

_LOG: Final = logging.getLogger(__name__)
_DESCRIPTORS_WANTED: Final = 4 * CLIENTS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a daemon is started with.

    ``extent_bytes`` None lets the pool choose. ``retention`` says what it keeps. Memory is
    given to the pool in steps of ``step_bytes``, rounded down to whole extents, or an extent if
    that is larger; the daemon listens after the first, so that smaller pools are touched whole
    before. ``on_progress(touched_bytes, size_bytes)`` is called from the serving thread until
    all is there, beyond ``on_ready`` therefore.
    """

    socket_path: str
    size_bytes: int
    extent_bytes: int | None = None
    retention: Retention = DEFAULT_RETENTION
    step_bytes: int = REGISTERED_BYTES
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
    ``on_ready`` or after). Raises ``SocketUnusable``, ``ArenaTooLarge`` or ``ConfigError``
    before anything is served, and ``InvariantBroken`` when the pool contradicts itself. If
    memory runs out once it serves, it goes on with what it has, and says so.
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
            usable_bytes=0,
        )
        arena, arena_fd = Arena.create(
            size_bytes=size_bytes, extent_bytes=extent_bytes, epoch=epoch
        )
        held.callback(os.close, arena_fd)
        held.callback(arena.close)
        touching = Touching(arena, arena_fd)
        held.callback(touching.close)
        on_progress = options.on_progress or _say_nothing
        step_bytes = max(1, options.step_bytes // extent_bytes) * extent_bytes
        if not touching.wait(
            min(step_bytes, size_bytes),
            stop=stop,
            on_progress=lambda touched_bytes: on_progress(touched_bytes, size_bytes),
        ):
            _LOG.info("pool stopped before it was ready")
            return
        growth = Growth(
            pool,
            touching,
            size_bytes=size_bytes,
            step_bytes=step_bytes,
            on_progress=on_progress,
        )
        growth.take()
        _raise_descriptor_limit()
        listener = held.enter_context(place.listen())
        loop = Loop(pool, arena, arena_fd, listener, growth)
        held.callback(loop.close)
        serving = Serving(
            socket_path=options.socket_path,
            pid=os.getpid(),
            epoch=epoch,
            arena_bytes=size_bytes,
            extent_bytes=extent_bytes,
        )
        _LOG.info(
            "pool ready socket=%s arena_bytes=%d usable_bytes=%d",
            options.socket_path,
            size_bytes,
            growth.usable_bytes,
        )
        if on_ready is not None:
            on_ready(serving)
        loop.run(stop, wake_fd)
        _LOG.info("pool stopped socket=%s", options.socket_path)


def _say_nothing(_touched_bytes: int, _size_bytes: int) -> None:
    """Stand in for nobody who is told of progress."""


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
