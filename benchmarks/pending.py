"""What waiting for another replica's prefill is worth: two real replicas on the CPU.

    python benchmarks/pending.py [--tokens 16384] [--lag 1.0] [--rounds 3] [--json FILE]

Replica a is asked for a new prompt, replica b for the same prompt LAG seconds later, while a
computes it; b may wait for a at most 0, 2 or 60 seconds. Prints b's time to the first token
and how many of the prompt's tokens b computed itself, as a ratio to b alone and cold.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from millpond.config import PoolConfig
from millpond.launch.engine_client import Completion, EngineClient
from millpond.launch.system import System, SystemOptions
from millpond.launch.tiny import HYBRID_ENGINE_ARGS, VOCAB_SIZE, make_hybrid
from millpond.model.limits import MIB
from millpond.service.client import AdminClient

WAITS_S = (0.0, 2.0, 60.0)
TIMEOUT_S = 600.0


def prompt(num_tokens: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, VOCAB_SIZE - 10) for _ in range(num_tokens)]


def ask(system: System, name: str, ids: list[int], request: str) -> Completion:
    place = system.replica(name)
    with EngineClient(place.url, place.model, timeout_s=TIMEOUT_S) as client:
        return client.complete(ids, num_tokens=4, request_id=request)


def one_round(system: System, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    ids = prompt(options.tokens, seed)
    answers: dict[str, Completion] = {}
    first = threading.Thread(
        target=lambda: answers.setdefault("a", ask(system, "a", ids, f"a-{seed}"))
    )
    first.start()
    time.sleep(options.lag)
    second = ask(system, "b", ids, f"b-{seed}")
    first.join(TIMEOUT_S)
    with AdminClient.connect(str(system.socket), timeout_s=10.0) as admin:
        report = admin.requests_named(f"b-{seed}")[-1][1]
    return {
        "a_ttft_s": answers["a"].ttft_s,
        "b_ttft_s": second.ttft_s,
        "b_computed_tokens": report.computed_tokens,
        "same": second.token_ids == answers["a"].token_ids,
    }


def measure(model: str, folder: Path, wait_s: float, options: argparse.Namespace) -> dict[str, Any]:
    system_options = SystemOptions(
        model=model,
        num_replicas=2,
        device="cpu",
        environ=dict(os.environ),
        pool=PoolConfig(folder / "pool.sock", 256 * MIB, None),
        engine_args=HYBRID_ENGINE_ARGS,
        connector={"pending_wait_s": wait_s},
    )
    with System(system_options) as system:
        for name in ("a", "b"):
            ask(system, name, prompt(600, 1), f"warm-{name}")
        alone = ask(system, "b", prompt(options.tokens, 2), "alone")
        rounds = [one_round(system, options, 100 + i) for i in range(options.rounds)]
    row = {
        "wait_s": wait_s,
        "alone_ttft_s": round(alone.ttft_s, 3),
        "rounds": rounds,
        "b_ttft_s": round(statistics.median(r["b_ttft_s"] for r in rounds), 3),
        "a_ttft_s": round(statistics.median(r["a_ttft_s"] for r in rounds), 3),
        "b_computed_ratio": round(
            statistics.median(r["b_computed_tokens"] for r in rounds) / options.tokens, 3
        ),
        "same": all(r["same"] for r in rounds),
    }
    row["b_vs_alone_ratio"] = round(row["b_ttft_s"] / row["alone_ttft_s"], 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--lag", type=float, default=1.0, help="seconds b comes after a")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="millpond-pending-") as folder:
        model = str(make_hybrid(Path(folder) / "model", seed=1).path)
        for wait_s in WAITS_S:
            rows.append(measure(model, Path(folder), wait_s, options))
            print({k: v for k, v in rows[-1].items() if k != "rounds"}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if not all(row["same"] for row in rows):
        sys.exit("outputs differ")


if __name__ == "__main__":
    main()
