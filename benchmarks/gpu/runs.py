"""What the GPU scripts have in common: options, prompts, a pool with its replicas, results."""

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import Facts, Replica, Start, millpond_transfer

from millpond.bench.records import write_json
from millpond.cli.envelope import envelope
from millpond.config import PoolConfig
from millpond.config.values import parse_size
from millpond.launch.resources import visible_gpus
from millpond.launch.system import System, SystemOptions
from millpond.service.client import AdminClient

SETTLE_S = 60.0
POLL_S = 0.02
WARM_UP_TOKENS = 9000
ANSWER_TOKENS = 64
STARTS_S = 110.0
"""Two engines of 27B with their kernels compiled before, and a pool."""
ADMIN_TIMEOUT_S = 10.0
LONG_TOKENS = 100_000
MEMORY_RATIO_MAX = 1.15
"""For long prompts: of shorter ones a few states are a larger share."""


def parser(documentation: str) -> argparse.ArgumentParser:
    """Return a parser with what all scripts understand."""
    made = argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", required=True, help="a name or a folder, as for vLLM")
    made.add_argument("--engine", type=json.loads, default={}, help="arguments of vllm.LLM, JSON")
    made.add_argument("--pool", default="32GiB", help="size of the pool")
    made.add_argument("--token-ids", type=int, default=20_000, help="random ones are smaller")
    made.add_argument("--seed", type=int, default=1)
    add_results(made)
    return made


def add_results(made: argparse.ArgumentParser) -> None:
    """Add where results go."""
    made.add_argument("--json", type=Path, help="results, written anew after each row")
    made.add_argument("--no-bounds", action="store_true", help="end with 0 whatever comes out")


def counts(text: str) -> dict[int, int]:
    """Parse ``32768x5,131072``: how many of each length; one where nothing is said."""
    pairs = [part.partition("x") for part in text.split(",") if part]
    return {int(length): int(number or 1) for length, _, number in pairs}


class Prompts:
    """Random prompts: each is drawn anew, so that none is in any cache."""

    def __init__(self, seed: int, token_ids: int) -> None:
        self._chance = random.Random(seed)
        self._token_ids = token_ids

    def draw(self, num_tokens: int) -> list[int]:
        """Return a new one."""
        return [self._chance.randrange(self._token_ids) for _ in range(num_tokens)]


# ---------------------------------------------------------------- pool and replicas


def gpus_for(num_replicas: int, *, same: bool) -> list[str | None]:
    """Return a GPU for each replica, of those that CUDA_VISIBLE_DEVICES leaves; None on CPUs."""
    gpus = visible_gpus(dict(os.environ))
    if not gpus:
        return [None] * num_replicas
    if same:
        return [gpus[0]] * num_replicas
    if len(gpus) < num_replicas:
        sys.exit(f"{num_replicas} GPUs are needed and {len(gpus)} can be used: try --same-gpu")
    return list(gpus[:num_replicas])


def engine_arguments(asked: argparse.Namespace, longest: int) -> dict[str, Any]:
    """Return the arguments of every engine for prompts of at most ``longest`` tokens."""
    return {
        "model": asked.model,
        "skip_tokenizer_init": True,
        "max_model_len": longest + ANSWER_TOKENS,
        "enable_prefix_caching": True,
        **asked.engine,
    }


@contextlib.contextmanager
def running_pool(asked: argparse.Namespace) -> Generator[Path]:
    """Start a pool; give its socket."""
    with tempfile.TemporaryDirectory(prefix="millpond-") as folder:
        socket = Path(folder, "pool.sock")
        system = SystemOptions(
            model=asked.model,
            num_replicas=0,
            device="cuda" if visible_gpus(dict(os.environ)) else "cpu",
            environ=dict(os.environ),
            pool=PoolConfig(socket, parse_size(asked.pool), extent_bytes=None),
            needs_whole_pool=True,
        )
        with System(system):
            yield socket


@contextlib.contextmanager
def running(starts: dict[str, Start]) -> Generator[list[Replica]]:
    """Start engines, on one GPU one after the other: each measures the memory left to it."""
    replicas = {name: Replica(name, start) for name, start in starts.items()}

    def start_on(gpu: str | None) -> None:
        for name in [name for name, start in starts.items() if start.gpu == gpu]:
            if is_over.is_set():
                return
            say(f"starting {name}" + ("" if gpu is None else f" on GPU {gpu}"))
            replicas[name].start()

    is_over = threading.Event()
    gpus = list(dict.fromkeys(start.gpu for start in starts.values()))
    threads = ThreadPoolExecutor(len(gpus))
    try:
        for started in as_completed([threads.submit(start_on, gpu) for gpu in gpus]):
            started.result()  # the first that failed ends the others
        yield [replicas[name] for name in starts]
    finally:
        # Engines first: after Ctrl-C threads wait for those that still start, until they end.
        is_over.set()
        for replica in replicas.values():
            replica.close()
        threads.shutdown()


