"""Moved, local and cold requests on two real replicas, and what the pool costs a cold one.

    python benchmarks/replicas.py [--tokens 16384] [--rounds 5]
                                  [--cold-tokens 4096] [--pairs 16]

Starts a pool and two replicas of a small hybrid model that is made on the spot. First the
demonstration at --tokens: medians over the rounds of the time to the first token. Then
--pairs cold prefills with the pool off and on, paired by prompt, in the order OFF-ON-ON-OFF.
Prints one line of JSON; progress goes to stderr.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from figures import paired_ratio

from millpond.config import PoolConfig
from millpond.launch.cold import ColdPair, ColdPairs
from millpond.launch.demo import ENGINE_ARGS, ENGINE_ENVIRON, NUM_REPLICAS, Demo, DemoOptions
from millpond.launch.demo import DemoRow as Row
from millpond.launch.resources import pick_device
from millpond.launch.system import System, SystemOptions
from millpond.launch.tiny import HYBRID_ENGINE_ARGS, make_hybrid
from millpond.model.limits import MIB

LOGS = Path("report/logs")
POOL_BYTES = 512 * MIB


def moved_figures(row: Row) -> dict[str, object]:
    """Return the figures of the demonstration; an error if its outputs were not right."""
    if row.faults():
        raise RuntimeError("; ".join(row.faults()))
    return {
        "moved_vs_cold_ratio": round(row.cold_ttft_s / row.moved_on_ttft_s, 2),
        "moved_vs_local_ratio": round(row.moved_on_ttft_s / row.local_ttft_s, 3),
        "moved_prompt_tokens": row.prompt_tokens,
        "moved_num_rounds": row.num_rounds,
        "moved_cold_ttft_s": round(row.cold_ttft_s, 4),
        "moved_local_ttft_s": round(row.local_ttft_s, 4),
        "moved_off_ttft_s": round(row.moved_off_ttft_s, 4),
        "moved_on_ttft_s": round(row.moved_on_ttft_s, 4),
    }


def cold_figures(pairs: Sequence[ColdPair], num_tokens: int) -> dict[str, object]:
    """Return the ratio on / off with its interval."""
    off, on = [pair.off_ttft_s for pair in pairs], [pair.on_ttft_s for pair in pairs]
    return {
        **paired_ratio("cold_on_vs_off_ratio", on, off),
        "cold_num_pairs": len(pairs),
        "cold_prompt_tokens": num_tokens,
        "cold_off_ttft_s": round(statistics.median(off), 4),
        "cold_on_ttft_s": round(statistics.median(on), 4),
    }


def main() -> None:
    """Start the system, measure both, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()

    def on_step(step: str) -> None:
        print(step, file=sys.stderr, flush=True)

    # A folder with a short path: that of a socket has a limit.
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        options = SystemOptions(
            model=str(make_hybrid(Path(folder, "model"), seed=asked.seed).path),
            num_replicas=NUM_REPLICAS,
            device="cuda" if pick_device("auto", os.environ) == "cuda" else "cpu",
            environ={**os.environ, **ENGINE_ENVIRON},
            pool=PoolConfig(Path(folder, "pool.sock"), POOL_BYTES, None),
            engine_args=(*ENGINE_ARGS, *HYBRID_ENGINE_ARGS),
            run_dir=LOGS,
        )
        on_step(f"starting two replicas; logs are in {LOGS}")
        with System(options) as system:
            with contextlib.closing(Demo(system, on_step=on_step)) as demo:
                (row,) = demo.run(DemoOptions((asked.tokens,), asked.rounds, asked.seed))
            with contextlib.closing(ColdPairs(system, on_step=on_step)) as cold:
                pairs = cold.run(
                    num_tokens=asked.cold_tokens, num_pairs=asked.pairs, seed=asked.seed + 1
                )
    print(json.dumps(moved_figures(row) | cold_figures(pairs, asked.cold_tokens)))


if __name__ == "__main__":
    main()
