"""Our own copy engine as a path under test: the real lanes, on either device."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import torch

from millpond import __version__
from millpond.arena.arena import Arena
from millpond.gate.errors import CannotTest
from millpond.gate.paths import Completion, Promise, Room
from millpond.model.limits import SLOT_ALIGNMENT_BYTES
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import Device, Event, Fence, Stream
from millpond.transfer.engine import Ends, Ticket
from millpond.transfer.streams import StreamCopyEngine

READY_S_MAX: Final = 60.0
CLOSE_S_MAX: Final = 60.0
_POLL_S: Final = 0.002


class _Token:
    """Stands for what a stream's copies use, in the hands of the lane."""


class WatchedDevice:
    """A ``Device`` that notes when a lane gives up what its copies use.

    While ``is_kept``, it is kept here all the same: on a real device the copies would
    otherwise go anywhere.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[object] = []
        self.is_kept = False
        self.num_enqueued = 0
        self.given_up: set[int] = set()
        """Numbers of the portions, from 0, whose tables and buffers nobody holds any more."""

    def fence(self) -> Fence:
        """As the device's."""
        return self._device.fence()

    @property
    def can_hold_back(self) -> bool:
        """As the device's."""
        return self._device.can_hold_back

    def hold_back(self, end: Event) -> None:
        """As the device's."""
        self._device.hold_back(end)

    def stream(self, direction: Direction) -> Stream:
        """Make a watched stream."""
        return _WatchedStream(self, self._device.stream(direction))

    def enter_thread(self) -> None:
        """As the device's."""
        self._device.enter_thread()

    def adopt(self, arena: Arena) -> None:
        """As the device's."""
        self._device.adopt(arena)

    def is_ready(self, end_offset: int) -> bool:
        """As the device's."""
        return self._device.is_ready(end_offset)

    def release(self, timeout_s: float) -> None:
        """As the device's."""
        self._device.release(timeout_s)

    def forget(self) -> None:
        """Keep nothing any more; no copy is in flight."""
        self.is_kept = False
        self._kept.clear()

    def watch(self, staged: object) -> object:
        """Return a token that stands for ``staged``."""
        token = _Token()
        weakref.finalize(token, self._give_up, self.num_enqueued, staged)
        self.num_enqueued += 1
        return token

    def _give_up(self, number: int, staged: object) -> None:
        self.given_up.add(number)
        if self.is_kept:
            self._kept.append(staged)


class _WatchedStream:
    def __init__(self, watch: WatchedDevice, stream: Stream) -> None:
        self._watch = watch
        self._stream = stream

    def wait_for(self, fence: Fence) -> None:
        self._stream.wait_for(fence)

    def portion(self, copies: Copies) -> int:
        return self._stream.portion(copies)

    def awaited(self, copies: Copies) -> Event | None:
        return self._stream.awaited(copies)

    def copy(self, copies: Copies) -> object:
        return self._watch.watch(self._stream.copy(copies))

    def record(self) -> Event:
        return self._stream.record()

    def close(self, timeout_s: float) -> bool:
        return self._stream.close(timeout_s)


class OwnCompletion:
    """What ``on_landed`` and ``on_done`` have said, to who comes by as the connector does."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._done = threading.Event()
        self.error: str | None = None

    def land(self) -> None:
        """Take note that the bytes are said to be there."""
        self._done.set()

    def __call__(self, ticket: Ticket) -> None:
        """Take note of the end of a submission."""
        self.error = ticket.error
        self._done.set()

    def is_done(self) -> bool:
        """Say whether the engine has reported the end, without an error."""
        self._step()
        return self._done.is_set() and self.error is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end; False on time-out or error."""
        return self._done.wait(timeout_s) and self.error is None


class OwnPath:
    """A ``Path`` through ``StreamCopyEngine``, its host pages in a real arena."""

    directions: Sequence[Direction] = tuple(Direction)
    promise: Promise = Promise.HOST
    versions: Mapping[str, str] = {"millpond": __version__}

    def __init__(self, name: str, make_device: Callable[[], Device]) -> None:
        self.name = name
        self._make_device = make_device

    def open(self, room: Room) -> torch.Tensor:
        """Make an arena and an engine; raises ``CannotTest`` where the arena is not ready."""
        if room.page_bytes % SLOT_ALIGNMENT_BYTES:
            raise ValueError(f"pages of {room.page_bytes} bytes are no slots")
        size = room.num_host_pages * room.page_bytes
        self.room = room
        self.arena, fd = Arena.create(size_bytes=size, extent_bytes=size, epoch=1)
        os.close(fd)
        self.watch = WatchedDevice(self._make_device())
        self.engine = StreamCopyEngine(self.watch)
        self.engine.adopt(self.arena)
        deadline_s = time.monotonic() + READY_S_MAX
        while not self.engine.is_ready(size):
            if time.monotonic() > deadline_s:
                self.close()
                raise CannotTest(f"the arena was not ready for copies after {READY_S_MAX:.0f} s")
            time.sleep(_POLL_S)
        bytes_of = np.frombuffer(self.arena.view(0, size), np.uint8)
        return torch.as_tensor(bytes_of).view(room.num_host_pages, room.page_bytes)

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> Completion:
        """Submit the copies behind the current stream, as the connector does."""
        return self.submit(direction, pairs, keep_alive=self.arena)

    def submit(
        self,
        direction: Direction,
        pairs: Sequence[tuple[int, int]],
        *,
        keep_alive: object,
        on_done: Callable[[Ticket], None] | None = None,
    ) -> OwnCompletion:
        """Submit the copies; ``on_done`` is called before the completion is done."""
        completion = OwnCompletion(self.engine.step)

        def end(ticket: Ticket) -> None:
            if on_done is not None:
                on_done(ticket)
            completion(ticket)

        self.engine.submit(
            direction,
            self._copies(direction, pairs),
            after=self.engine.fence(),
            keep_alive=keep_alive,
            # As the connector: a load is there when it has landed, a store when committed.
            ends=Ends(end, completion.land if direction is Direction.LOAD else None),
        )
        return completion

    def close(self) -> None:
        """End the engine and give up the arena."""
        if self.engine.close(CLOSE_S_MAX):
            self.arena.close()

    def _copies(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> Copies:
        table = np.asarray(pairs, np.uint64) * np.uint64(self.room.page_bytes)
        pages = table[:, 0] + np.uint64(self.room.pages.data_ptr())
        slots = table[:, 1] + np.uint64(self.arena.address)
        lengths = np.full(len(pairs), self.room.page_bytes, np.uint64)
        if direction is Direction.STORE:
            return Copies(pages, slots, lengths)
        return Copies(slots, pages, lengths)
