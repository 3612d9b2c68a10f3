"""What the router costs: the same requests to a scripted replica directly, and through it.

    python benchmarks/router.py [--rounds 6] [--seconds 4]

The replica streams an event a token, without computing anything; router, replica and clients
are processes of their own, the router on a core of its own where there are two. In turns
(direct, router, router, direct): 16 streams at once with prompts of about 1,000 tokens; one
stream with a prompt of about 128,000; 40 streams that make 2,000 tokens a second together.
Prints one line of JSON: medians, their differences, and the router's CPU time a token and a
long prompt.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EVENT = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":'
    b'[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
START_S = 60.0
BYTES_PER_TOKEN = 4
NUM_STREAMS = 16
NUM_TOKENS = 20
STREAM_RATE = 50
SHORT_TOKENS = 1_000
LONG_TOKENS = 128_000
NUM_LONG = 5
RATE_STREAMS = 40
RATE_PER_S = 2_000


# ---------------------------------------------------------------- the replica


async def replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Stream as many tokens a second as the target asks for: /NUM/PER_SECOND."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(x[15:]) for x in lines if x.startswith(b"content-length:")), 0)
            await reader.readexactly(length)
            if lines[0].startswith(b"get"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                continue
            num, rate = (int(x) for x in lines[0].split()[1].rpartition(b"?")[2].split(b"-"))
            writer.write(HEAD + CHUNK)
            started = time.perf_counter()
            for i in range(1, num):
                await asyncio.sleep(max(0.0, started + i / rate - time.perf_counter()))
                writer.write(CHUNK)
            writer.write(END)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve_replica() -> None:
    """Serve at a free port, and print it."""
    server = await asyncio.start_server(replica, "127.0.0.1", 0, limit=2**20)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---------------------------------------------------------------- clients


@dataclass(frozen=True)
class Answer:
    """Seconds to the first event and to the end, and how many events came."""

    ttft_s: float
    e2el_s: float
    num_events: int


class Client:
    """One connection that is kept, as cheap as Python can make it: it parses nothing."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> None:
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection(
            "127.0.0.1", self._port, limit=2**20
        )

    def close(self) -> None:
        """End the connection."""
        self._writer.close()

    async def ask(self, body: bytes, num_tokens: int, rate: int) -> Answer:
        """Return one answer."""
        started = time.perf_counter()
        self._writer.write(
            b"POST /v1/completions?%d-%d HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
            % (num_tokens, rate, len(body))
            + body
        )
        seen, first_s = b"", None
        num_events = 0
        while not seen.endswith(END):
            data = await self._reader.read(65_536)
            if not data:
                raise RuntimeError("the connection ended")
            num_events += data.count(b"data: ")
            if first_s is None and num_events:
                first_s = time.perf_counter() - started
            seen = (seen + data)[-8:]
        assert first_s is not None
        return Answer(first_s, time.perf_counter() - started, num_events)


