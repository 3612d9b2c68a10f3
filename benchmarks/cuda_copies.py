"""Copies between a GPU and the arena: GB/s by page size as a ratio to the link, in one run.

    python benchmarks/cuda_copies.py [--gib 2] [--json FILE]

The link is one large copy between registered memory and the GPU. Pages and slots are
scattered. Needs a CUDA device; run it on an idle one.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millpond.arena.arena import Arena
from millpond.arena.touch import touch
from millpond.transfer import Copies, Direction
from millpond.transfer.cuda import CudaCopyEngine, CudaDevice
from millpond.transfer.streams import StreamCopyEngine

KIB, MIB, GIB = 2**10, 2**20, 2**30
PAGES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
REPEATS = 5
WAIT_S = 120.0


class Bench:
    """An arena, a buffer on the GPU as large, and an engine between them."""

    def __init__(self, num_bytes: int) -> None:
        self.device = torch.device("cuda", 0)
        self.num_bytes = num_bytes
        self.arena, fd = Arena.create(size_bytes=2 * num_bytes, extent_bytes=num_bytes, epoch=1)
        started = time.monotonic()
        touch(self.arena, fd, stop=threading.Event(), on_progress=lambda _: None)
        self.touch_s = time.monotonic() - started
        self.gpu = torch.empty(2 * num_bytes, dtype=torch.uint8, device="cuda")
        self.engine: StreamCopyEngine = CudaCopyEngine(self.device)
        started = time.monotonic()
        self.use(0)
        self.register_s = time.monotonic() - started

    def use(self, below: int) -> None:
        """Go on with an engine that moves pages below that size by the kernel."""
        self.engine.close(WAIT_S)
        device = CudaDevice(
            self.device, load_kernel_below_bytes=below, store_kernel_below_bytes=below
        )
        self.engine = StreamCopyEngine(device)
        self.engine.adopt(self.arena)
        deadline = time.monotonic() + WAIT_S
        while not self.engine.is_ready(2 * self.num_bytes):
            time.sleep(0.01)
            if time.monotonic() > deadline:
                sys.exit("the arena was not registered in time")

    def copies(self, direction: Direction, page: int, half: int, seed: int) -> Copies:
        """Return copies of all pages of one half, in two random orders."""
        chance = np.random.default_rng(seed)
        count = self.num_bytes // page
        base = half * self.num_bytes
        host = self.arena.address + base + chance.permutation(count).astype(np.uint64) * page
        gpu = self.gpu.data_ptr() + base + chance.permutation(count).astype(np.uint64) * page
        lengths = np.full(count, page, np.uint64)
        ends = (gpu, host) if direction is Direction.STORE else (host, gpu)
        return Copies(*(end.astype(np.uint64) for end in ends), lengths)

    def submit(self, direction: Direction, copies: Copies) -> threading.Event:
        done = threading.Event()
        self.engine.submit(
            direction,
            copies,
            after=self.engine.fence(),
            keep_alive=self.arena,
            on_done=lambda ticket: done.set() if ticket.error is None else sys.exit(ticket.error),
        )
        return done

    def seconds(self, jobs: list[tuple[Direction, Copies]]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for done in [self.submit(direction, copies) for direction, copies in jobs]:
            if not done.wait(WAIT_S):
                sys.exit("a copy did not end")
        return time.perf_counter() - started


def median(measure: Callable[[], float]) -> float:
    measure()
    return statistics.median(measure() for _ in range(REPEATS))


def link(bench: Bench) -> dict[str, float]:
    """Return GB/s of one copy of everything, each way and both ways at once."""
    load = bench.copies(Direction.LOAD, bench.num_bytes, 0, 0)
    store = bench.copies(Direction.STORE, bench.num_bytes, 1, 0)
    n = bench.num_bytes / 1e9
    return {
        "h2d": n / median(lambda: bench.seconds([(Direction.LOAD, load)])),
        "d2h": n / median(lambda: bench.seconds([(Direction.STORE, store)])),
        "duplex": 2
        * n
        / median(lambda: bench.seconds([(Direction.LOAD, load), (Direction.STORE, store)])),
    }


ENGINES = {"copy engines": 0, "kernel": 2**62}


def by_page(bench: Bench, ceilings: dict[str, float], name: str) -> list[dict[str, object]]:
    bench.use(ENGINES[name])
    rows: list[dict[str, object]] = []
    n = bench.num_bytes / 1e9
    for page in PAGES:
        load = bench.copies(Direction.LOAD, page, 0, page)
        store = bench.copies(Direction.STORE, page, 1, page + 1)
        figures = {
            "h2d": n / median(lambda load=load: bench.seconds([(Direction.LOAD, load)])),
            "d2h": n / median(lambda store=store: bench.seconds([(Direction.STORE, store)])),
            "duplex": 2
            * n
            / median(
                lambda load=load, store=store: bench.seconds(
                    [(Direction.LOAD, load), (Direction.STORE, store)]
                )
            ),
        }
        row: dict[str, object] = {"engine": name, "page_kib": page // KIB}
        for way, value in figures.items():
            row[f"{way}_gb_s"] = round(value, 1)
            row[f"{way}_link_ratio"] = round(value / ceilings[way], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def enqueue_ms(bench: Bench, num_pages: int = 16_000) -> float:
    """Return the milliseconds of Python in handing over that many copies of 64 KiB."""
    copies = bench.copies(Direction.LOAD, 64 * KIB, 0, 3)
    copies = Copies(*(np.resize(a, num_pages) for a in (copies.sources, copies.targets)),
                    np.full(num_pages, 64 * KIB, np.uint64))  # fmt: skip
    taken: list[float] = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        done = bench.submit(Direction.LOAD, copies)
        taken.append((time.perf_counter() - started) * 1e3)
        done.wait(WAIT_S)
    return statistics.median(taken)


def matmul_ratio(bench: Bench) -> dict[str, float]:
    """Return a matrix product's speed beside a store, as a share of its speed alone."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")

    def products(num: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(num):
            torch.mm(a, b)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / num

    products(20)
    alone = statistics.median(products(20) for _ in range(REPEATS))
    ratios: dict[str, float] = {}
    for page in (64 * KIB, MIB):
        store = bench.copies(Direction.STORE, page, 1, 5)
        beside: list[float] = []
        for _ in range(REPEATS):
            done = bench.submit(Direction.STORE, store)
            beside.append(products(10))
            done.wait(WAIT_S)
        ratios[f"{page // KIB}_kib"] = round(alone / statistics.median(beside), 3)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0, help="bytes to move, in GiB")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this benchmark needs one")
    bench = Bench(int(options.gib * GIB))
    ceilings = link(bench)
    print(json.dumps({"link_gb_s": {k: round(v, 1) for k, v in ceilings.items()}}), flush=True)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "touch_s": round(bench.touch_s, 2),
        "register_s": round(bench.register_s, 2),
        "link_gb_s": {k: round(v, 1) for k, v in ceilings.items()},
        "pages": [row for name in ENGINES for row in by_page(bench, ceilings, name)],
        "enqueue_16000_pages_ms": {},
        "matmul_beside_store_ratio": {},
    }
    for name, below in ENGINES.items():
        bench.use(below)
        figures["enqueue_16000_pages_ms"][name] = round(enqueue_ms(bench), 2)
        figures["matmul_beside_store_ratio"][name] = matmul_ratio(bench)
    print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    bench.engine.close(WAIT_S)


if __name__ == "__main__":
    main()
