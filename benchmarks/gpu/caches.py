"""Four caches side by side on one GPU: off, Millpond, LMCache, vLLM's files in shared memory.

    python benchmarks/gpu/caches.py [--caches off,millpond,lmcache,vllm-fs] [--out DIR]
                                    [--model MODEL] [--hybrid-block TOKENS] [--pool SIZE]
                                    [--lengths 16000,60000] [--prompts 6] [--kv-cache 4GiB]
                                    [--dry-run]

Runs `millpond bench run` once: one round, OFF-X-Y-Z-Z-Y-X-OFF, each period with two replicas of
its own, on two GPUs where there are two, else both on one. Every prompt is asked of one replica
and then of the other one (moved). Without --model it is a small one of attention alone, made on
the spot: enough to see that all four work and in which order they come, not what a large model
gains. Needs vLLM 0.26 or newer and, for lmcache, the package of that name.

With the small model a period takes about half a minute, nearly all of it vLLM's start; four
caches take about four minutes. --dry-run prints all commands and starts nothing. What was
measured is in DIR: bench.json, report.html, logs of every process. Ctrl-C reports what is done.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from millpond.config.values import parse_size
from millpond.launch.resources import visible_gpus
from millpond.launch.rivals import RIVALS, Lmcache, RivalOptions, make_rival

NUM_REPLICAS = 2
PERIOD_S = 30
"""With the small model: vLLM's start, and some seconds of requests."""
SHARE = 0.9
"""Of a GPU's memory, for all replicas on it together."""
SCENARIO = """\
name = "caches"
description = "moved and cold requests under several caches"

[design]
rounds = 1
aa_rounds = 0
settle_s = {settle_s}
warm_up = 4

[[workload]]
kind = "moved"
lengths = {lengths}
prompts = {prompts}
output_tokens = 8
gap_s = 0.5  # time for every cache to end its writes
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--caches", default=",".join(("off", "millpond", *RIVALS)))
    parser.add_argument("--out", type=Path, default=Path("report", "bench", "caches"))
    parser.add_argument("--model")
    parser.add_argument("--hybrid-block", type=int)
    parser.add_argument("--pool", default="4GiB")
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--prompts", type=int, default=6, help="no verdict below six")
    parser.add_argument("--kv-cache", default="4GiB", help="of each replica, on the GPU")
    parser.add_argument("--settle", type=float, default=2.0, help="seconds after a start")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("engine_args", nargs="*", help="after --: more arguments for vLLM")
    asked = parser.parse_args(argv)
    asked.lengths = asked.lengths or [16_000, 60_000]
    return asked


def engine_args(asked: argparse.Namespace, num_gpus: int) -> list[str]:
    """Return arguments for every replica."""
    longest = max(asked.lengths) + 1_000
    arguments = ["--max-model-len", str(longest)]
    if num_gpus > 0:
        share = SHARE if num_gpus >= NUM_REPLICAS else SHARE / NUM_REPLICAS
        # Replicas that start side by side on one GPU would take each other's memory for their
        # own when they look how much is left for their caches.
        arguments += ["--kv-cache-memory-bytes", str(parse_size(asked.kv_cache))]
        arguments += ["--gpu-memory-utilization", f"{share / 2 if asked.model is None else share}"]
        arguments += ["--enforce-eager"]  # else each start compiles for half a minute
    return [*arguments, *asked.engine_args]


def command(asked: argparse.Namespace, num_gpus: int) -> list[str]:
    """Return the one command that runs all periods."""
    argv = [sys.executable, "-m", "millpond.cli", "bench", "run", str(asked.out / "caches.toml")]
    argv += ["--caches", asked.caches, "--pool", asked.pool, "--out", str(asked.out)]
    argv += ["--launch", str(NUM_REPLICAS)]
    argv += ["--tiny", "attention"] if asked.model is None else ["--model", asked.model]
    if asked.hybrid_block is not None:
        argv += ["--hybrid-block", str(asked.hybrid_block)]
    return [*argv, "--", *engine_args(asked, num_gpus)]


def show_rivals(asked: argparse.Namespace) -> None:
    """Print how the other caches would be started."""
    for name in RIVALS:
        if name not in asked.caches.split(","):
            continue
        options = RivalOptions(
            name=name,
            size_bytes=parse_size(asked.pool),
            hybrid_block_tokens=asked.hybrid_block,
        )
        rival = make_rival(options, NUM_REPLICAS)
        if isinstance(rival, Lmcache):
            print(f"{name}: {shlex.join(rival.server_argv(Path(sys.executable)))}")
        member = rival.membership("a")
        print(f"{name}: --kv-transfer-config {shlex.quote(json.dumps(member.transfer))}")
        print(f"{name}: {shlex.join(member.engine_args)} {dict(member.environ)}")


def main() -> None:
    """Run it, as the process that this is."""
    asked = parse(sys.argv[1:])
    gpus = visible_gpus(os.environ)
    environ = dict(os.environ)
    if 0 < len(gpus) < NUM_REPLICAS:
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus * NUM_REPLICAS)
    argv = command(asked, len(gpus))
    num_periods = 2 * len(asked.caches.split(","))
    print(f"{num_periods} periods, with the small model about {num_periods * PERIOD_S} s:")
    print(f"CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', '')} {shlex.join(argv)}")
    if asked.dry_run:
        show_rivals(asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    scenario = SCENARIO.format(settle_s=asked.settle, lengths=asked.lengths, prompts=asked.prompts)
    (asked.out / "caches.toml").write_text(scenario, encoding="utf-8")
    sys.stdout.flush()
    os.execve(sys.executable, argv, environ)


if __name__ == "__main__":
    main()
