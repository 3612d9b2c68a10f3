"""How long small copies of an engine wait beside loads and stores: inputs of a step, a token.

    python benchmarks/small_copies.py [--gib 4] [--step-ms 20] [--json FILE]

First what the driver does: copies of 4 MiB are queued, and a copy of 4 or 64 KiB the same way, on
another stream, is waited for again and again: with nothing before it on its stream, or behind
a kernel. "hops" are the same copies on two streams in turns, each portion behind an event on the
other stream.

Then steps, by the device's clock: an engine that is one step ahead of the GPU, as vLLM with
asynchronous scheduling. A step is six small copies to the GPU, a kernel of --step-ms, and a
small copy from the GPU. Milliseconds of a step beside a load "at once", one at a "pace"
(connector/pacing.py) and one that hops, and beside a store; against those on an idle GPU. And what
becomes of the speed of the copies. Needs a CUDA device; run it on an idle one.
Ends with 1 where a step takes more than 1.5 times as long beside a load at a pace.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cuda_copies import GIB, KIB, MIB, WAIT_S, Bench, link

from millpond.connector.pacing import Pacing
from millpond.transfer import Copies, Direction, cudart

LARGE = 4 * MIB
SMALL = (4 * KIB, 64 * KIB)
PORTIONS = (0, 8 * MIB, 64 * MIB)
"""Of hops; 0 is one stream."""
NUM_INPUTS = 6
PAGES = (64 * KIB, 4 * MIB)
POLL_S = 0.0005
NUM_STEPS_BEFORE = 10
KERNEL_S = 0.0005
CYCLES_PER_S = 1.9e9
"""Of the GPU's clock, about."""
STEP_RATIO_MAX = 1.5


class Small:
    """Small copies on a stream of their own."""

    def __init__(self, num_bytes: int) -> None:
        self.stream = torch.cuda.Stream()
        self._gpu = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        self._host = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()

    def enqueue(self, *, to_gpu: bool) -> None:
        """Enqueue one."""
        target, source = (self._gpu, self._host) if to_gpu else (self._host, self._gpu)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def ms(self, *, to_gpu: bool, behind_kernel: bool) -> float:
        """Return the milliseconds of one, which the host waits for; a kernel's time left out."""
        began, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if not behind_kernel:
            began_s = time.perf_counter()
            self.enqueue(to_gpu=to_gpu)
            self.stream.synchronize()
            return (time.perf_counter() - began_s) * 1e3
        with torch.cuda.stream(self.stream):
            busy(KERNEL_S)
            began.record()
        self.enqueue(to_gpu=to_gpu)
        copied.record(self.stream)
        copied.synchronize()
        return began.elapsed_time(copied)


