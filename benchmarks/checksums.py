"""What checksums cost: their speed, and stores and loads of the CPU copy engine with them.

    python benchmarks/checksums.py [--mib 256] [--rounds 9]

A block has 4 MiB, in layers of the given size. Each round moves the same blocks with the CPU
copy engine, without checksums and with them, in turns of changing order: stores sum all they
write before they are reported as done, loads compare a share of what they read. Prints one
line of JSON; speeds are of one core's time, ratios the time without checksums over the time
with them.
"""

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable

import numpy as np

from millpond.arena.arena import Arena
from millpond.arena.touch import touch
from millpond.model.layout import LayerPages, PartLayout
from millpond.model.limits import EXTENT_BYTES_MIN, KIB, MIB
from millpond.transfer import Copies, CpuCopyEngine, Direction, Ends, Ticket
from millpond.transfer.checksums import Checksums, Summed

BLOCK_BYTES = 4 * MIB
LAYERS = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
CHECK_RATIOS = (0.01, 0.1, 1.0)
WAIT_S = 60.0

After = Callable[[], None]


def part_of(layer_bytes: int) -> PartLayout:
    """Return a block of layers of one size."""
    names = range(BLOCK_BYTES // layer_bytes)
    return PartLayout("p", tuple(LayerPages(str(i), 0, layer_bytes) for i in names), {0: 1})


def whole_blocks(source: int, target: int, num_bytes: int) -> Copies:
    """Return copies of all blocks, read and written in different random orders."""
    chance = np.random.default_rng(1)
    starts = np.arange(0, num_bytes, BLOCK_BYTES, dtype=np.uint64)
    return Copies(
        np.uint64(source) + chance.permutation(starts),
        np.uint64(target) + chance.permutation(starts),
        np.full(len(starts), BLOCK_BYTES, np.uint64),
    )


def time_copies(
    engine: CpuCopyEngine, direction: Direction, copies: Copies, after: After | None
) -> float:
    """Return the seconds until all has landed and ``after`` has returned."""
    done = threading.Event()
    tickets: list[Ticket] = []

    def on_done(ticket: Ticket) -> None:
        if after is not None:
            after()
        tickets.append(ticket)
        done.set()

    start = time.perf_counter()
    engine.submit(direction, copies, after=engine.fence(), keep_alive=None, ends=Ends(on_done))
    if not done.wait(WAIT_S) or tickets[0].error:
        raise RuntimeError(f"a copy failed: {tickets}")
    return time.perf_counter() - start


class Measured:
    """The samples of one run."""

    def __init__(self, arena: Arena, memory: int, num_bytes: int) -> None:
        self._engine = CpuCopyEngine()
        self._arena = arena
        self._copies = {
            Direction.STORE: whole_blocks(memory, arena.address, num_bytes),
            Direction.LOAD: whole_blocks(arena.address, memory, num_bytes),
        }
        self._slots = [Summed(0, at, at + 1) for at in range(0, num_bytes, BLOCK_BYTES)]
        self._num_bytes = num_bytes
        self.speeds: dict[str, list[float]] = {}
        self.ratios: dict[str, list[float]] = {}

    def close(self) -> None:
        """End the copy engine."""
        self._engine.close(WAIT_S)

    def round(self, number: int) -> None:
        """Measure everything once."""
        for layer_bytes in LAYERS:
            sums = Checksums([part_of(layer_bytes)], 0, 1.0)
            name = f"{layer_bytes // KIB}_kib"
            start = time.thread_time()
            sums.write(self._arena, self._slots)
            speed = self._num_bytes / (time.thread_time() - start) / 1e9
            self.speeds.setdefault(f"checksum_{name}_gb_per_s", []).append(speed)
            self._compare(
                f"checksum_store_{name}_ratio",
                Direction.STORE,
                lambda sums=sums: sums.write(self._arena, self._slots),
                number,
            )
        for check_ratio in CHECK_RATIOS:
            chance = random.Random(number)
            sums = Checksums([part_of(MIB)], 0, check_ratio, chance=chance.random)
            sums.write(self._arena, self._slots)
            self._compare(
                f"checksum_load_checked_{check_ratio:g}_ratio",
                Direction.LOAD,
                lambda sums=sums: self._check(sums),
                number,
            )

    def _check(self, sums: Checksums) -> None:
        if sums.check(self._arena, self._slots).damaged:
            raise RuntimeError("a sound block was found damaged")

    def _compare(self, name: str, direction: Direction, after: After, number: int) -> None:
        copies = self._copies[direction]
        seconds: dict[bool, float] = {}
        for is_guarded in (False, True) if number % 2 else (True, False):
            seconds[is_guarded] = time_copies(
                self._engine, direction, copies, after if is_guarded else None
            )
        self.ratios.setdefault(name, []).append(seconds[False] / seconds[True])


def main() -> None:
    """Make both areas, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256, help="bytes of a copy, a multiple of 4")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    num_bytes = options.mib * MIB
    arena, fd = Arena.create(size_bytes=num_bytes, extent_bytes=EXTENT_BYTES_MIN, epoch=1)
    touch(arena, fd, stop=threading.Event(), on_progress=lambda _: None)
    os.close(fd)
    memory = np.ones(num_bytes, np.uint8)
    measured = Measured(arena, memory.ctypes.data, num_bytes)
    measured.round(0)  # warms up
    measured.speeds.clear()
    measured.ratios.clear()
    for number in range(options.rounds):
        measured.round(number)
    measured.close()
    figures = {
        **{name: round(statistics.median(each), 2) for name, each in measured.speeds.items()},
        **{name: round(statistics.median(each), 3) for name, each in measured.ratios.items()},
        "checksum_num_bytes": num_bytes,
        "checksum_num_rounds": options.rounds,
        "checksum_load_average": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figures))
    arena.close()


if __name__ == "__main__":
    main()
