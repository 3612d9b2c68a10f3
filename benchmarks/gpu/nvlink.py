"""Blocks straight from another replica's GPU over NVLink, against the pool in host memory.

    python benchmarks/gpu/nvlink.py [--gib 16] [--page 3211264] [--repeats 5]
                                    [--local-s 0.2] [--json PATH] [--no-host]

An experiment, which needs two GPUs that can reach each other, and no engine: one process holds
pages on the first GPU as a replica would, and hands them out by CUDA IPC; this one copies them
in random order to pages of the second GPU, by one batched call of the runtime and by a call a
page. (A kernel on the second GPU may not read what torch has opened for the first one.) Beside it
the same bytes from host memory by Millpond's own engine, and what a bf16 matrix product on the
first GPU keeps of its speed while its pages are read.

--page is a layer's page: 784 tokens of a 27B hybrid (4 heads of 256, key and value, in bf16),
which is about as large as one of its recurrent states. --local-s is what a local hit takes:
with it, what a moved request would take at least. Takes about 40 s with two H200s, of which 10
are the start of the processes and 8 the pool's memory. Ends with 1 only where bytes are wrong.
"""

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from engines import end, receive
from numpy.typing import NDArray
from runs import Results, add_results, say

from millpond.arena.arena import Arena
from millpond.arena.touch import touch
from millpond.transfer import Copies, Direction, Ends

GIB = 2**30
EXTENT_BYTES = GIB
MATRIX = 8192
WAIT_S = 120.0
STEP_S = 0.0005
PRODUCT_S = 1.5
MOVED_BYTES = {32_768: 2_300_000_000, 131_072: 8_700_000_000, 261_900: 17_300_000_000}
"""What moved requests of a 27B hybrid load (docs/RESULTS.md)."""

Addresses = NDArray[np.uint64]


# ---------------------------------------------------------------- the replica that has the pages


def hold_pages(asked: Connection, num_bytes: int) -> None:
    """Be the first GPU's process: hand out the pages, and multiply matrices when asked."""
    pages = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    # Every byte differs from its neighbours, so that a copy from a wrong place is seen.
    words = pages.view(torch.int64)
    torch.arange(len(words), out=words)
    left, right = (
        torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda:0") for _ in range(2)
    )
    torch.cuda.synchronize()
    asked.send(pages)
    while (seconds := asked.recv()) is not None:
        asked.send("begun")
        num, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            for _ in range(8):
                torch.mm(left, right)
            torch.cuda.synchronize()
            num += 8
        asked.send(num / (time.perf_counter() - began_s))


# ---------------------------------------------------------------- the replica that wants them


def places(start: int, num_pages: int, page: int) -> Addresses:
    """Return where pages lie that follow each other."""
    return np.uint64(start) + np.arange(num_pages, dtype=np.uint64) * np.uint64(page)


def scattered(sources: Addresses, targets: Addresses, page: int) -> tuple[Addresses, ...]:
    """Return sources, targets and lengths of all pages, either side in a random order."""
    chance = np.random.default_rng(1)
    sources, targets = chance.permutation(sources), chance.permutation(targets)
    return sources, targets, np.full(len(sources), page, np.uint64)