def prompt(num_tokens: int, number: int) -> bytes:
    """Return a body with a prompt that no other one begins with."""
    text = f"{number:08d} " + "word" * (num_tokens * BYTES_PER_TOKEN // 4)
    return json.dumps({"model": "m", "prompt": text, "stream": True}).encode()


class Numbers:
    """Numbers of prompts: none comes twice."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        """Return the next one."""
        self._last += 1
        return self._last


async def concurrent(port: int, seconds: float, numbers: Numbers) -> list[float]:
    """Return the TTFTs of NUM_STREAMS clients that ask again and again, not all at once."""
    end = time.perf_counter() + seconds

    async def one(number: int) -> list[float]:
        chance = random.Random(number)
        client = Client(port)
        await client.open()
        await asyncio.sleep(chance.random() * NUM_TOKENS / STREAM_RATE)
        found: list[float] = []
        while time.perf_counter() < end:
            body = prompt(SHORT_TOKENS, numbers.next())
            num_tokens = chance.randint(NUM_TOKENS // 2, NUM_TOKENS * 3 // 2)
            found.append((await client.ask(body, num_tokens, STREAM_RATE)).ttft_s)
        client.close()
        return found

    found = await asyncio.gather(*(one(i) for i in range(NUM_STREAMS)))
    return [ttft_s for each in found for ttft_s in each]


async def long_prompts(port: int, num_prompts: int, numbers: Numbers) -> list[float]:
    """Return the TTFTs of long prompts, one after the other."""
    client = Client(port)
    await client.open()
    found = [
        (await client.ask(prompt(LONG_TOKENS, numbers.next()), 2, 100)).ttft_s
        for _ in range(num_prompts)
    ]
    client.close()
    return found


async def throughput(port: int, seconds: float, numbers: Numbers) -> float:
    """Return tokens a second of RATE_STREAMS streams that begin at once."""
    rate = RATE_PER_S // RATE_STREAMS
    clients = [Client(port) for _ in range(RATE_STREAMS)]
    await asyncio.gather(*(client.open() for client in clients))
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.ask(prompt(SHORT_TOKENS, numbers.next()), round(rate * seconds), rate)
            for client in clients
        )
    )
    elapsed = time.perf_counter() - started
    for client in clients:
        client.close()
    return sum(answer.num_events for answer in answers) / elapsed


# ---------------------------------------------------------------- processes


def start(argv: Sequence[str], cores: set[int]) -> subprocess.Popen[str]:
    """Start a process on some cores."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(process.pid, cores)
    return process


def first_line(process: subprocess.Popen[str]) -> str:
    """Return the first line that a process prints."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{process.args} ended")
    return line


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process's threads have used."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


async def wait_ready(port: int) -> None:
    """Wait until the router passes requests on."""
    deadline = time.monotonic() + START_S
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        is_ready = (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
        if is_ready:
            return
        if time.monotonic() > deadline:
            raise RuntimeError("the router found no replica")
        await asyncio.sleep(0.1)


# ---------------------------------------------------------------- measuring


class Samples:
    """What was measured, by way (direct or router), and the router's CPU time."""

    def __init__(self) -> None:
        self.ttft: dict[str, list[float]] = {"direct": [], "router": []}
        self.long_ttft: dict[str, list[float]] = {"direct": [], "router": []}
        self.rate: dict[str, list[float]] = {"direct": [], "router": []}
        self.token_cpu_s: list[float] = []
        self.long_cpu_s: list[float] = []

    def figures(self) -> dict[str, float]:
        """Return the figures to store."""
        found: dict[str, float] = {}
        for name, samples in (("ttft_16", self.ttft), ("ttft_128k", self.long_ttft)):
            medians = {way: 1e3 * statistics.median(values) for way, values in samples.items()}
            for way, value in medians.items():
                found[f"router_{name}_{way}_ms"] = round(value, 3)
            found[f"router_{name}_overhead_ms"] = round(medians["router"] - medians["direct"], 3)
        rates = {way: statistics.median(values) for way, values in self.rate.items()}
        found |= {f"router_tokens_per_s_{way}": round(rate, 1) for way, rate in rates.items()}
        found["router_throughput_ratio"] = round(rates["router"] / rates["direct"], 4)
        found["router_cpu_us_per_token"] = round(1e6 * statistics.median(self.token_cpu_s), 1)
        found["router_cpu_ms_per_128k_prompt"] = round(1e3 * statistics.median(self.long_cpu_s), 2)
        found["router_num_ttft_samples"] = len(self.ttft["router"])
        return found


async def measure(ports: dict[str, int], router_pid: int, rounds: int, seconds: float) -> Samples:
    """Measure each way in turns, after a round that does not count."""
    await wait_ready(ports["router"])
    numbers = Numbers()
    for port in ports.values():
        await concurrent(port, 1.0, numbers)
        await long_prompts(port, 2, numbers)
    samples = Samples()
    for i in range(rounds):
        for way in ("direct", "router") if i % 2 == 0 else ("router", "direct"):
            samples.ttft[way] += await concurrent(ports[way], seconds, numbers)
            used = [cpu_s(router_pid)]
            samples.long_ttft[way] += await long_prompts(ports[way], NUM_LONG, numbers)
            used.append(cpu_s(router_pid))
            samples.rate[way].append(await throughput(ports[way], seconds, numbers))
            used.append(cpu_s(router_pid))
            if way == "router":
                samples.long_cpu_s.append((used[1] - used[0]) / NUM_LONG)
                samples.token_cpu_s.append((used[2] - used[1]) / (RATE_PER_S * seconds))
    return samples


def main() -> None:
    """Start all, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case in a round")
    parser.add_argument("--policy", default="cost")
    parser.add_argument("--serve-replica", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_replica:
        asyncio.run(serve_replica())
        return
    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[:-1]) or set(cores)
    os.sched_setaffinity(0, others)
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="mp-") as folder:
        try:
            processes.append(start([sys.executable, __file__, "--serve-replica"], others))
            direct = int(first_line(processes[0]))
            argv = [sys.executable, "-m", "millpond.cli", "router", "--port", "0"]
            argv += ["--replica", f"a=http://127.0.0.1:{direct}", "--policy", options.policy]
            argv += ["--pool-socket", f"{folder}/none", "--admin-socket", f"{folder}/router"]
            processes.append(start([*argv, "--access-log", f"{folder}/log"], {cores[-1]}))
            url = first_line(processes[1]).removeprefix("serving at ")
            ports = {"direct": direct, "router": int(url.rpartition(":")[2])}
            samples = asyncio.run(measure(ports, processes[1].pid, options.rounds, options.seconds))
        finally:
            for process in processes:
                process.terminate()
                process.wait(10)
    print(json.dumps(samples.figures()))


if __name__ == "__main__":
    main()
