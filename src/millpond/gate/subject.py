"""A path with all that its tests use: pages, host memory, canaries, and one call at a time.

    pages     guard | canary | page 1 | canary | page 3 | …  | guard      the room has no guards
    host      canary | row 1 | row 2 | canary | …                         the path's own memory

Which page goes with which row is drawn once, from a fixed seed.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.gate.device import GateDevice, Hold, Size, Where
from millpond.gate.errors import CannotTest
from millpond.gate.paths import Completion, Path, Promise, Room
from millpond.gate.patterns import Comparison, Epoch, Rows, compare, pattern
from millpond.transfer.copies import Direction
from millpond.transfer.device import Fence

_POLL_S: Final = 0.0005
_SEED: Final = 4
_SPARE_ROWS: Final = 4
_CANARY_LABEL: Final = 50_000


@dataclass(frozen=True, slots=True)
class Timing:
    """How late things are made, and how long is waited.

    ``delay_s`` is how long a hold lasts unless it is released. ``control_s``: how long a
    control may take to do what it must, on a busy machine. ``done_s``: what takes longer to be
    done counts as never done.
    """

    delay_s: float = 0.3
    control_s: float = 5.0
    done_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the path that has come back.

    ``was_blocked``: not before the hold was over. ``was_late``: the hold was over before the
    call began, so that it says nothing.
    """

    completion: Completion
    point: Fence | None
    was_blocked: bool
    was_late: bool = False

    def is_done(self) -> bool:
        """Say whether the path, by its promise, tells that the copy has ended."""
        return self.completion.is_done() if self.point is None else self.point.is_passed()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it tells so; False when the time ran out."""
        if self.point is None:
            return self.completion.wait(timeout_s)
        # Without a pause: what the stream does not wait for may be there a moment later.
        return poll(self.point.is_passed, timeout_s, pause_s=0.0)


class Subject:
    """See the module."""

    def __init__(self, device: GateDevice, path: Path, size: Size, timing: Timing) -> None:
        self.device = device
        self.path = path
        self.timing = timing
        self._whole = device.make_pages(Size(size.num_pages + 2, size.page_bytes))
        self.room = Room(self._whole[1:-1], size.num_pages + _SPARE_ROWS)
        self.late = device.make_pages(size)
        """What a late producer copies into the pages."""
        self.seen = device.make_pages(size)
        """What a reader has read."""
        self.staging = device.make_host(size.num_pages * size.page_bytes)
        """Memory of the gate's own control copies."""
        self._images: dict[Epoch, NDArray[np.uint8]] = {}
        labels = range(_CANARY_LABEL, _CANARY_LABEL + self.room.num_host_pages)
        self._canaries = pattern(labels, size.page_bytes, Epoch.CANARY)
        self.pairs = _draw_pairs(size.num_pages, self.room.num_host_pages)
        self.blocks = tuple(range(1, len(self.pairs) + 1))
        self.num_bytes = len(self.pairs) * size.page_bytes
        self._page_ids = [page for page, _ in self.pairs]
        self.rows = [row for _, row in self.pairs]
        self._guards = sorted(
            set(range(size.num_pages + 2)) - {page + 1 for page in self._page_ids}
        )
        self._spare_rows = sorted(set(range(self.room.num_host_pages)) - set(self.rows))
        # What a path takes comes last: nothing above may fail once it is open.
        self.host = path.open(self.room)
        if self.host.shape != (self.room.num_host_pages, size.page_bytes):
            path.close()
            raise CannotTest(
                f"{path.name} opened host memory of shape {tuple(self.host.shape)}, not "
                f"{(self.room.num_host_pages, size.page_bytes)}"
            )

    def close(self) -> None:
        """Let the path give up what it took."""
        self.device.synchronize()
        self.path.close()

    # ------------------------------------------------------------ bytes

    def prepare(self, *, pages: Epoch, host: Epoch, late: Epoch = Epoch.NEW) -> None:
        """Fill everything: the device is idle before and after."""
        self.device.synchronize()
        whole = self._canaries[: len(self._whole)].copy()
        copied = np.asarray(self._page_ids) + 1
        whole[copied] = self.image(pages)
        self.device.write(self._whole, whole)
        whole[copied] = self.image(late)
        self.device.write(self.late, whole[1:-1])
        self.device.write(self.seen, np.zeros_like(whole[1:-1]))
        rows = self._canaries[: len(self.host)].copy()
        rows[self.rows] = self.image(host)
        self.host.numpy()[:] = rows

    def image(self, epoch: Epoch) -> NDArray[np.uint8]:
        """Return the pages of all pairs as they are in one epoch, in the order of the pairs."""
        if epoch not in self._images:
            self._images[epoch] = pattern(self.blocks, self.room.page_bytes, epoch)
        return self._images[epoch]

    def compare_host(self, epoch: Epoch) -> Comparison:
        """Compare the host's rows as they are now."""
        return self.compare_rows(self.copy_of_host(), epoch)

    def copy_of_host(self) -> NDArray[np.uint8]:
        """Return the host's rows as they are now, in the order of the pairs."""
        # The last first: they are what a copy that has not ended lacks.
        return self.host.numpy()[self.rows[::-1]][::-1]

    def compare_rows(self, rows: NDArray[np.uint8], epoch: Epoch) -> Comparison:
        """Compare rows in the order of the pairs."""
        return compare(rows, Rows(self.blocks, epoch))

    def compare_pages(self, epoch: Epoch) -> Comparison:
        """Compare the device's pages as they are now."""
        return self._compare_on_device(self.room.pages, epoch)

    def compare_seen(self, epoch: Epoch, *, num_pages: int | None = None) -> Comparison:
        """Compare what a reader has read, of the first pairs or all."""
        return self._compare_on_device(self.seen, epoch, num_pages)

    def compare_staging(self, epoch: Epoch) -> Comparison:
        """Compare what the gate's own copy of all pages brought to the host."""
        rows = self.staging.numpy().reshape(self.room.pages.shape)
        return compare(rows[self._page_ids], Rows(self.blocks, epoch))

    def compare_canaries(self) -> Comparison:
        """Compare all that nobody may touch: pages, their guards, rows of the host."""
        found = self.device.read(self._whole)[self._guards]
        guards = compare(found, Rows(tuple(_CANARY_LABEL + i for i in self._guards), Epoch.CANARY))
        found = self.host.numpy()[self._spare_rows]
        spare = tuple(_CANARY_LABEL + i for i in self._spare_rows)
        return Comparison.concatenate([guards, compare(found, Rows(spare, Epoch.CANARY))])

    def _compare_on_device(
        self, pages: torch.Tensor, epoch: Epoch, num_pages: int | None = None
    ) -> Comparison:
        found = self.device.read(pages)[self._page_ids[:num_pages]]
        return compare(found, Rows(self.blocks[:num_pages], epoch))

    # ------------------------------------------------------------ calls

    def call(self, direction: Direction, where: Where, hold: Hold | None = None) -> Call:
        """Call the path with a stream current."""
        return self.call_with(list(self.pairs), direction, where, hold)

    def call_with(
        self,
        pairs: list[tuple[int, int]],
        direction: Direction,
        where: Where,
        hold: Hold | None,
    ) -> Call:
        """Call the path with a list of pairs that the caller may change afterwards."""
        with self.device.on(where):
            # On a busy machine the host may be held up for longer than the stream is.
            was_late = hold is not None and hold.is_open()
            completion = self.path.copy(direction, pairs)
            was_blocked = hold is not None and hold.is_open()
            is_by_stream = self.path.promise is Promise.STREAM
            point = self.device.point() if is_by_stream else None
        return Call(completion, point, was_blocked, was_late)

    def warm_up(self) -> None:
        """Call the path twice each way, so that it has loaded and taken all that it needs.

        Twice: a path may keep the first call's buffers until the next one. Taking memory, or
        loading a kernel, may make streams wait for each other.
        """
        for direction in (*self.path.directions, *self.path.directions):
            self.prepare(pages=Epoch.OLD, host=Epoch.OLD)
            self.call(direction, Where.WORK).wait(self.timing.done_s)
            self.device.synchronize()

    def settle(self, call: Call, hold: Hold) -> str | None:
        """Let everything end; return what is wrong if the path never says that it has."""
        hold.release()
        is_done = call.wait(self.timing.done_s)
        self.device.synchronize()
        return None if is_done else self.never_done()

    def never_done(self) -> str:
        """Say that a call has not ended."""
        return f"not done within {self.timing.done_s:g} s"

    def is_done_early(self, call: Call, hold: Hold, limit_s: float) -> bool:
        """Say whether the path tells that it is done while the hold is still closed."""
        poll(lambda: call.is_done() or hold.is_open(), limit_s)
        # In this order: done first, and the hold closed after that.
        return call.is_done() and not hold.is_open()


def poll(condition: Callable[[], bool], timeout_s: float, *, pause_s: float = _POLL_S) -> bool:
    """Wait until ``condition`` holds; False when the time ran out."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(pause_s)
    return True


def _draw_pairs(num_pages: int, num_rows: int) -> Sequence[tuple[int, int]]:
    """Return two thirds of the pages, scattered; neither ends' rows of the host."""
    chance = random.Random(_SEED)
    num_pairs = num_pages * 2 // 3
    pages = chance.sample(range(num_pages), num_pairs)
    rows = chance.sample(range(1, num_rows - 1), num_pairs)
    return list(zip(pages, rows, strict=True))