class Reader:
    """Copies the other GPU's pages to its own, by two routes."""

    def __init__(self, theirs: torch.Tensor, page: int) -> None:
        num_pages = theirs.numel() // page
        self.num_bytes = num_pages * page
        self._theirs = theirs
        self._own = torch.zeros(self.num_bytes, dtype=torch.uint8, device="cuda:1")
        # Either way once: torch lets a device reach the one that it copies to.
        self._own[:page].copy_(theirs[:page])
        torch.zeros(page, dtype=torch.uint8, device="cuda:0").copy_(self._own[:page])
        self._stream = torch.cuda.Stream(device="cuda:1")
        here, there = (places(t.data_ptr(), num_pages, page) for t in (self._own, theirs))
        self._copies = scattered(there, here, page)
        self._page = page

    def routes(self) -> dict[str, Callable[[], None]]:
        """Return what enqueues all pages, by name."""
        from millpond.transfer import cudart

        handle = self._stream.cuda_stream

        routes: dict[str, Callable[[], None]] = {
            "one call a page": lambda: cudart.copy_each(*self._copies, handle)
        }
        if cudart.has_batch_copy():
            routes["batch"] = lambda: cudart.copy_batch(*self._copies, handle)
        return routes

    def seconds(self, enqueue: Callable[[], None]) -> float:
        """Return what all pages take."""
        torch.cuda.synchronize("cuda:1")
        began_s = time.perf_counter()
        with torch.cuda.device("cuda:1"):
            enqueue()
        self._stream.synchronize()
        return time.perf_counter() - began_s

    def is_right(self) -> bool:
        """Compare a few pages with what they were copied from, and clear all."""
        sources, targets, _ = self._copies
        right = True
        for i in range(0, len(sources), max(1, len(sources) // 64)):
            source = int(sources[i]) - self._theirs.data_ptr()
            target = int(targets[i]) - self._own.data_ptr()
            there = self._theirs[source : source + self._page].to("cuda:1")
            right &= torch.equal(there, self._own[target : target + self._page])
        self._own.zero_()
        return right


class HostReader:
    """The same bytes from a pool in host memory, by Millpond's engine."""

    def __init__(self, num_pages: int, page: int) -> None:
        from millpond.transfer.cuda import CudaDevice
        from millpond.transfer.streams import StreamCopyEngine

        num_in_extent = EXTENT_BYTES // page  # no page crosses an extent's end, as no slot does
        extents = -(-num_pages // num_in_extent)
        self._arena, fd = Arena.create(
            size_bytes=extents * EXTENT_BYTES, extent_bytes=EXTENT_BYTES, epoch=1
        )
        touch(self._arena, fd, stop=threading.Event(), on_progress=lambda _: None)
        os.close(fd)
        torch.cuda.set_device(1)
        self._own = torch.zeros(num_pages * page, dtype=torch.uint8, device="cuda:1")
        self._engine = StreamCopyEngine(CudaDevice(torch.device("cuda", 1)))
        self._engine.adopt(self._arena)
        deadline_s = time.monotonic() + WAIT_S
        while not self._engine.is_ready(self._arena.size_bytes):
            time.sleep(0.01)
            if time.monotonic() > deadline_s:
                raise RuntimeError("the pool was not registered in time")
        in_pool = np.concatenate(
            [
                places(self._arena.address + i * EXTENT_BYTES, num_in_extent, page)
                for i in range(extents)
            ]
        )[:num_pages]
        targets = places(self._own.data_ptr(), num_pages, page)
        self._copies = Copies(*scattered(in_pool, targets, page))

    def seconds(self) -> float:
        """Return what all pages take."""
        failed: list[str] = []
        done = threading.Event()

        def end(ticket: Any) -> None:  # noqa: ANN401
            if ticket.error is not None:
                failed.append(ticket.error)
            done.set()

        torch.cuda.synchronize("cuda:1")
        began_s = time.perf_counter()
        self._engine.submit(
            Direction.LOAD,
            self._copies,
            after=self._engine.fence(),
            keep_alive=self._arena,
            ends=Ends(end),
        )
        deadline_s = time.monotonic() + WAIT_S
        while not done.wait(STEP_S):
            self._engine.step()
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the copies have not ended after {WAIT_S:g} s")
        if failed:
            raise RuntimeError(failed[0])
        return time.perf_counter() - began_s


def measured(seconds: Callable[[], float], num_bytes: int, repeats: int) -> list[float]:
    """Return GB/s of several runs; the one before them does not count."""
    seconds()
    return [round(num_bytes / seconds() / 1e9, 1) for _ in range(repeats)]


def product_ratio(pipe: Connection, copy: Callable[[], float]) -> dict[str, float]:
    """Return what the other GPU's matrix product keeps while its pages are read on end."""
    pipe.send(PRODUCT_S)
    receive(pipe, WAIT_S, of="the first GPU's process")
    alone = receive(pipe, WAIT_S, of="the first GPU's process")
    pipe.send(PRODUCT_S)
    receive(pipe, WAIT_S, of="the first GPU's process")
    num_copies = 0
    deadline_s = time.monotonic() + WAIT_S
    while not pipe.poll() and time.monotonic() < deadline_s:
        copy()
        num_copies += 1
    beside = receive(pipe, WAIT_S, of="the first GPU's process")
    return {"matmul_ratio": round(beside / alone, 3), "num_copies": num_copies}


def measure_nvlink(
    results: Results, pipe: Connection, asked: argparse.Namespace
) -> dict[str, float]:
    """Add a row for each route; return their GB/s."""
    torch.cuda.set_device(1)
    reader = Reader(receive(pipe, WAIT_S, of="the first GPU's process"), asked.page)
    gb_s: dict[str, float] = {}
    for name, enqueue in reader.routes().items():
        say(name)

        def seconds(enqueue: Callable[[], None] = enqueue) -> float:
            return reader.seconds(enqueue)

        runs = measured(seconds, reader.num_bytes, asked.repeats)
        is_right = reader.is_right()
        results.row(
            what="nvlink",
            route=name,
            pages=reader.num_bytes // asked.page,
            page_bytes=asked.page,
            gb_s=runs,
            gb_s_median=round(statistics.median(runs), 1),
            right=is_right,
            **product_ratio(pipe, seconds),
        )
        results.true(f"right bytes, {name}", holds=is_right)
        gb_s[name] = statistics.median(runs)
    pipe.send(None)
    return gb_s


def measure_host(results: Results, asked: argparse.Namespace, num_pages: int) -> float:
    """Add a row for the pool in host memory; return its GB/s."""
    say("the pool's memory")
    torch.cuda.set_device(1)
    host = HostReader(num_pages, asked.page)
    runs = measured(host.seconds, num_pages * asked.page, asked.repeats)
    results.row(
        what="host",
        pages=num_pages,
        page_bytes=asked.page,
        gb_s=runs,
        gb_s_median=round(statistics.median(runs), 1),
    )
    return statistics.median(runs)


def options() -> argparse.Namespace:
    """Return what was asked for; ends where this machine cannot do it."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--gib", type=float, default=16.0, help="bytes that are moved")
    made.add_argument("--page", type=int, default=784 * 4096)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--local-s", type=float, default=0.2, help="seconds of a local hit")
    made.add_argument("--no-host", action="store_true", help="NVLink alone")
    add_results(made)
    asked = made.parse_args()
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        made.exit(2, "two GPUs are needed\n")
    if not torch.cuda.can_device_access_peer(1, 0):
        made.exit(2, "the second GPU cannot reach the first one\n")
    return asked


def main() -> None:
    """Measure and print."""
    asked = options()
    results = Results(asked)
    num_pages = int(asked.gib * GIB) // asked.page
    say(f"about 40 s: {num_pages} pages of {asked.page} bytes")
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    holder = context.Process(target=hold_pages, args=(theirs, num_pages * asked.page), daemon=True)
    holder.start()
    theirs.close()
    try:
        gb_s = measure_nvlink(results, pipe, asked)
    finally:
        end(holder)
    if not asked.no_host:
        gb_s["host"] = measure_host(results, asked, num_pages)
    for tokens, num_bytes in MOVED_BYTES.items():
        results.row(
            what="floor",
            prompt_tokens=tokens,
            bytes=num_bytes,
            moved_s={n: round(asked.local_s + num_bytes / x / 1e9, 3) for n, x in gb_s.items()},
        )
    results.finish()


if __name__ == "__main__":
    main()
