"""A large pool: how soon after its start a request is served from it, and when all of it is ready.

    python benchmarks/gpu/pool_start.py --model MODEL [--same-gpu] [--pool 100GiB]
                                        [--engine JSON] [--prompt 8192] [--json PATH]

First what the machine needs for memory of that size without anything of ours at work: parallel
touch of a shared segment, then its registration with CUDA in one call. Beside it, for the record,
what a registration takes where the pages are not mapped in the process yet, as in every replica,
piece by piece; and how long it takes to map them first, and then to register. Then two replicas are
started, which find no pool, and after them the pool, as a daemon that is started anew beside
running engines: the time counts from there. New prompts are asked of a and then of b, until b
has loaded one ("served"). "Ready" is when the kernel has given all memory and both replicas have
registered all of it; nothing is asked any more by then, or the last second would be a guess.

With --plain no engines are started: two processes with nothing but a CUDA context register the
pool, for machines or GPUs without room for the model. Only "ready" is measured then.

A 27B hybrid in fp8 on one or two H200s takes about three minutes: one for the machine, 1.3 for the
start of the engines, 0.5 for the pool; with --plain 1.5. Ends with 1 where a request is served
later than 10 s after the start, or where ready takes more than 1.2 times the touch and the
registration.
"""

import ctypes
import multiprocessing as mp
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from engines import Replica, end, receive
from runs import (
    Clock,
    Pool,
    Prompts,
    Results,
    engine_arguments,
    gpus_for,
    loaded_bytes,
    parser,
    running,
    say,
    start_of,
    warm_up,
)

from millpond.arena.arena import Arena
from millpond.arena.touch import touch
from millpond.config import PoolConfig
from millpond.config.values import parse_size
from millpond.launch.resources import visible_gpus
from millpond.launch.system import System, SystemOptions
from millpond.model.limits import ARENA_HEADER_BYTES, REGISTERED_BYTES, SLOT_ALIGNMENT_BYTES
from millpond.pool.pool import default_extent_bytes
from millpond.service.client import AdminClient

SERVED_S_MAX = 10.0
READY_RATIO_MAX = 1.2
READY_S_MAX = 300.0
POLL_S = 0.05
MADV_POPULATE_READ = 22
"""Linux 5.14; not in Python's mmap module before 3.15."""
REQUEST_EVERY_S = 1.0


def measure_machine(size_bytes: int) -> dict[str, float]:
    """Touch a segment of this size and register it; return the seconds of each way."""
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    # In a process of its own, which ends after it: nobody else gets its memory before.
    process = context.Process(target=_measure_here, args=(theirs, size_bytes), daemon=True)
    process.start()
    theirs.close()
    try:
        seconds: dict[str, float] = receive(pipe, READY_S_MAX, of="the touch and registration")
    finally:
        end(process)
    return {name: round(value, 2) for name, value in seconds.items()}


def _measure_here(measured: Connection, size_bytes: int) -> None:
    measured.send(_touched_and_registered(size_bytes))


def _touched_and_registered(size_bytes: int) -> dict[str, float]:
    extent_bytes = default_extent_bytes(size_bytes)
    arena, fd = Arena.create(size_bytes=size_bytes, extent_bytes=extent_bytes, epoch=1)
    began_s = time.perf_counter()
    touch(arena, fd, stop=threading.Event(), on_progress=lambda _: None)
    seconds = {"touch_s": time.perf_counter() - began_s, "register_s": 0.0}
    if not visible_gpus(os.environ):
        return seconds
    import torch

    torch.zeros(1, device="cuda")
    seconds["register_s"] = _registered(arena, size_bytes)
    for name, is_mapped in (("unmapped", False), ("mapped", True)):
        other = Arena.attach(fd, expected_epoch=1)
        began_s = time.perf_counter()
        if is_mapped:
            _map_pages(other)
            seconds["map_s"] = time.perf_counter() - began_s
        seconds[f"register_{name}_s"] = _registered(other, REGISTERED_BYTES)
        other.close()
    return seconds


