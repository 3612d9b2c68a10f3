"""How long small copies of an engine wait beside loads and stores: inputs of a step, a token.

    python benchmarks/small_copies.py [--gib 4] [--step-ms 20] [--json FILE]

First what the driver does: copies of 3 MiB are queued, and a copy of 4 KiB the same way on another
stream is waited for, again and again: "queued" as they are, "priority" with the small copy on a
stream of the highest priority, "hops" with the large ones on two streams in turns, each portion
of 64 MiB behind an event on the other stream. That is not the same on all machines;
``small_copies_wait`` is what Millpond finds at its start: loads keep a pace where it is so.

Then our own engine: steps of --step-ms that begin with a small copy to the GPU, which the host
waits for, beside a load "at once" and one that keeps a "pace" (connector/pacing.py); and a store
that is submitted behind a kernel of a step's length, just before the copy of a token from the GPU
behind the same kernel and a short one, as the sampler's. Milliseconds of the small copies beside
those on an idle GPU, the longest among them, and what becomes of the speed of the load. Needs a
CUDA device; run it on an idle one.
Ends with 1 where a small copy waits for a tenth of a step beside a load as Millpond would make it,
or where ``small_copies_wait`` is not what the driver does. What a token waits for behind a store
is not judged: all of it (docs/decisions/0012-small-copies-go-first.md, "Where it does nothing").
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

import torch
from cuda_copies import GIB, KIB, MIB, WAIT_S, Bench, link

from millpond.connector.pacing import Pacing
from millpond.transfer import Copies, Direction
from millpond.transfer.measuring import Sample, small_copies_wait

SMALL = 4 * KIB
LARGE = 3 * MIB
PORTION = 64 * MIB
NUM_IDLE = 200
PAGES = (64 * KIB, 4 * MIB)
POLL_S = 0.0005
NUM_STEPS_BEFORE = 4
SAMPLING_S = 0.0005
CYCLES_PER_S = 1.9e9
"""Of the GPU's clock, about."""
WAIT_STEP_RATIO_MAX = 0.1
WAIT_MS = 1.0
"""Longer than a small copy ever takes by itself."""
AT_ONCE, AT_A_PACE = "load at once", "load at a pace"


class Small:
    """Small copies on a stream of their own, one at a time."""

    def __init__(self, *, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(priority=priority)
        self._gpu = torch.zeros(SMALL, dtype=torch.uint8, device="cuda")
        self._host = torch.zeros(SMALL, dtype=torch.uint8).pin_memory()

    def to_gpu(self) -> float:
        """Return the milliseconds of one to the GPU."""
        return self._ms(self._gpu, self._host)

    def from_gpu(self) -> float:
        """Return the milliseconds of one from the GPU."""
        return self._ms(self._host, self._gpu)

    def _ms(self, target: torch.Tensor, source: torch.Tensor) -> float:
        began_s = time.perf_counter()
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return (time.perf_counter() - began_s) * 1e3


def summary(waits_ms: list[float]) -> dict[str, object]:
    """Return what is said of some waits."""
    if not waits_ms:
        return {"number": 0}
    return {
        "number": len(waits_ms),
        "median_ms": round(statistics.median(waits_ms), 3),
        "max_ms": round(max(waits_ms), 3),
    }


def driver(num_bytes: int, kind: str, *, to_gpu: bool) -> dict[str, object]:
    """Return the waits of small copies beside large ones, which torch queues."""
    host = torch.zeros(num_bytes, dtype=torch.uint8).pin_memory()
    gpu = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(2 if kind == "hops" else 1)]
    small = Small(priority=-5 if kind == "priority" else 0)
    copy = small.to_gpu if to_gpu else small.from_gpu
    target, source = (gpu, host) if to_gpu else (host, gpu)
    idle = [copy() for _ in range(NUM_IDLE)]
    end = torch.cuda.Event()
    began_s = time.perf_counter()
    for number, portion in enumerate(range(0, num_bytes, PORTION)):
        stream = streams[number % len(streams)]
        if number and len(streams) > 1:
            stream.wait_event(end)
        with torch.cuda.stream(stream):
            for start in range(portion, min(portion + PORTION, num_bytes), LARGE):
                stop = min(start + LARGE, portion + PORTION, num_bytes)
                target[start:stop].copy_(source[start:stop], non_blocking=True)
        end.record(stream)
    waits: list[float] = []
    while not end.query():
        waits.append(copy())
    gb_s = num_bytes / (time.perf_counter() - began_s) / 1e9
    return {
        "kind": kind,
        "to_gpu": to_gpu,
        "idle": summary(idle),
        "beside": summary(waits),
        "gb_s": round(gb_s, 1),
    }


