"""The same moved requests with Millpond and with other caches, interleaved request by request.

    python benchmarks/gpu/rivals.py --model MODEL --rival lmcache,vllm-fs [--engine JSON]
                                    [--lengths 32768,131072] [--prompts 1] [--repeats 5]
                                    [--hybrid-block 784] [--rival-size 64GiB] [--json PATH]
                                    [--alone]

Pairs of replicas: Millpond's on the first GPU, the other cache's on the second one, each
pair on one GPU. With one GPU, with two other caches, or with --alone, one pair runs after the
other, and the same prompts are not interleaved. Replica a of each pair computes a prompt; then b,
--repeats times: forgets its own prefixes, asks (moved), asks again (local). For vllm-fs b also
forgets what its connector keeps in memory of its own, or from the second time on nothing would be
moved.

The other caches are set up as their documentation says (``millpond.launch.rivals``): LMCache's
multiprocess server with one block a step for a hybrid, vLLM's tiering over files in shared
memory. Beside the times: the memory that the prompt takes in the pool and in the other cache,
and the bytes of its attention pages. Of the pool's memory what is spare is told apart: states
that nobody needs to resume the prompt at its end, and whose room the next states take.

A 27B hybrid in fp8 with two H200s takes about four minutes with one other cache (1.5 for the
start of the engines, 0.5 for 32k, 1.5 for 128k); on one GPU with both it takes seven. Ends with 1
where Millpond is not ahead, where its tokens differ, or where a prompt of 100,000 tokens or more
takes more than 1.15 times its attention bytes.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from engines import Answer, Facts, Replica, Start
from runs import (
    STARTS_S,
    Clock,
    Pool,
    Prompts,
    Results,
    engine_arguments,
    gpus_for,
    loaded_bytes,
    median,
    parser,
    prefill_s,
    rounded,
    running,
    running_pool,
    say,
    start_of,
    warm_up,
)

from millpond.config.values import parse_size
from millpond.launch.process import GuardedProcess, ProcessSpec
from millpond.launch.resources import visible_gpus
from millpond.launch.rivals import (
    RIVALS,
    VLLM_FS,
    Lmcache,
    Rival,
    RivalOptions,
    check_rival,
    make_rival,
)

READY_S = 120.0
QUIET_S = 1.0
SETTLE_S = 60.0


@dataclass
class Pair:
    """Two replicas that share a cache. ``used_bytes`` waits until all is written.

    ``slots`` says what the bytes are for, and ``spare_bytes`` how many are of use to nobody any
    more, where the cache can tell.
    """

    cache: str
    a: Replica
    b: Replica
    used_bytes: Callable[[], int]
    spare_bytes: Callable[[], int] = lambda: 0
    slots: Callable[[], object] = lambda: None
    forgets_connector: bool = False
    cold: list[Answer] = field(default_factory=list)
    moved: list[Answer] = field(default_factory=list)
    local: list[Answer] = field(default_factory=list)
    added_bytes: list[int] = field(default_factory=list)
    added_spare_bytes: list[int] = field(default_factory=list)
    same_tokens: list[bool] = field(default_factory=list)

    def begin(self, prompt: Sequence[int]) -> None:
        """Have a compute a prompt."""
        before, spare_before = self.used_bytes(), self.spare_bytes()
        self.cold.append(self.a.ask(prompt))
        self.added_bytes.append(self.used_bytes() - before)
        self.added_spare_bytes.append(self.spare_bytes() - spare_before)

    def move(self, prompt: Sequence[int]) -> None:
        """Have b answer it twice: moved, and from its own memory."""
        self.b.forget(with_connector=self.forgets_connector)
        self.moved.append(self.b.ask(prompt))
        self.local.append(self.b.ask(prompt))
        expected = self.cold[-1].tokens
        self.same_tokens += [each[-1].tokens == expected for each in (self.moved, self.local)]
        self.used_bytes()

    def take_row(self, length: int) -> dict[str, object]:
        """Return what was measured since the last row."""
        row: dict[str, object] = {
            "cache": self.cache,
            "prompt_tokens": length,
            "cold_s": rounded(answer.ttft_s for answer in self.cold),
            "moved_s": rounded(answer.ttft_s for answer in self.moved),
            "local_s": rounded(answer.ttft_s for answer in self.local),
            "moved_median_s": median([answer.ttft_s for answer in self.moved]),
            "cached_tokens": [answer.cached_tokens for answer in self.moved],
            "added_bytes": self.added_bytes,
            "added_spare_bytes": self.added_spare_bytes,
            "all_slots": self.slots(),
            "same_tokens": self.same_tokens,
        }
        self.cold, self.moved, self.local = [], [], []
        self.added_bytes, self.added_spare_bytes, self.same_tokens = [], [], []
        return row


@contextlib.contextmanager
def millpond_pair(
    asked: argparse.Namespace, arguments: dict[str, Any], gpu: str | None
) -> Generator[Pair]:
    """Start a pool and two replicas at it."""
    with running_pool(asked) as socket:
        starts = {name: start_of(arguments, gpu, name=name, socket=socket) for name in ("a", "b")}
        with running(starts) as (a, b):
            pool = Pool(socket)
            pool.wait_joined("a", "b")
            pool.wait_registered(a, b)

            def used_bytes() -> int:
                return int(pool.settle()["pool"]["bytes"]["committed"])

            def spare_bytes() -> int:
                sizes = pool.settle()["pool"]["slot_sizes"]
                return sum(int(size["num_spare"] * size["slot_bytes"]) for size in sizes)

            def slots() -> list[dict[str, object]]:
                return [
                    {
                        "slot_bytes": size["slot_bytes"],
                        "holds_states": size["holds_states"],
                        "committed": size["num_slots"]["committed"],
                        "spare": size["num_spare"],
                    }
                    for size in pool.settle()["pool"]["slot_sizes"]
                ]

            yield Pair("millpond", a, b, used_bytes, spare_bytes, slots)
            say(f"loaded by b: {loaded_bytes(pool.settle(), 'b')} bytes")


@contextlib.contextmanager
def rival_pair(
    asked: argparse.Namespace, name: str, arguments: dict[str, Any], gpu: str | None
) -> Generator[Pair]:
    """Start another cache and two replicas at it."""
    options = RivalOptions(
        name=name,
        size_bytes=parse_size(asked.rival_size),
        hybrid_block_tokens=asked.hybrid_block,
    )
    rival = make_rival(options, 2)
    with contextlib.ExitStack() as stack:
        if isinstance(rival, Lmcache):
            stack.enter_context(running_server(rival, gpu))
        members = {replica: rival.membership(replica) for replica in ("a", "b")}
        starts = {
            replica: Start(
                arguments | keywords(member.engine_args),
                gpu,
                dict(member.transfer),
                environ=dict(member.environ),
                sharpen=arguments.get("load_format") == "dummy",
            )
            for replica, member in members.items()
        }
        for pattern in {each for member in members.values() for each in member.leftovers}:
            stack.callback(remove, pattern)
        a, b = stack.enter_context(running(starts))
        used = used_by(rival)
        yield Pair(name, a, b, lambda: quiet(used), forgets_connector=name == VLLM_FS)


@contextlib.contextmanager
def running_server(rival: Lmcache, gpu: str | None) -> Generator[None]:
    """Run LMCache's server, which sees the GPU of its replicas."""
    environ = dict(os.environ) | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
    with tempfile.TemporaryDirectory(prefix="millpond-lmcache-") as folder:
        log = Path(folder, "lmcache.log")
        process = GuardedProcess(
            ProcessSpec(
                name="lmcache",
                argv=rival.server_argv(Path(sys.executable)),
                environ=rival.server_environ(environ),
                log_file=log,
                grace_s=5.0,
            )
        )
        try:
            deadline_s = time.monotonic() + READY_S
            while not rival.is_ready():
                if process.status is not None or time.monotonic() > deadline_s:
                    sys.exit(f"LMCache's server did not start:\n{process.log_tail(25)}")
                time.sleep(0.2)
            yield
        finally:
            process.ask_to_stop()
            process.wait_stopped()