class Hops:
    """Large copies on two streams in turns, or all on one."""

    def __init__(self, portion: int) -> None:
        self._portion = portion
        self._streams = [torch.cuda.Stream() for _ in range(2 if portion else 1)]
        self._end = torch.cuda.Event()

    def enqueue(self, copies: Copies) -> torch.cuda.Event:
        """Enqueue all; return what is recorded behind the last."""
        each = (
            max(1, self._portion // int(copies.lengths[0]))
            if self._portion
            else len(copies.lengths)
        )
        for number, start in enumerate(range(0, len(copies.lengths), each)):
            stream = self._streams[number % len(self._streams)]
            if number:
                stream.wait_event(self._end)
            part = copies.part(slice(start, start + each))
            cudart.copy_batch(part.sources, part.targets, part.lengths, stream.cuda_stream)
            self._end.record(stream)
        return self._end


def summary(times_ms: list[float]) -> dict[str, object]:
    """Return what is said of some times."""
    if not times_ms:
        return {"number": 0}
    return {
        "number": len(times_ms),
        "median_ms": round(statistics.median(times_ms), 3),
        "max_ms": round(max(times_ms), 3),
    }


def busy(seconds: float) -> None:
    """Keep the current stream busy, by a kernel."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # noqa: SLF001 - what torch tests with


def driver(bench: Bench, portion: int, num_bytes: int, way: Direction) -> list[dict[str, object]]:
    """Return the waits of small copies beside large ones, with nothing before them and behind."""
    rows: list[dict[str, object]] = []
    copies = bench.copies(way, LARGE, 0, LARGE)
    to_gpu = way is Direction.LOAD
    for behind_kernel in (False, True):
        small, hops = Small(num_bytes), Hops(portion)

        def one(small: Small = small, *, behind_kernel: bool = behind_kernel) -> float:
            return small.ms(to_gpu=to_gpu, behind_kernel=behind_kernel)

        idle = [one() for _ in range(50)]
        began_s = time.perf_counter()
        end = hops.enqueue(copies)
        waits: list[float] = []
        while not end.query():
            waits.append(one())
        seconds = time.perf_counter() - began_s
        rows.append(
            {
                "what": "driver",
                "direction": way.value,
                "small_kib": num_bytes // KIB,
                "hops_mib": portion // MIB,
                "behind_a_kernel": behind_kernel,
                "idle": summary(idle),
                "beside": summary(waits),
                "gb_s": round(copies.num_bytes / seconds / 1e9, 1),
            }
        )
    return rows


class Steps:
    """An engine that is one step ahead of the GPU."""

    def __init__(self, bench: Bench, step_s: float, pacing: Pacing | None) -> None:
        self._bench = bench
        self._step_s = step_s
        self._pacing = pacing
        self._small = Small(SMALL[0])
        self._ends: list[torch.cuda.Event] = []

    def ms(self, hand_over: Callable[[], Callable[[], bool]]) -> dict[str, object]:
        """Return steps beside what ``hand_over`` enqueues, which returns what asks for its end."""
        before = [self._step() for _ in range(NUM_STEPS_BEFORE)]
        num_before = len(before)
        began_s = time.perf_counter()
        self._begin()
        is_over = hand_over()
        self._launch()
        while not is_over():
            self._step()
            if time.perf_counter() - began_s > WAIT_S:
                sys.exit("a copy did not end")
        seconds = time.perf_counter() - began_s
        self._step()
        torch.cuda.synchronize()
        self._bench.engine.pace(None)
        pairs = zip(self._ends, self._ends[1:], strict=False)
        steps = [begin.elapsed_time(end) for begin, end in pairs]
        # The last step before was still running: a store may go before its token.
        idle = statistics.median(steps[1 : num_before - 2])
        beside = steps[num_before - 2 :]
        return {
            "idle_ms": round(idle, 3),
            "beside": summary(beside),
            "ratio": round(statistics.median(beside) / idle, 3),
            "ratio_of_longest": round(max(beside) / idle, 2),
            "seconds": round(seconds, 3),
        }

    def _step(self) -> None:
        self._begin()
        self._launch()

    def _begin(self) -> None:
        if self._pacing is not None:
            self._pacing.begin_step(computes=True)
        for _ in range(NUM_INPUTS):
            self._small.enqueue(to_gpu=True)
        self._bench.engine.pace(None if self._pacing is None else self._pacing.pace())

    def _launch(self) -> None:
        with torch.cuda.stream(self._small.stream):
            busy(self._step_s)
        self._small.enqueue(to_gpu=False)
        end = torch.cuda.Event(enable_timing=True)
        end.record(self._small.stream)
        self._ends.append(end)
        self._bench.engine.step()
        while len(self._ends) > 1 and not self._ends[-2].query():
            self._bench.engine.step()
            time.sleep(POLL_S)


def steps(bench: Bench, h2d_gb_s: float, step_s: float) -> list[dict[str, object]]:
    """Return a row for each way and size of pages."""
    rows: list[dict[str, object]] = []
    for page in PAGES:
        load, store = (bench.copies(way, page, 0) for way in (Direction.LOAD, Direction.STORE))
        pacing = Pacing()
        pacing.tell_link(h2d_gb_s * 1e9)

        def ours(way: Direction, copies: Copies) -> Callable[[], bool]:
            return bench.submit(way, copies).is_set

        hand_over: dict[str, tuple[Callable[[], Callable[[], bool]], Pacing | None]] = {
            "load at once": (lambda load=load: ours(Direction.LOAD, load), None),
            "load at a pace": (lambda load=load: ours(Direction.LOAD, load), pacing),
            "store": (lambda store=store: ours(Direction.STORE, store), None),
        }
        for portion in PORTIONS[1:]:
            for name, copies in (("load", load), ("store", store)):
                hops = Hops(portion)
                hand_over[f"{name}, hops of {portion // MIB} MiB"] = (
                    lambda hops=hops, copies=copies: hops.enqueue(copies).query,
                    None,
                )
        for name, (hand, pace) in hand_over.items():
            row = {"what": name, "page_kib": page // KIB, **Steps(bench, step_s, pace).ms(hand)}
            row["gb_s"] = round(load.num_bytes / row["seconds"] / 1e9, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="bytes of a load, in GiB")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the engine")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: this benchmark needs one")
    bench = Bench(int(options.gib * GIB))
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "driver": []}
    for way in Direction:
        for portion in PORTIONS:
            for num_bytes in SMALL:
                for row in driver(bench, portion, num_bytes, way):
                    figures["driver"].append(row)
                    print(json.dumps(row), flush=True)
    ceilings = link(bench)
    figures["link_gb_s"] = {name: round(value, 1) for name, value in ceilings.items()}
    rows = figures["steps"] = steps(bench, ceilings["h2d"], options.step_ms / 1e3)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    bench.engine.close(WAIT_S)
    longest = max(row["ratio_of_longest"] for row in rows if row["what"] == "load at a pace")
    if longest > STEP_RATIO_MAX:
        sys.exit(f"a step takes {longest} times as long beside a load at a pace")


if __name__ == "__main__":
    main()
