"""Copies between a GPU and the arena: GB/s by page size as a ratio to the link, in one run.

    python benchmarks/cuda_copies.py [--gib 2] [--json FILE]

The link is one large copy between registered memory and the GPU. GPU pages are scattered, and
so are slots: of 4 MiB with pages side by side, as blocks have them, or (``one page``) each of a
single page. Needs a CUDA device; run it on an idle one.
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
from millpond.transfer import Copies, Direction, Ends
from millpond.transfer.cuda import CudaDevice
from millpond.transfer.measuring import log_measured
from millpond.transfer.routes import Route, Routes
from millpond.transfer.streams import StreamCopyEngine

KIB, MIB, GIB = 2**10, 2**20, 2**30
PAGES = (16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
SLOT = 4 * MIB
REPEATS = 5
WAIT_S = 120.0
STEP_S = 0.0005


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
        self.engine: StreamCopyEngine | None = None
        self.routes: Routes | None = None
        started = time.monotonic()
        self.use(Routes.only(Route.BATCH))
        self.register_s = time.monotonic() - started
        self.measured = CudaDevice(self.device).measure()
        log_measured(self.measured)

    def use(self, routes: Routes) -> None:
        """Go on with an engine that moves pages by these routes."""
        if self.engine is not None:
            self.engine.close(WAIT_S)
        self.routes = routes
        self.engine = StreamCopyEngine(CudaDevice(self.device, routes=routes))
        self.engine.adopt(self.arena)
        deadline = time.monotonic() + WAIT_S
        while not self.engine.is_ready(2 * self.num_bytes):
            time.sleep(0.01)
            if time.monotonic() > deadline:
                sys.exit("the arena was not registered in time")

    def copies(self, direction: Direction, page: int, half: int, slot: int = SLOT) -> Copies:
        """Return copies of all pages of one half, in two random orders."""
        chance = np.random.default_rng(page + half)
        slot = max(slot, page)
        base = half * self.num_bytes
        slots = chance.permutation(np.arange(0, self.num_bytes, slot))
        host = (slots[:, None] + np.arange(0, slot, page)[None, :]).ravel()
        gpu = chance.permutation(np.arange(0, self.num_bytes, page))
        host, gpu = host + self.arena.address + base, gpu + self.gpu.data_ptr() + base
        lengths = np.full(len(gpu), page, np.uint64)
        ends = (gpu, host) if direction is Direction.STORE else (host, gpu)
        return Copies(*(end.astype(np.uint64) for end in ends), lengths)

    def submit(self, direction: Direction, copies: Copies) -> threading.Event:
        done = threading.Event()
        self.engine.submit(
            direction,
            copies,
            after=self.engine.fence(),
            keep_alive=self.arena,
            ends=Ends(
                lambda ticket: done.set() if ticket.error is None else sys.exit(ticket.error)
            ),
        )
        return done

    def seconds(self, jobs: list[tuple[Direction, Copies]]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for done in [self.submit(direction, copies) for direction, copies in jobs]:
            while not done.wait(STEP_S):
                if time.perf_counter() - started > WAIT_S:
                    sys.exit("a copy did not end")
                self.engine.step()  # as an engine does that waits for a load
        return time.perf_counter() - started


def median(measure: Callable[[], float]) -> float:
    measure()
    return statistics.median(measure() for _ in range(REPEATS))


def three_ways(bench: Bench, load: Copies, store: Copies) -> dict[str, float]:
    """Return GB/s of a load, of a store, and of both at once."""
    n = bench.num_bytes / 1e9
    one, other = (Direction.LOAD, load), (Direction.STORE, store)
    return {
        "h2d": n / median(lambda: bench.seconds([one])),
        "d2h": n / median(lambda: bench.seconds([other])),
        "duplex": 2 * n / median(lambda: bench.seconds([one, other])),
    }


def link(bench: Bench) -> dict[str, float]:
    """Return GB/s of one copy of everything, each way and both ways at once."""
    return three_ways(
        bench,
        bench.copies(Direction.LOAD, bench.num_bytes, 0),
        bench.copies(Direction.STORE, bench.num_bytes, 1),
    )


ROUTES = ("batch", "staged", "kernel", "chosen")


def routes_named(bench: Bench, name: str) -> Routes:
    return bench.measured.routes if name == "chosen" else Routes.only(Route(name))


def by_page(
    bench: Bench, ceilings: dict[str, float], name: str, slot: int
) -> list[dict[str, object]]:
    bench.use(routes_named(bench, name))
    rows: list[dict[str, object]] = []
    for page in PAGES:
        figures = three_ways(
            bench,
            bench.copies(Direction.LOAD, page, 0, slot),
            bench.copies(Direction.STORE, page, 1, slot),
        )
        row: dict[str, object] = {
            "route": name,
            "slots": "one page" if slot == 0 else "4 MiB",
            "page_kib": page // KIB,
        }
        for way, value in figures.items():
            row[f"{way}_gb_s"] = round(value, 1)
            row[f"{way}_link_ratio"] = round(value / ceilings[way], 3)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def enqueue_ms(bench: Bench, num_pages: int = 16_000) -> dict[str, float]:
    """Return what handing over that many copies of 64 KiB costs.

    ``submit`` is what the engine's thread pays, ``lane`` what the lane's thread does meanwhile.
    """
    copies = bench.copies(Direction.LOAD, 64 * KIB, 0)
    copies = Copies(*(a[:num_pages] for a in (copies.sources, copies.targets, copies.lengths)))
    stream = CudaDevice(bench.device, routes=bench.routes).stream(Direction.LOAD)
    taken: dict[str, list[float]] = {"submit": [], "lane": []}
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        done = bench.submit(Direction.LOAD, copies)
        taken["submit"].append((time.perf_counter() - started) * 1e3)
        done.wait(WAIT_S)
        started = time.perf_counter()
        held = stream.copy(copies)
        taken["lane"].append((time.perf_counter() - started) * 1e3)
        stream.record().wait()
        del held
    return {name: round(statistics.median(values), 3) for name, values in taken.items()}


def matmul_ratio(bench: Bench) -> dict[str, float]:
    """Return a matrix product's speed beside copies, as a share of its speed alone."""
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

    products(100)  # clocks settle
    ratios: dict[str, float] = {}
    for direction in Direction:
        for page in (64 * KIB, MIB):
            copies = bench.copies(direction, page, 1)
            pairs: list[float] = []
            for _ in range(REPEATS):
                alone = products(10)
                done = bench.submit(direction, copies)
                pairs.append(alone / products(10))
                if done.is_set():
                    sys.exit("the products outlasted the copies: more --gib")
                done.wait(WAIT_S)
            name = f"{direction.value}_{page // KIB}_kib"
            ratios[name] = round(statistics.median(pairs), 3)
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
        "measured": {
            "link_gb_s": [bench.measured.link.h2d_gb_s, bench.measured.link.d2h_gb_s],
            "allowed_gb_s": bench.measured.link.allowed_gb_s,
            "seconds": bench.measured.seconds,
            "gb_s": bench.measured.gb_s,
            "routes": bench.measured.routes.by_page,
        },
        "pages": [],
        "enqueue_16000_pages_ms": {},
        "matmul_ratio": {},
    }
    print(json.dumps(figures["measured"]), flush=True)
    for name in ROUTES:
        figures["pages"] += by_page(bench, ceilings, name, SLOT)
        figures["enqueue_16000_pages_ms"][name] = enqueue_ms(bench)
        figures["matmul_ratio"][name] = matmul_ratio(bench)
        print(json.dumps([figures["enqueue_16000_pages_ms"], figures["matmul_ratio"]]), flush=True)
    figures["pages"] += by_page(bench, ceilings, "chosen", 0)
    print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if bench.engine is not None:
        bench.engine.close(WAIT_S)


if __name__ == "__main__":
    main()