def keywords(flags: Sequence[str]) -> dict[str, Any]:
    """Return command-line arguments of vLLM as arguments of ``vllm.LLM``."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {
        name.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
        for name, value in pairs
    }


def used_by(rival: Rival) -> Callable[[], int]:
    """Return what tells the bytes that a cache holds."""
    if isinstance(rival, Lmcache):
        url = f"{rival.url}/status"

        def used() -> int:
            answer = httpx.get(url, timeout=10.0, trust_env=False).json()
            return int(answer["storage_manager"]["l1_manager"]["memory_used_bytes"])

        return used
    files = rival.files

    def on_disk() -> int:
        return sum(path.stat().st_size for path in files.rglob("*") if path.is_file())

    return on_disk


def quiet(used: Callable[[], int]) -> int:
    """Wait until a cache has held the same for a while; return how much."""
    deadline_s = time.monotonic() + SETTLE_S
    value, since_s = used(), time.monotonic()
    while time.monotonic() - since_s < QUIET_S:
        time.sleep(0.1)
        now = used()
        if now != value:
            value, since_s = now, time.monotonic()
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the cache still changes after {SETTLE_S:g} s")
    return value


def remove(pattern: Path) -> None:
    """Remove what a cache has left behind, under a name or a pattern of names."""
    for path in pattern.parent.glob(pattern.name):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def measure(
    pairs: Sequence[Pair], prompts: Sequence[Sequence[int]], repeats: int, clock: Clock
) -> None:
    """Take prompts through all pairs, which take turns."""
    for number, prompt in enumerate(prompts):
        for pair in pairs:
            clock.say(f"{len(prompt)} tokens, cold, {pair.cache}")
            pair.begin(prompt)
        for repeat in range(repeats):
            for pair in pairs if (number + repeat) % 2 == 0 else reversed(pairs):
                pair.move(prompt)


def compare(results: Results, facts: Facts, rows: dict[str, dict[str, Any]], length: int) -> None:
    """Add a row for each other cache beside Millpond, and the bounds."""
    own = rows["millpond"]
    attention = facts.attention_bytes(length)
    memory = {cache: median(row["added_bytes"]) / attention for cache, row in rows.items()}
    needed = memory["millpond"] - median(own["added_spare_bytes"]) / attention
    for cache in rows.keys() - {"millpond"}:
        ratio = rows[cache]["moved_median_s"] / own["moved_median_s"]
        both = {name: rows[name] for name in ("millpond", cache)}
        results.row(
            what="compared",
            prompt_tokens=length,
            rival=cache,
            moved_median_s={name: row["moved_median_s"] for name, row in both.items()},
            rival_vs_millpond_ratio=round(ratio, 2),
            cold_s={name: median(row["cold_s"]) for name, row in both.items()},
            attention_bytes=attention,
            state_bytes=facts.state_bytes,
            memory_vs_attention_ratio={name: round(memory[name], 3) for name in both},
            needed_vs_attention_ratio=round(needed, 3),
        )
        results.at_least(f"moved at {length}, {cache} / millpond", ratio, 1.0)
    results.memory(length, memory["millpond"])
    results.true(f"same tokens at {length}", holds=all(own["same_tokens"]))


def run(asked: argparse.Namespace, results: Results, clock: Clock) -> None:
    """Start what fits beside each other, and measure."""
    lengths = [int(length) for length in asked.lengths.split(",")]
    arguments = engine_arguments(asked, max(lengths))
    drawn = Prompts(asked.seed, asked.token_ids)
    prompts = {length: [drawn.draw(length) for _ in range(asked.prompts)] for length in lengths}
    has_two_gpus = len(visible_gpus(dict(os.environ))) > 1
    beside = has_two_gpus and len(asked.rival) == 1 and not asked.alone
    gpus = gpus_for(2, same=not beside)
    results.say(interleaved=beside)
    rows: dict[int, dict[str, dict[str, Any]]] = {length: {} for length in lengths}
    facts: list[Facts] = []

    def measure_pairs(*contexts: contextlib.AbstractContextManager[Pair]) -> None:
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(contexts)) as threads:
            pairs = list(threads.map(stack.enter_context, contexts))
            if not facts:
                facts.append(pairs[0].a.facts)
                results.facts(facts[0])
                check_block(asked.hybrid_block, facts[0])
            for pair in pairs:
                warm_up((pair.a, pair.b), drawn, max(lengths))
            for length in lengths:
                measure(pairs, prompts[length], asked.repeats, clock)
                for pair in pairs:
                    row = pair.take_row(length)
                    rows[length][pair.cache] = row
                    results.row(**row)

    ours = millpond_pair(asked, arguments, gpus[0])
    others = [rival_pair(asked, name, arguments, gpus[1]) for name in asked.rival]
    if beside:
        measure_pairs(ours, *others)
    else:
        for context in (ours, *others):
            measure_pairs(context)
    for length, by_cache in rows.items():
        compare(results, facts[0], by_cache, length)


def check_block(said: int | None, facts: Facts) -> None:
    """End where the other cache was told of other blocks than the engine has."""
    needed = facts.block_tokens if facts.state_bytes else None
    if said != needed:
        sys.exit(f"--hybrid-block is {said} and must be {needed} for this model")


def rivals(text: str) -> list[str]:
    """Parse the names of other caches."""
    names = text.split(",")
    if unknown := [name for name in names if name not in RIVALS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]} is none of {', '.join(RIVALS)}")
    return names


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--rival", type=rivals, required=True, metavar=",".join(RIVALS))
    made.add_argument("--lengths", default="32768,131072")
    made.add_argument("--prompts", type=int, default=1, help="of each length")
    made.add_argument("--repeats", type=int, default=5, help="moved, of each prompt")
    made.add_argument("--rival-size", default="64GiB")
    made.add_argument("--hybrid-block", type=int, help="vLLM's block of a hybrid; 784 for a 27B")
    made.add_argument("--alone", action="store_true", help="one pair after the other")
    asked = made.parse_args()
    for name in asked.rival:
        check_rival(
            RivalOptions(name=name, size_bytes=parse_size(asked.rival_size)),
            "cuda" if visible_gpus(dict(os.environ)) else "cpu",
        )
    lengths = [int(length) for length in asked.lengths.split(",")]
    cold_s = sum(prefill_s(length) for length in lengths)
    # LMCache's small steps take nearly twice as long.
    waiting_s = len(lengths) * asked.prompts * asked.repeats * 3
    each_s = STARTS_S + 1.5 * cold_s * asked.prompts + waiting_s
    results = Results(asked)
    run(asked, results, Clock((1 + len(asked.rival)) * each_s))
    results.finish()


if __name__ == "__main__":
    main()