def beside_steps(
    bench: Bench, copies: Copies, step_s: float, pacing: Pacing | None
) -> dict[str, object]:
    """Return the waits of steps' inputs beside a load, and how fast it is."""
    small, waits = Small(), []
    done: threading.Event | None = None
    began_s = 0.0
    for number in range(int(WAIT_S / step_s)):
        step_began_s = time.perf_counter()
        if pacing is not None:
            pacing.begin_step(computes=True)
        waits.append(small.to_gpu())
        bench.engine.pace(None if pacing is None else pacing.pace())
        if number == NUM_STEPS_BEFORE:  # by now steps have been seen
            waits.clear()
            began_s = time.perf_counter()
            done = bench.submit(Direction.LOAD, copies)
        while (left_s := step_began_s + step_s - time.perf_counter()) > 0:
            bench.engine.step()
            time.sleep(min(POLL_S, left_s))
        if done is not None and done.is_set():
            break
    else:
        sys.exit("a load did not end")
    gb_s = copies.num_bytes / (time.perf_counter() - began_s) / 1e9
    bench.engine.pace(None)
    return {"waits": summary(waits), "gb_s_with_the_last_step": round(gb_s, 1)}


def busy(seconds: float) -> None:
    """Keep the current stream busy, by a kernel."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))  # noqa: SLF001 - what torch tests with


def beside_a_store(bench: Bench, copies: Copies, step_s: float) -> dict[str, object]:
    """Return the waits of a step's token where its store was submitted just before."""
    token = torch.zeros(SMALL, dtype=torch.uint8).pin_memory()
    on_gpu = torch.zeros(SMALL, dtype=torch.uint8, device="cuda")
    waits: list[float] = []
    for _ in range(5):
        busy(step_s)
        done = bench.submit(Direction.STORE, copies)
        bench.engine.step()
        busy(SAMPLING_S)
        computed = torch.cuda.Event(enable_timing=True)
        computed.record()
        token.copy_(on_gpu, non_blocking=True)
        copied = torch.cuda.Event(enable_timing=True)
        copied.record()
        copied.synchronize()
        waits.append(computed.elapsed_time(copied))
        bench.engine.begin_step()
        if not done.wait(WAIT_S):
            sys.exit("a store did not end")
    return {"waits": summary(waits)}


def engine(bench: Bench, h2d_gb_s: float, step_s: float) -> list[dict[str, object]]:
    """Return a row for each way, with pages of each size."""
    rows: list[dict[str, object]] = []
    for page in PAGES:
        load, store = (bench.copies(way, page, 0) for way in (Direction.LOAD, Direction.STORE))
        pacing = Pacing()
        pacing.tell_link(h2d_gb_s * 1e9)
        ways: dict[str, Callable[[], dict[str, object]]] = {
            AT_ONCE: lambda load=load: beside_steps(bench, load, step_s, None),
            AT_A_PACE: lambda load=load, pace=pacing: beside_steps(bench, load, step_s, pace),
            "store": lambda store=store: beside_a_store(bench, store, step_s),
        }
        for name, measure in ways.items():
            rows.append({"what": name, "page_kib": page // KIB, **measure()})
            print(json.dumps(rows[-1]), flush=True)
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
    num_bytes = int(options.gib * GIB)
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "driver": []}
    for to_gpu in (True, False):
        for kind in ("queued", "priority", "hops"):
            figures["driver"].append(driver(num_bytes, kind, to_gpu=to_gpu))
            print(json.dumps(figures["driver"][-1]), flush=True)
    bench = Bench(num_bytes)
    sample = Sample(bench.device)
    found = figures["small_copies_wait"] = {
        direction.value: small_copies_wait(sample, direction) for direction in Direction
    }
    print(json.dumps({"small_copies_wait": found}), flush=True)
    ceilings = link(bench)
    small = Small()
    figures["idle"] = {
        "inputs": summary([small.to_gpu() for _ in range(NUM_IDLE)]),
        "token": summary([small.from_gpu() for _ in range(NUM_IDLE)]),
    }
    figures["link_gb_s"] = {name: round(value, 1) for name, value in ceilings.items()}
    rows = figures["engine"] = engine(bench, ceilings["h2d"], options.step_ms / 1e3)
    print(json.dumps(figures))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    bench.engine.close(WAIT_S)
    limit_ms = WAIT_STEP_RATIO_MAX * options.step_ms
    for row in figures["driver"][::3]:
        direction = Direction.LOAD if row["to_gpu"] else Direction.STORE
        if found[direction.value] != (row["beside"].get("median_ms", 0.0) > WAIT_MS):
            sys.exit(f"whether small copies wait was not found out: {direction.value}")
    as_made = AT_A_PACE if found[Direction.LOAD.value] else AT_ONCE
    ours = [row["waits"] for row in rows if row["what"] == as_made]
    if max(waits.get("max_ms", 0.0) for waits in ours) > limit_ms:
        sys.exit(f"a small copy waits for more than {limit_ms:g} ms")


if __name__ == "__main__":
    main()
