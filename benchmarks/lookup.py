"""Longest prefix of 1,024 keys over the socket, beside a bare echo of the same bytes.

    python benchmarks/lookup.py [--keys 1000000] [--seconds 5] [--clients 1]

A daemon in a process of its own holds ``--keys`` blocks; one client looks up stored, half
stored and absent prefixes in turn, and between them sends equally long messages to a process
that answers each with as many bytes as a reply has. Both run in the same seconds, so that
their ratio holds on a machine that others use too. ``--clients`` adds others that look up all
the time. Prints one line of JSON.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

from figures import percentiles

from millpond.model.limits import MIB, POOL_BYTES_MIN
from millpond.model.names import Coverage
from millpond.model.namespace import Namespace, PartSpec
from millpond.service import client as client_module
from millpond.service.client import AdminClient, ReplicaIdentity, SchedulerClient, WorkerClient
from millpond.service.server import ServeOptions, serve

PREFIX_KEYS = 1024
KEY_BYTES = 32
SLOT_BYTES = 4096
FIRST_S = 60.0
NAMESPACE = Namespace(
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


def chain(tag: str, num_keys: int = PREFIX_KEYS) -> bytes:
    """Return the keys of one prefix; cheap, as a million are made."""
    return b"".join(
        hashlib.blake2b(f"{tag}/{i}".encode(), digest_size=KEY_BYTES).digest()
        for i in range(num_keys)
    )


def run_daemon(socket_path: str, size_bytes: int, ready: Event) -> None:
    """Serve in this process."""
    options = ServeOptions(socket_path=socket_path, size_bytes=size_bytes)
    serve(options, on_ready=lambda _: ready.set())


def run_echo(path: str, ready: Event, request_bytes: int, reply: bytes) -> None:
    """Answer each ``request_bytes`` with ``reply``, as barely as Python can."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    ready.set()
    connected, _ = listener.accept()
    buffer = bytearray(256 * 1024)
    missing = request_bytes
    while num_bytes := connected.recv_into(buffer):
        missing -= num_bytes
        if not missing:
            connected.sendall(reply)
            missing = request_bytes


def run_neighbour(socket_path: str, number: int, num_prefixes: int, stop: Event) -> None:
    """Look up without pause, as another replica would."""
    identity = replica(f"neighbour-{number}")
    prefixes = [chain(f"{i % num_prefixes}") for i in range(number, number + 16)]
    with SchedulerClient.connect(socket_path, identity, timeout_s=FIRST_S) as client:
        while not stop.is_set():
            for keys in prefixes:
                client.lookup(keys, KEY_BYTES)


def replica(name: str) -> ReplicaIdentity:
    """Return who a client is."""
    return ReplicaIdentity(replica=name, session_key=name, num_ranks=1, namespace=NAMESPACE)


def fill(socket_path: str, num_prefixes: int) -> None:
    """Commit ``num_prefixes`` prefixes; nothing is copied."""
    me = replica("filler")
    with (
        SchedulerClient.connect(socket_path, me) as scheduler,
        WorkerClient.connect(socket_path, me, rank=0) as worker,
    ):
        for i in range(num_prefixes):
            lease = scheduler.reserve(chain(f"{i}"), KEY_BYTES, first_block=0, parts=[()])
            if lease.lease_id is None:
                raise RuntimeError(f"prefix {i} was not reserved: {lease.reason}")
            worker.finish([lease.lease_id], ok=True)
        last = chain(f"{num_prefixes - 1}")
        while scheduler.lookup(last, KEY_BYTES).num_blocks < PREFIX_KEYS:
            time.sleep(0.01)  # the worker's connection is behind the scheduler's
        worker.arena.close()


