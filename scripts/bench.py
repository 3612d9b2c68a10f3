"""Measure the daemon's lookups over its socket and write report/bench.json; `make bench`.

A daemon of its own, in a process of its own, is filled with chains of keys; then prefixes of
1,024 blocks (256k tokens) are looked up, one request at a time. Times are taken around the
call of the client, so they hold packing, both crossings of the socket and unpacking.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from millpond.cli.envelope import envelope
from millpond.model.errors import DaemonGone
from millpond.model.limits import KIB, MIB
from millpond.model.names import Coverage
from millpond.model.namespace import Namespace, PartSpec
from millpond.service.client import AdminClient, ReplicaIdentity, SchedulerClient, WorkerClient

REPORT = Path("report/bench.json")
POOL_BYTES = 256 * MIB
SLOT_BYTES = 4 * KIB
KEY_BYTES = 32
PREFIX_BLOCKS = 1024
NUM_PREFIXES = 60
NUM_WARM_UP = 200
NUM_LOOKUPS = 3000
START_TIMEOUT_S = 60.0
DAEMON_LOG = Path("build/bench-pool.log")


def main() -> int:
    """Run the measurement; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        socket_path = str(Path(folder) / "pool.sock")
        millpond = Path(sys.executable).with_name("millpond")
        size = f"{POOL_BYTES // MIB}MiB"
        with DAEMON_LOG.open("w", encoding="utf-8") as log:
            daemon = subprocess.Popen(
                [millpond, "pool", "--size", size, "--socket", socket_path],
                stdout=log,
                stderr=log,
            )
        try:
            wait_until_ready(daemon, socket_path)
            data = measure(socket_path)
        finally:
            daemon.terminate()
            daemon.wait(timeout=20)
    REPORT.parent.mkdir(exist_ok=True)
    document = envelope(["make", "bench"], data)
    REPORT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document, data)
    return 0


def wait_until_ready(daemon: subprocess.Popen[bytes], socket_path: str) -> None:
    """Return once the daemon answers; ``RuntimeError`` if it ends first or is late."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            raise RuntimeError(f"the pool ended with {daemon.returncode}: see {DAEMON_LOG}")
        try:
            AdminClient.connect(socket_path).close()
        except DaemonGone:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"the pool did not answer within {START_TIMEOUT_S:.0f} s")


def measure(socket_path: str) -> dict[str, float]:
    """Fill the pool and return the figures by name."""
    identity = ReplicaIdentity(
        replica="bench", session_key="bench", num_ranks=1, namespace=namespace()
    )
    prefixes = [chain(str(number)) for number in range(NUM_PREFIXES)]
    with (
        SchedulerClient.connect(socket_path, identity) as scheduler,
        WorkerClient.connect(socket_path, identity, rank=0) as worker,
    ):
        for keys in prefixes:
            lease = scheduler.reserve(keys, KEY_BYTES, first_block=0, parts=[[]])
            if lease.lease_id is None:
                raise RuntimeError(f"the pool could not be filled: {lease.reason}")
            worker.finish([lease.lease_id], ok=True)
        cut = len(prefixes[0]) // 2
        partial = [keys[:cut] + chain("other", PREFIX_BLOCKS // 2) for keys in prefixes]
        absent = [chain(f"absent {number}") for number in range(NUM_PREFIXES)]
        data = {"num_keys": float(NUM_PREFIXES * PREFIX_BLOCKS)}
        data |= lookups(scheduler, "hit", prefixes, PREFIX_BLOCKS)
        data |= lookups(scheduler, "half_hit", partial, PREFIX_BLOCKS // 2)
        data |= lookups(scheduler, "miss", absent, 0)
        worker.arena.close()
    return data


def lookups(
    scheduler: SchedulerClient, name: str, prefixes: list[bytes], num_blocks: int
) -> dict[str, float]:
    """Time lookups of ``prefixes`` in turn, checking each answer."""
    times_us: list[float] = []
    for number in range(NUM_WARM_UP + NUM_LOOKUPS):
        keys = prefixes[number % len(prefixes)]
        start_ns = time.perf_counter_ns()
        found = scheduler.lookup(keys, KEY_BYTES)
        times_us.append((time.perf_counter_ns() - start_ns) / 1000)
        if found.num_blocks != num_blocks:
            raise RuntimeError(f"{name}: {found.num_blocks} blocks found, not {num_blocks}")
    cuts = statistics.quantiles(times_us[NUM_WARM_UP:], n=100)
    prefix = f"lookup_{PREFIX_BLOCKS}_keys_{name}"
    return {f"{prefix}_p50_us": round(cuts[49], 1), f"{prefix}_p99_us": round(cuts[98], 1)}


def chain(tag: str, num_blocks: int = PREFIX_BLOCKS) -> bytes:
    """Return the packed keys of one prefix."""
    keys = [hashlib.sha256(f"{tag} {number}".encode()).digest() for number in range(num_blocks)]
    return b"".join(keys)


def namespace() -> Namespace:
    """Return the namespace of a small attention-only model."""
    return Namespace(
        model="bench",
        revision="",
        weights="",
        dtype="bfloat16",
        kv_cache_dtype="auto",
        quantization="",
        block_tokens=256,
        engine_block_tokens=16,
        tensor_parallel_size=1,
        attention_backend="",
        layout="",
        hash_algorithm="sha256",
        hash_seed="",
        engine="",
        engine_version="",
        parts=(PartSpec("pages", Coverage.EVERY, SLOT_BYTES),),
    )


def show(document: dict[str, object], data: dict[str, float]) -> None:
    """Print the figures with the machine and the commit that they hold for."""
    table = Table(title=f"commit {document['commit']}", caption=str(document["machine"]))
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in data.items():
        table.add_row(name, f"{value:,.1f}".removesuffix(".0"))
    console = Console()
    console.print(table)
    console.print(f"written to {REPORT}")


if __name__ == "__main__":
    sys.exit(main())
