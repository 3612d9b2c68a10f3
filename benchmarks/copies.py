"""Copies in and out of a populated arena through the CPU copy engine, beside one memcpy.

    python benchmarks/copies.py [--mib 256] [--rounds 9]

Each round moves the same bytes between the same two areas: once with one call of memmove,
once as scattered pages through the engine, in turns of changing order. ``store`` goes into
the arena, ``load`` comes out of it. Prints one line of JSON; ratios are the speed of the
engine over that of memmove.
"""

import argparse
import ctypes
import json
import os
import statistics
import threading
import time

import numpy as np
from figures import copy_ratios

from millpond.arena.arena import Arena
from millpond.arena.touch import touch
from millpond.model.limits import EXTENT_BYTES_MIN, KIB, MIB
from millpond.transfer import Copies, CpuCopyEngine, Direction, Ends, Ticket

PAGES = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
WAIT_S = 60.0


def scattered(source: int, target: int, num_bytes: int, page_bytes: int) -> Copies:
    """Return copies of all pages, read and written in different random orders."""
    chance = np.random.default_rng(page_bytes)
    starts = np.arange(0, num_bytes, page_bytes, dtype=np.uint64)
    return Copies(
        np.uint64(source) + chance.permutation(starts),
        np.uint64(target) + chance.permutation(starts),
        np.full(len(starts), page_bytes, np.uint64),
    )


def time_engine(engine: CpuCopyEngine, direction: Direction, copies: Copies) -> float:
    """Return the seconds from submission to the report that all has landed."""
    done = threading.Event()
    tickets: list[Ticket] = []

    def on_done(ticket: Ticket) -> None:
        tickets.append(ticket)
        done.set()

    start = time.perf_counter()
    engine.submit(direction, copies, after=engine.fence(), keep_alive=None, ends=Ends(on_done))
    if not done.wait(WAIT_S) or tickets[0].error:
        raise RuntimeError(f"a copy failed: {tickets}")
    return time.perf_counter() - start


def time_memcpy(source: int, target: int, num_bytes: int) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    ctypes.memmove(target, source, num_bytes)
    return time.perf_counter() - start


def measure(arena: Arena, memory: int, num_bytes: int, num_rounds: int) -> dict[str, object]:
    """Time all pages and directions; the first round warms up and is dropped."""
    engine = CpuCopyEngine()
    times: dict[tuple[str, int], list[tuple[float, float]]] = {}
    areas = {
        Direction.STORE: (memory, arena.address),
        Direction.LOAD: (arena.address, memory),
    }
    for i in range(num_rounds + 1):
        for direction, (source, target) in areas.items():
            for page_bytes in PAGES:
                copies = scattered(source, target, num_bytes, page_bytes)
                first = time_memcpy(source, target, num_bytes) if i % 2 else None
                engine_s = time_engine(engine, direction, copies)
                memcpy_s = first or time_memcpy(source, target, num_bytes)
                if i:
                    times.setdefault((direction.value, page_bytes), []).append((memcpy_s, engine_s))
    engine.close(WAIT_S)
    memcpy_s = statistics.median(memcpy for pairs in times.values() for memcpy, _ in pairs)
    return {
        **copy_ratios(times),
        "copy_memcpy_gb_per_s": round(num_bytes / memcpy_s / 1e9, 2),
        "copy_num_bytes": num_bytes,
        "copy_num_rounds": num_rounds,
    }


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
    # Written once, so that its pages are there as an engine's are.
    memory = np.ones(num_bytes, np.uint8)
    print(json.dumps(measure(arena, memory.ctypes.data, num_bytes, options.rounds)))
    arena.close()


if __name__ == "__main__":
    main()
