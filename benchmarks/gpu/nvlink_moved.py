"""Moved requests whose prefix is read from another GPU over NVLink, against the pool's memory.

    python benchmarks/gpu/nvlink_moved.py --model MODEL [--lengths 32768x5,131072x5,261900x3]
                                          [--engine JSON] [--json PATH]

An experiment on two GPUs that can reach each other. Replica a, on the first one, computes a
prompt. Replica b, on the second, forgets its own prefixes and asks, again and again, in turns:
"host" as Millpond does it, and "peer", where b's loads read the same bytes from memory of the first
GPU, page by page, through the same path. For that memory the pool is copied to the first GPU
beforehand, and has to fit there beside a's engine (--pool, 32 GiB): what it would take to find and
to keep blocks in a's own cache is not in these figures. Local hits in between. What a's GPU loses
meanwhile: nvlink.py.

A 27B hybrid in fp8 on two H200s takes about two minutes. Without a GPU the mirror lies in host
memory, and says nothing. Ends with 1 where tokens differ, or where one way loaded nothing.
"""

import argparse

from engines import Replica
from runs import (
    Clock,
    Pool,
    Prompts,
    Results,
    counts,
    gpus_for,
    loaded_bytes,
    median,
    parser,
    prefill_s,
    rounded,
    running_pair,
)

HOST, PEER, LOCAL = "host", "peer", "local"


def measure(
    replicas: tuple[Replica, Replica], pool: Pool, prompt: list[int], repeats: int
) -> dict[str, object]:
    """Return the row of one prompt."""
    a, b = replicas
    cold = a.ask(prompt)
    before = loaded_bytes(pool.settle(), b.name)
    b.refresh_mirror()
    taken: dict[str, list[float]] = {HOST: [], PEER: [], LOCAL: []}
    same: list[bool] = []
    num_peer_loads = b.read_mirror(enabled=False)
    for i in range(repeats):
        for way in (HOST, PEER) if i % 2 == 0 else (PEER, HOST):
            b.read_mirror(enabled=way == PEER)
            b.forget()
            for name in (way, LOCAL):
                answer = b.ask(prompt)
                taken[name].append(answer.ttft_s)
                same.append(answer.tokens == cold.tokens)
    num_peer_loads = b.read_mirror(enabled=False) - num_peer_loads
    num_bytes = (loaded_bytes(pool.settle(), b.name) - before) // (2 * repeats)
    return {
        "what": "moved",
        "prompt_tokens": len(prompt),
        "cold_s": round(cold.ttft_s, 4),
        "loaded_bytes": num_bytes,
        "num_peer_loads": num_peer_loads,
        "link_gb_s": pool.link_gb_s(b.name),
        **{f"{name}_median_s": median(each) for name, each in taken.items()},
        "peer_vs_host_ratio": round(median(taken[PEER]) / median(taken[HOST]), 3),
        "peer_vs_local_ratio": round(median(taken[PEER]) / median(taken[LOCAL]), 3),
        "same_tokens": all(same),
        "samples_s": {name: rounded(each) for name, each in taken.items()},
    }


def run(asked: argparse.Namespace, results: Results) -> None:
    """Start a pool and two replicas, of which b sees both GPUs; measure."""
    lengths = counts(asked.lengths)
    longest = max(lengths)
    clock = Clock(80 + sum(prefill_s(n) + repeats * 2.0 for n, repeats in lengths.items()))
    prompts = Prompts(asked.seed, asked.token_ids)
    first, second = gpus_for(2, same=False)  # two, or none at all
    gpus = [first, None if first is None else f"{second},{first}"]
    with running_pair(asked, longest, prompts, results, gpus) as (a, b, pool):
        for length, repeats in lengths.items():
            clock.say(f"{length} tokens, {repeats} times each way")
            row = measure((a, b), pool, prompts.draw(length), repeats)
            results.row(**row)
            results.true(f"same tokens at {length}", holds=bool(row["same_tokens"]))
            is_loaded = row["loaded_bytes"] and row["num_peer_loads"] >= repeats
            results.true(f"loaded either way at {length}", holds=bool(is_loaded))


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--lengths", default="32768x5,131072x5,261900x3", help="TOKENSxREPEATS,...")
    asked = made.parse_args()
    results = Results(asked)
    run(asked, results)
    results.finish()


if __name__ == "__main__":
    main()