def start_of(
    arguments: dict[str, Any], gpu: str | None, *, name: str = "", socket: Path | None = None
) -> Start:
    """Return how to start an engine: at the pool of ``socket``, or without any connector."""
    transfer = None if socket is None else millpond_transfer(name, socket)
    return Start(arguments, gpu, transfer, sharpen=arguments.get("load_format") == "dummy")


def warm_up(replicas: Iterable[Replica], prompts: Prompts, longest: int) -> None:
    """Let each engine compile and allocate what it does only once, and load from the pool."""
    prompt = prompts.draw(min(WARM_UP_TOKENS, longest))
    for replica in replicas:
        replica.ask(prompt, max_tokens=2)


def forget(pool: "Pool", *replicas: Replica) -> None:
    """Leave nothing cached: not in the engines, not in the pool."""
    pool.settle()
    for replica in replicas:
        replica.forget()
    pool.flush()


class Pool:
    """An operator's view of a pool."""

    def __init__(self, socket: Path) -> None:
        self._admin = AdminClient.connect(str(socket), timeout_s=ADMIN_TIMEOUT_S)

    def settle(self) -> dict[str, Any]:
        """Wait until nothing is written or read; return the pool's status."""
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            status: dict[str, Any] = self._admin.status()
            if not status["pool"]["num_leases"]:
                return status
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the pool is still busy after {SETTLE_S:g} s")
            time.sleep(POLL_S)

    def switch(self, *, enabled: bool) -> None:
        """Turn the pool on or off for all replicas."""
        self._admin.switch(enabled=enabled)

    def flush(self) -> None:
        """Forget every block, once nothing is written or read."""
        self.settle()
        self._admin.flush()

    def wait_joined(self, *names: str) -> None:
        """Wait until these replicas take part."""
        deadline_s = time.monotonic() + SETTLE_S
        wanted = {(name, role) for name in names for role in ("scheduler", "worker")}
        while not wanted <= {(each["replica"], each["role"]) for each in self._clients()}:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{names} have not joined the pool")
            time.sleep(POLL_S)

    def wait_registered(self, *replicas: Replica) -> None:
        """Wait until replicas can copy from and to all of the pool: before, they miss at times."""
        num_bytes = int(self._admin.status()["service"]["memory"]["size_bytes"])
        deadline_s = time.monotonic() + SETTLE_S
        while not all(replica.is_registered(num_bytes) for replica in replicas):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the pool is not registered everywhere after {SETTLE_S:g} s")
            time.sleep(POLL_S)

    def link_gb_s(self, name: str) -> float | None:
        """Return what a replica's link gives into the GPU; without a GPU there is none."""
        for client in self._clients():
            link = client["link"]
            if client["replica"] == name and link and link["h2d_gb_s"]:
                return round(link["h2d_gb_s"], 1)
        return None

    def _clients(self) -> list[dict[str, Any]]:
        status: dict[str, Any] = self._admin.status()
        return status["service"]["clients"]


def loaded_bytes(status: dict[str, Any], name: str) -> int:
    """Return the bytes that a replica has read so far."""
    return int(status["pool"]["replicas"].get(name, {}).get("num_bytes_read", 0))


@contextlib.contextmanager
def running_pair(
    asked: argparse.Namespace,
    longest: int,
    prompts: Prompts,
    results: "Results",
    gpus: Sequence[str | None] | None = None,
) -> Generator[tuple[Replica, Replica, Pool]]:
    """Start a pool with replicas a and b, on two GPUs or, with --same-gpu, on one; warm them up.

    ``gpus`` is what each of the two sees, if it is not for --same-gpu to say.
    """
    arguments = engine_arguments(asked, longest)
    gpus = gpus_for(2, same=asked.same_gpu) if gpus is None else gpus
    with running_pool(asked) as socket:
        starts = {
            name: start_of(arguments, gpu, name=name, socket=socket)
            for name, gpu in zip("ab", gpus, strict=True)
        }
        with running(starts) as (a, b):
            pool = Pool(socket)
            pool.wait_joined("a", "b")
            pool.wait_registered(a, b)
            results.facts(a.facts)
            warm_up((a, b), prompts, longest)
            yield a, b, pool


# ---------------------------------------------------------------- results