def measure(
    client: SchedulerClient, echo: socket.socket, num_prefixes: int, seconds: float
) -> dict[str, object]:
    """Time lookups and echoes turn by turn for ``seconds``."""
    reply_bytes = 64
    absent = chain("absent")
    cases: list[tuple[str, bytes, int]] = []
    for i in range(0, num_prefixes, max(1, num_prefixes // 64)):
        stored = chain(f"{i}")
        half = stored[: len(stored) // 2] + absent[len(stored) // 2 :]
        cases += [("hit", stored, PREFIX_KEYS), ("half", half, PREFIX_KEYS // 2)]
        cases += [("miss", absent, 0)]
    times: dict[str, list[int]] = {"hit": [], "half": [], "miss": [], "echo": []}
    message = bytes(len(absent) + 64)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for name, keys, num_blocks in cases:
            start = time.perf_counter_ns()
            found = client.lookup(keys, KEY_BYTES)
            times[name].append(time.perf_counter_ns() - start)
            if found.num_blocks != num_blocks:
                raise RuntimeError(f"{name}: {found.num_blocks} blocks instead of {num_blocks}")
            start = time.perf_counter_ns()
            echo.sendall(message)
            missing = reply_bytes
            while missing:
                missing -= len(echo.recv(missing))
            times["echo"].append(time.perf_counter_ns() - start)
    result: dict[str, object] = {name: percentiles(values) for name, values in times.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    result["hit_to_echo_ratio"] = round(medians["hit"] / medians["echo"], 2)
    result["num_lookups_each"] = len(times["hit"])
    return result


def main() -> None:
    """Start everything, measure, and stop everything."""
    client_module.REQUEST_TIMEOUT_S = FIRST_S  # a slow answer is a figure here, not a miss
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=1)
    options = parser.parse_args()
    num_prefixes = max(1, options.keys // PREFIX_KEYS)
    size_bytes = max(POOL_BYTES_MIN, num_prefixes * PREFIX_KEYS * SLOT_BYTES + 64 * MIB)
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    processes: list[multiprocessing.process.BaseProcess] = []

    def start(target: object, *args: object) -> None:
        process = context.Process(target=target, args=args, daemon=True)  # type: ignore[arg-type]
        process.start()
        processes.append(process)

    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        path, echo_path = str(Path(folder) / "pool.sock"), str(Path(folder) / "echo.sock")
        ready, echo_ready = context.Event(), context.Event()
        start(run_daemon, path, size_bytes, ready)
        start(run_echo, echo_path, echo_ready, PREFIX_KEYS * KEY_BYTES + 64, bytes(64))
        try:
            if not (ready.wait(FIRST_S) and echo_ready.wait(FIRST_S)):
                raise RuntimeError("the daemon did not start")
            with AdminClient.connect(path) as admin:
                empty_bytes = resident_bytes(admin)
            began = time.monotonic()
            fill(path, num_prefixes)
            fill_s = time.monotonic() - began
            for number in range(1, options.clients):
                start(run_neighbour, path, number, num_prefixes, stop)
            with (
                SchedulerClient.connect(path, replica("measured")) as client,
                socket.socket(socket.AF_UNIX) as echo,
                AdminClient.connect(path) as admin,
            ):
                echo.connect(echo_path)
                measure(client, echo, num_prefixes, 0.5)  # warms up
                result = measure(client, echo, num_prefixes, options.seconds)
                result |= {"num_keys": num_prefixes * PREFIX_KEYS, "clients": options.clients}
                result |= {"fill_s": round(fill_s, 1), "cores": len(os.sched_getaffinity(0))}
                result |= {"daemon_empty_rss_bytes": empty_bytes}
                result |= {"daemon_rss_bytes": resident_bytes(admin)}
            print(json.dumps(result))
        finally:
            stop.set()
            for process in reversed(processes):  # the daemon last
                process.join(0 if process in processes[:2] else 10)
                process.terminate()
                process.join(10)


def resident_bytes(admin: AdminClient) -> int:
    """Return the daemon's memory beside the arena."""
    service = admin.status()["service"]
    assert isinstance(service, dict)
    status = Path(f"/proc/{service['pid']}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    main()
