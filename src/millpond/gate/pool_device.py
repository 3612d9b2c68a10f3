"""The engine's side of the full-pool check: a device, a bounded buffer of pages, and copies.

The pages of all slot sizes lie in one buffer, which is used again and again: a pool of any
size is checked with the same few hundred megabytes.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from millpond.arena.arena import Arena
from millpond.gate.errors import NoGpu, TooLittleMemory
from millpond.gate.pool_errors import NotRegistered
from millpond.gate.pool_pattern import POISON, Difference, Stamp, expected_words
from millpond.model.layout import LayerPages, PageGeometry, PartLayout, Segment
from millpond.model.limits import BLOCKS_PER_RESERVE_MAX, GIB, MIB
from millpond.transfer.copies import Copies, Direction, LayerMemory, plan_copies
from millpond.transfer.cpu import CpuDevice
from millpond.transfer.device import CopyFailed, Device
from millpond.transfer.engine import Ends, Ticket
from millpond.transfer.streams import StreamCopyEngine

NUM_LAYERS: Final = 8
WORD_BYTES: Final = 8
SLOT_STEP_BYTES: Final = NUM_LAYERS * 2 * WORD_BYTES
"""Slots are whole pages of 16-byte pieces, one page a layer."""

_BUFFER_BYTES: Final = {"cpu": 64 * MIB, "cuda": 256 * MIB}
_COPY_S_MAX: Final = 300.0
_REGISTER_S_MAX: Final = 60.0
_REGISTER_S_PER_GIB_MAX: Final = 2.0
"""Some twenty times what an H200's host takes (docs/RESULTS.md)."""
_CLOSE_S: Final = 60.0
_POLL_S: Final = 0.005


def _no_failure() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class CheckedDevice:
    """Where the pages are, its streams, and why the arena could not be made ready, if so."""

    place: torch.device
    streams: Device
    failure: Callable[[], str | None] = _no_failure


def pick_device(wanted: str) -> str:
    """Return ``cpu`` or ``cuda`` for ``wanted``, which may be ``auto``; raises ``NoGpu``."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise NoGpu("torch finds no CUDA device here: use --device cpu")
    return ("cuda" if has_gpu else "cpu") if wanted == "auto" else wanted


def open_device(name: str) -> CheckedDevice:
    """Return the device of that name: ``cpu``, or ``cuda`` for this process's current GPU."""
    if name == "cpu":
        return CheckedDevice(torch.device("cpu"), CpuDevice())
    # Only here: the kernel for small pages needs Triton, which comes with a CUDA torch.
    from millpond.transfer.cuda import CudaDevice

    place = torch.device("cuda", torch.cuda.current_device())
    streams = CudaDevice(place)

    def failure() -> str | None:
        registration = streams.registration
        failed = None if registration is None else registration.failure
        return None if failed is None else str(failed)

    return CheckedDevice(place, streams, failure)


@dataclass(slots=True)
class Moved:
    """What was copied one way, and how long its copies took from submission to completion."""

    num_bytes: int = 0
    elapsed_ns: int = 0

    def add(self, ticket: Ticket) -> None:
        """Count one submission."""
        self.num_bytes += ticket.num_bytes
        self.elapsed_ns += ticket.elapsed_ns

    def add_all(self, other: "Moved") -> None:
        """Count what another one has counted."""
        self.num_bytes += other.num_bytes
        self.elapsed_ns += other.elapsed_ns


def _fresh_counts() -> dict[Direction, Moved]:
    return {direction: Moved() for direction in Direction}


@dataclass
class Mover:
    """The real copy engine over a device, one copy at a time."""

    device: CheckedDevice
    moved: dict[Direction, Moved] = field(default_factory=_fresh_counts)

    def __post_init__(self) -> None:
        self._engine = StreamCopyEngine(self.device.streams)

    def adopt(self, arena: Arena) -> None:
        """Make all of the arena ready for copies, and wait for it; raises ``NotRegistered``."""
        self._engine.adopt(arena)
        limit_s = _REGISTER_S_MAX + _REGISTER_S_PER_GIB_MAX * arena.size_bytes / GIB
        deadline_s = time.monotonic() + limit_s
        while not self._engine.is_ready(arena.size_bytes):
            failure = self.device.failure()
            if failure is not None:
                raise NotRegistered(
                    f"the arena was not registered with the GPU: {failure}; raise the limit on "
                    "locked memory (ulimit -l) or choose a smaller pool"
                )
            if time.monotonic() > deadline_s:
                raise NotRegistered(f"the arena was not ready for copies after {limit_s:.0f} s")
            time.sleep(_POLL_S)

    def move(self, direction: Direction, copies: Copies, arena: Arena) -> None:
        """Copy behind all that was submitted to the device so far, and wait for the end.

        Raises ``CopyFailed``, also where that has not come after five minutes.
        """
        tickets: list[Ticket] = []
        is_done = threading.Event()

        def on_done(ticket: Ticket) -> None:
            tickets.append(ticket)
            is_done.set()

        self._engine.submit(
            direction, copies, after=self._engine.fence(), keep_alive=arena, ends=Ends(on_done)
        )
        if not is_done.wait(_COPY_S_MAX):
            raise CopyFailed(
                f"a {direction.value} of {copies.num_bytes} bytes has not ended in "
                f"{_COPY_S_MAX:g} s"
            )
        if tickets[0].error is not None:
            raise CopyFailed(f"a {direction.value} failed: {tickets[0].error}")
        self.moved[direction].add(tickets[0])

    def take_counts(self) -> dict[Direction, Moved]:
        """Return what was moved since the last call."""
        counts, self.moved = self.moved, _fresh_counts()
        return counts

    def close(self) -> bool:
        """End the copies and threads; False when one did not end, and memory must stay."""
        return self._engine.close(_CLOSE_S)