class Results:
    """Rows and bounds of one run, in a file that is whole after each row."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._path: Path | None = asked.json
        self._no_bounds: bool = asked.no_bounds
        self._began_s = time.monotonic()
        self._rows: list[dict[str, object]] = []
        self._bounds: list[dict[str, object]] = []
        options = {name: str(value) for name, value in vars(asked).items()}
        self._data: dict[str, object] = {"options": options}
        self._frame = envelope(["python", *sys.argv], {})

    def facts(self, facts: Facts, **more: object) -> None:
        """Note what the engines say of themselves."""
        self._data["engine"] = asdict(facts) | more
        self._save()

    def say(self, **facts: object) -> None:
        """Note something about the whole run."""
        self._data |= facts

    def row(self, **row: object) -> None:
        """Add a row: one line on stdout, without its samples and spans, and the file."""
        self._rows.append(row)
        short = {k: v for k, v in row.items() if k not in ("samples_s", "spans")}
        print(json.dumps(short), flush=True)
        self._save()

    def at_most(self, name: str, value: float, most: float) -> None:
        """Check that a figure is not larger than it must be; one that is infinite is not said."""
        self._bound(name, value, f"<= {most:g}", holds=value <= most)

    def at_least(self, name: str, value: float, least: float) -> None:
        """Check that a figure is not smaller than it must be."""
        self._bound(name, value, f">= {least:g}", holds=value >= least)

    def true(self, name: str, *, holds: bool) -> None:
        """Check something that is so or not."""
        self._bound(name, None, "", holds=holds)

    def memory(self, num_tokens: int, ratio: float) -> None:
        """Check what a prompt takes in the pool, in times of its attention bytes, if it is long."""
        if num_tokens >= LONG_TOKENS:
            name = f"pool memory / attention bytes at {num_tokens}"
            self.at_most(name, ratio, MEMORY_RATIO_MAX)

    def finish(self) -> None:
        """Say what held and how long it took; end with 1 where a bound is broken."""
        broken = [str(bound["name"]) for bound in self._bounds if not bound["holds"]]
        seconds = round(time.monotonic() - self._began_s, 1)
        self._data["seconds"] = seconds
        self._save()
        print(json.dumps({"bounds": self._bounds, "seconds": seconds}))
        if broken and not self._no_bounds:
            sys.exit(f"broken: {', '.join(broken)}")

    def _bound(self, name: str, value: float | None, must: str, *, holds: bool) -> None:
        rounded = None if value is None or math.isinf(value) else round(value, 4)
        self._bounds.append({"name": name, "value": rounded, "must": must, "holds": holds})

    def _save(self) -> None:
        if self._path is not None:
            data = self._data | {"rows": self._rows, "bounds": self._bounds}
            write_json(self._path, self._frame | {"data": data})


@dataclass
class Bench:
    """Two engines on one GPU: one at a pool, and one without any connector."""

    on: Replica
    off: Replica
    pool: "Pool"
    prompts: "Prompts"
    results: Results
    clock: "Clock"
    asked: argparse.Namespace

    def forget(self) -> None:
        """Leave nothing cached."""
        forget(self.pool, self.on, self.off)


@contextlib.contextmanager
def on_and_off(asked: argparse.Namespace, *, longest: int, expected_s: float) -> Generator[Bench]:
    """Start the two engines, and end with what has been found."""
    arguments = engine_arguments(asked, longest)
    gpu = gpus_for(1, same=True)[0]
    prompts = Prompts(asked.seed, asked.token_ids)
    results = Results(asked)
    clock = Clock(STARTS_S + expected_s)
    with running_pool(asked) as socket:
        starts = {
            "on": start_of(arguments, gpu, name="on", socket=socket),
            "off": start_of(arguments, gpu),
        }
        with running(starts) as (on, off):
            pool = Pool(socket)
            pool.wait_joined("on")
            pool.wait_registered(on)
            results.facts(on.facts)
            warm_up((on, off), prompts, longest)
            yield Bench(on, off, pool, prompts, results, clock, asked)
    results.finish()


def prefill_s(num_tokens: int) -> float:
    """Return what a 27B in fp8 takes for a cold prompt on an H200, about."""
    return num_tokens / 12_000 + (num_tokens / 46_000) ** 2 * 0.5


class Clock:
    """Tells the time that a run is expected to take, and what it has taken."""

    def __init__(self, expected_s: float) -> None:
        self._began_s = time.monotonic()
        self._expected_s = expected_s
        say(f"takes about {expected_s:.0f} s, engine starts included")

    def say(self, what: str) -> None:
        """Print a line of progress."""
        spent_s = time.monotonic() - self._began_s
        say(f"[{spent_s:5.0f} of about {self._expected_s:.0f} s] {what}")


def say(what: str) -> None:
    """Print to stderr, at once."""
    print(what, file=sys.stderr, flush=True)


def median(values: Sequence[float]) -> float:
    """Return the median, to a tenth of a millisecond."""
    return round(statistics.median(values), 4)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that ``percent`` of all do not exceed, to a tenth of a millisecond."""
    ordered = sorted(values)
    return round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)], 4)


def rounded(values: Iterable[float]) -> list[float]:
    """Return seconds to a tenth of a millisecond."""
    return [round(value, 4) for value in values]
