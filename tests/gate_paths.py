"""Paths over the emulated device that keep their order, or lose it in one way each."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from millpond.gate.emulated import EmulatedDevice, current_stream
from millpond.gate.paths import Completion, Promise, Room
from millpond.transfer.copies import Direction


@dataclass(frozen=True)
class Habits:
    """How a path behaves; the defaults are a path on the current stream, which is ordered."""

    promise: Promise = Promise.STREAM
    directions: Sequence[Direction] = tuple(Direction)
    on_side_stream: bool = False
    waits_for_current: bool = True
    current_waits_for_it: bool = True
    blocks_host: bool = False
    blocks_for_device: bool = False
    done_at_once: bool = False
    done_never: bool = False
    takes_s: float = 0.0
    moves: Callable[[Sequence[tuple[int, int]]], Sequence[tuple[int, int]]] = list
    spoils: Callable[[torch.Tensor, torch.Tensor], None] | None = None


class ToyCompletion:
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def is_done(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


class ToyPath:
    name = "toy"
    versions: Mapping[str, str] = {"toy": "1"}

    def __init__(self, device: EmulatedDevice, habits: Habits) -> None:
        self._device = device
        self._habits = habits
        self.promise = habits.promise
        self.directions = habits.directions
        self._side = device.make_stream("side")

    def open(self, room: Room) -> torch.Tensor:
        self._pages = room.pages
        size = (room.num_host_pages, room.page_bytes)
        self._host = torch.zeros(size, dtype=torch.uint8)
        return self._host

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> Completion:
        habits, current = self._habits, current_stream()
        if habits.blocks_for_device:
            self._device.synchronize()
        if habits.blocks_host:
            current.record().wait()
        if habits.on_side_stream and habits.waits_for_current:
            self._side.wait_for(current.record())
        stream = self._side if habits.on_side_stream else current
        moved = habits.moves(pairs)
        done = threading.Event()
        stream.enqueue(lambda: self._move(direction, moved))
        if not (habits.done_at_once or habits.done_never):
            stream.enqueue(done.set)
        if habits.on_side_stream and habits.current_waits_for_it:
            current.wait_for(stream.record())
        if habits.done_at_once:
            done.set()
        return ToyCompletion(done)

    def close(self) -> None:
        self._side.close(10.0)

    def _move(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> None:
        threading.Event().wait(self._habits.takes_s)
        for page, row in pairs:
            source, target = self._pages[page], self._host[row]
            if direction is Direction.LOAD:
                source, target = target, source
            target.copy_(source)
        if self._habits.spoils is not None:
            self._habits.spoils(self._pages, self._host)