def _registered(arena: Arena, piece_bytes: int) -> float:
    """Register a segment in pieces of so many bytes; return the seconds. Undone at the end."""
    from millpond.transfer import cudart

    began_s = time.perf_counter()
    for start in range(0, arena.size_bytes, piece_bytes):
        num_bytes = min(piece_bytes, arena.size_bytes - start)
        cudart.register_host(arena.address + start, num_bytes)
    register_s = time.perf_counter() - began_s
    for start in range(0, arena.size_bytes, piece_bytes):
        cudart.unregister_host(arena.address + start)
    return register_s


def _map_pages(arena: Arena) -> None:
    """Map what is there already: sixteen pages with each fault, where a driver's maps one."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.madvise(arena.address, arena.size_bytes, MADV_POPULATE_READ):
        say(f"pages could not be mapped at once: {os.strerror(ctypes.get_errno())}")


class PlainContext:
    """A process with a CUDA context that registers a pool as a worker does, and nothing else."""

    def __init__(self, gpu: str | None) -> None:
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_be_plain, args=(theirs, gpu), daemon=True)
        self._process.start()
        theirs.close()
        receive(self._pipe, READY_S_MAX, of="a CUDA context")
        self._is_ready = False

    def begin(self, segment: Path, epoch: int) -> None:
        """Register the pool's memory: another process's descriptor, below /proc."""
        self._pipe.send((segment, epoch))

    def is_registered(self, num_bytes: int) -> bool:
        """Say whether it has registered everything, which is ``num_bytes``."""
        self._is_ready = self._is_ready or (self._pipe.poll() and self._pipe.recv() == num_bytes)
        return self._is_ready

    def close(self) -> None:
        """End the process."""
        end(self._process)


def _be_plain(asked: Connection, gpu: str | None) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    import torch

    if gpu is None:
        from millpond.transfer import CpuCopyEngine

        device = CpuCopyEngine()
    else:
        from millpond.transfer.cuda import CudaDevice
        from millpond.transfer.streams import StreamCopyEngine

        device = StreamCopyEngine(CudaDevice(torch.device("cuda", 0)))
        torch.zeros(1, device="cuda")
    asked.send("started")
    segment, epoch = asked.recv()
    with segment.open("r+b") as file:
        arena = Arena.attach(file.fileno(), expected_epoch=epoch)
    began_s = time.perf_counter()
    device.adopt(arena)
    for quarter in range(1, 5):
        while not device.is_ready(arena.size_bytes * quarter // 4):
            time.sleep(POLL_S)
        say(f"{quarter} of 4 quarters registered after {time.perf_counter() - began_s:.1f} s")
    asked.send(arena.size_bytes)
    threading.Event().wait()


@dataclass(frozen=True)
class Started:
    """A daemon that has just been started. ``segment`` is its memory, below /proc."""

    pool: Pool
    segment: Path
    epoch: int
    size_bytes: int
    began_s: float

    @property
    def is_taken(self) -> bool:
        """Whether the kernel has given all memory, but for what the header leaves unused."""
        found = self.segment.stat()
        return found.st_blocks * 512 >= found.st_size - ARENA_HEADER_BYTES

    @property
    def since_s(self) -> float:
        """Seconds since the daemon was started."""
        return time.perf_counter() - self.began_s


def start_pool(stack: ExitStack, model: str, socket: Path, size_bytes: int) -> Started:
    """Start the daemon, and wait until it serves."""
    options = SystemOptions(
        model=model,
        num_replicas=0,
        device="cuda" if visible_gpus(os.environ) else "cpu",
        environ=dict(os.environ),
        pool=PoolConfig(socket, size_bytes, extent_bytes=None),
    )
    began_s = time.perf_counter()
    system = stack.enter_context(System(options))
    with AdminClient.connect(str(socket)) as admin:
        epoch = admin.welcome.epoch
    return Started(Pool(socket), _segment_of(system), epoch, size_bytes, began_s)


def _segment_of(system: System) -> Path:
    for pid in system.pool_process.pids():
        for path in Path(f"/proc/{pid}/fd").iterdir():
            if str(path.readlink()).startswith("/memfd:millpond-arena"):
                return path
    raise RuntimeError("the daemon has no segment")


def follow(
    started: Started,
    holders: Sequence[Replica | PlainContext],
    ask: "Asking | None",
) -> dict[str, float | None]:
    """Wait until the pool is ready everywhere and has served. Return when what was so."""
    taken_s: float | None = None
    ready_s: float | None = None
    served_s: float | None = None
    while True:
        if taken_s is None and started.is_taken:
            taken_s = round(started.since_s, 2)
            say(f"memory taken after {taken_s} s")
        if served_s is None and ask is not None and ask.is_due() and ask.served():
            served_s = round(started.since_s, 2)
            say(f"served after {served_s} s")
        registered = [holder.is_registered(started.size_bytes) for holder in holders]
        if ready_s is None and taken_s is not None and all(registered):
            ready_s = round(started.since_s, 2)
        if ready_s is not None and (ask is None or served_s is not None):
            return {"served_s": served_s, "taken_s": taken_s, "ready_s": ready_s}
        if started.since_s > READY_S_MAX:
            raise RuntimeError(f"not ready after {READY_S_MAX:g} s")
        time.sleep(POLL_S)


class Asking:
    """Asks new prompts of a, then of b, once a second at most; keeps all times."""

    def __init__(
        self, replicas: Sequence[Replica], pool: Pool, prompts: Prompts, num_tokens: int
    ) -> None:
        self._a, self._b = replicas
        self._pool = pool
        self._prompts = prompts
        self._num_tokens = num_tokens
        self._next_s = 0.0
        self.rows: list[dict[str, float | bool]] = []

    def is_due(self) -> bool:
        """Say whether it is time for the next one."""
        return time.perf_counter() >= self._next_s

    def served(self) -> bool:
        """Ask; return whether b has loaded the prompt."""
        self._next_s = time.perf_counter() + REQUEST_EVERY_S
        prompt = self._prompts.draw(self._num_tokens)
        before = loaded_bytes(self._pool.settle(), "b")
        cold = self._a.ask(prompt)
        moved = self._b.ask(prompt)
        is_served = loaded_bytes(self._pool.settle(), "b") > before
        self.rows.append(
            {
                "a_s": round(cold.ttft_s, 4),
                "b_s": round(moved.ttft_s, 4),
                "served": is_served,
            }
        )
        return is_served


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.set_defaults(pool="100GiB")
    made.add_argument("--prompt", type=int, default=8192)
    made.add_argument("--plain", action="store_true", help="no engines: CUDA contexts")
    made.add_argument("--same-gpu", action="store_true")
    asked = made.parse_args()
    size_bytes = parse_size(asked.pool) // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES
    prompts = Prompts(asked.seed, asked.token_ids)
    results = Results(asked)
    clock = Clock(60 if asked.plain else 180)
    gpus = gpus_for(2, same=asked.same_gpu)
    clock.say("the machine")
    machine = measure_machine(size_bytes)
    machine_s = machine["touch_s"] + machine["register_s"]
    results.row(what="machine", bytes=size_bytes, **machine)
    with ExitStack() as stack:
        socket = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-")), "s")
        replicas: list[Replica] = []
        plains: list[PlainContext] = []
        if asked.plain:
            plains = [PlainContext(gpu) for gpu in gpus]
            for plain in plains:
                stack.callback(plain.close)
        else:
            arguments = engine_arguments(asked, asked.prompt)
            starts = {
                name: start_of(arguments, gpu, name=name, socket=socket)
                for name, gpu in zip("ab", gpus, strict=True)
            }
            replicas = stack.enter_context(running(starts))
            results.facts(replicas[0].facts)
            warm_up(replicas, prompts, asked.prompt)
        clock.say("the pool")
        started = start_pool(stack, asked.model, socket, size_bytes)
        serving_s = round(started.since_s, 2)
        for plain in plains:
            plain.begin(started.segment, started.epoch)
        ask = Asking(replicas, started.pool, prompts, asked.prompt) if replicas else None
        times = follow(started, [*replicas, *plains], ask)
        results.row(
            what="pool",
            bytes=size_bytes,
            serving_s=serving_s,
            **times,
            ready_ratio=round((times["ready_s"] or 0.0) / machine_s, 3),
            requests=[] if ask is None else ask.rows,
        )
    ready_ratio = (times["ready_s"] or 0.0) / machine_s
    results.at_most("ready / (touch + registration)", ready_ratio, READY_RATIO_MAX)
    if times["served_s"] is not None:
        results.at_most("first request served, s", times["served_s"], SERVED_S_MAX)
    results.finish()


if __name__ == "__main__":
    main()