class Buffer:
    """The device's memory for pages, shared by all slot sizes."""

    def __init__(self, device: CheckedDevice, slot_sizes: Sequence[int]) -> None:
        self.place = device.place
        # Page 0 of each layer is the engine's null block: two slots need three.
        num_bytes = max(_BUFFER_BYTES[device.place.type], 3 * max(slot_sizes))
        try:
            self.words = torch.empty(num_bytes // WORD_BYTES, dtype=torch.int64, device=self.place)
        except torch.cuda.OutOfMemoryError as error:
            raise TooLittleMemory(
                f"the GPU has no {4 * num_bytes // MIB} MiB for the check's own pages: "
                "stop what uses it, or use another one (CUDA_VISIBLE_DEVICES)"
            ) from error


class Pages:
    """The engine's pages for slots of one size, within a buffer."""

    def __init__(self, buffer: Buffer, slot_bytes: int) -> None:
        if slot_bytes <= 0 or slot_bytes % SLOT_STEP_BYTES:
            raise ValueError(f"slots of {slot_bytes} bytes, not a multiple of {SLOT_STEP_BYTES}")
        page_bytes = slot_bytes // NUM_LAYERS
        page_words = page_bytes // WORD_BYTES
        num_pages = min(buffer.words.nbytes // slot_bytes, BLOCKS_PER_RESERVE_MAX + 1)
        self.num_blocks_max = num_pages - 1
        layers = tuple(LayerPages(f"layer {i}", 0, page_bytes) for i in range(NUM_LAYERS))
        self._layout = PartLayout("pages", layers, {0: 1})
        num_words = NUM_LAYERS * num_pages * page_words
        self._words = buffer.words[:num_words].view(NUM_LAYERS, num_pages, page_words)
        geometry = PageGeometry(page_bytes, (Segment(0, page_bytes),))
        self._memory = tuple(LayerMemory(layer.data_ptr(), geometry) for layer in self._words)
        numbers = torch.arange(slot_bytes // WORD_BYTES, device=buffer.place)
        self._word_numbers = numbers.view(NUM_LAYERS, 1, page_words)

    def store(
        self, mover: Mover, arena: Arena, stamp: Stamp, slots: Sequence[int], chance: random.Random
    ) -> None:
        """Write the pattern of ``stamp``'s blocks to ``slots``, offsets in the arena."""
        ids = self._scattered(len(slots), chance)
        self._words[:, ids] = self._expected(stamp, len(slots))
        mover.move(Direction.STORE, self._copies(Direction.STORE, arena, ids, slots), arena)

    def compare(
        self, mover: Mover, arena: Arena, stamp: Stamp, slots: Sequence[int], chance: random.Random
    ) -> Difference | None:
        """Read ``slots`` back whole and return the first word that is another, if any."""
        ids = self._scattered(len(slots), chance)
        self._words.fill_(POISON)  # a load that moves nothing must not find the right bytes
        mover.move(Direction.LOAD, self._copies(Direction.LOAD, arena, ids, slots), arena)
        found, expected = self._words[:, ids], self._expected(stamp, len(slots))
        wrong = found != expected
        if not bool(wrong.any()):
            return None
        block = int(wrong.any(2).any(0).nonzero()[0])
        word = int(wrong[:, block].flatten().nonzero()[0])
        return Difference(
            stamp,
            block,
            slots[block],
            word * WORD_BYTES,
            int(expected[:, block].flatten()[word]),
            int(found[:, block].flatten()[word]),
        )

    def _scattered(self, num_blocks: int, chance: random.Random) -> torch.Tensor:
        ids = chance.sample(range(1, self.num_blocks_max + 1), num_blocks)
        return torch.tensor(ids, device=self._words.device)

    def _expected(self, stamp: Stamp, num_blocks: int) -> torch.Tensor:
        return expected_words(stamp, num_blocks, self._word_numbers)

    def _copies(
        self, direction: Direction, arena: Arena, ids: torch.Tensor, slots: Sequence[int]
    ) -> Copies:
        table = ids.cpu().numpy().reshape(-1, 1)
        addresses = np.asarray(slots, np.uint64) + np.uint64(arena.address)
        return plan_copies(
            direction, self._layout, self._memory, {0: table.tolist()}, addresses.tolist()
        )
