"""What the bytes of a pool hold that long prompts of a hybrid model have filled.

    python benchmarks/pool_fill.py [--size 100GiB] [--tokens 131072] [--turnovers 10] [--json]
                                   [--step-tokens 16384 8192] [--inner-pages 0 8]

Stores prompts that share nothing, one after the other, until their pages have filled the pool
--turnovers times, with the pool's own code: no memory is taken and nothing is copied. Blocks are
those of a 27B hybrid: 784 tokens, 51.4 MB of pages and 153.9 MB a state. Which states are stored
is up to the ends of steps and --inner-pages, as in eviction.py; 0: all at which a step ends.

Prints percent of the pool's bytes, means over the moments after each prompt of the latter half.
"usable" are pages that a request with a stored prompt would load, and "needed" the states that it
would resume from; "stranded" are all other pages, "inner" all other states; "free" are slots and
extents that hold nothing, and "lost" is what extents have beside whole slots.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from eviction import KEY_BYTES, Replay, Request, Steps, key_of, namespace

from millpond.cli.envelope import envelope
from millpond.config import parse_size
from millpond.model.inner_states import INNER_PAGES
from millpond.model.limits import KIB
from millpond.model.names import Coverage
from millpond.model.namespace import PartSpec
from millpond.model.retention import Retention

BLOCK_TOKENS = 784
PAGES = PartSpec("pages", Coverage.EVERY, BLOCK_TOKENS * 64 * KIB)
STATE = PartSpec("state", Coverage.LAST, 153_944_064)
PROMPT_NS = 10**9


@dataclass(frozen=True, slots=True)
class Shares:
    """What a pool holds, as ratios to its bytes."""

    usable: float
    stranded: float
    needed: float
    inner: float
    free: float
    lost: float


@dataclass(frozen=True, slots=True)
class Fill:
    """One pool that prompts have filled; ``shares`` are means."""

    step_tokens: int
    inner_pages: float
    num_prompts: int
    num_evictions: int
    shares: Shares


def shares(replay: Replay, pool_bytes: int, prompts: Sequence[bytes]) -> Shares:
    """Return what the pool holds now, in which nothing but ``prompts`` has been stored."""
    found: Any = replay.pool.statistics()
    stored = {False: 0, True: 0}
    lost = pool_bytes - found["num_extents"] * found["extent_bytes"]
    for size in found["slot_sizes"]:
        num_slots, slot_bytes = size["num_slots"], size["slot_bytes"]
        stored[size["holds_states"]] += num_slots["committed"] * slot_bytes
        lost += size["num_extents"] * found["extent_bytes"]
        lost -= sum(num_slots.values()) * slot_bytes
    lookups = [replay.pool.lookup(replay.namespace_id, keys, KEY_BYTES) for keys in prompts]
    usable = sum(each.num_blocks for each in lookups) * PAGES.slot_bytes
    needed = sum(each.num_blocks > 0 for each in lookups) * STATE.slot_bytes
    return Shares(
        usable=usable / pool_bytes,
        stranded=(stored[False] - usable) / pool_bytes,
        needed=needed / pool_bytes,
        inner=(stored[True] - needed) / pool_bytes,
        free=(found["bytes"]["free"] + found["bytes"]["unassigned"]) / pool_bytes,
        lost=lost / pool_bytes,
    )


def fill(options: argparse.Namespace, step_tokens: int, inner_pages: float) -> Fill:
    """Fill one pool."""
    pool_bytes, num_blocks = parse_size(options.size), options.tokens // BLOCK_TOKENS
    inner_blocks = inner_pages * STATE.slot_bytes / PAGES.slot_bytes
    steps = Steps(max(1, step_tokens // BLOCK_TOKENS), inner_blocks)
    replay = Replay(pool_bytes, Retention(), namespace((PAGES, STATE), BLOCK_TOKENS), steps)
    num_prompts = math.ceil(options.turnovers * pool_bytes / (num_blocks * PAGES.slot_bytes))
    prompts: list[bytes] = []
    found: list[Shares] = []
    for number in range(num_prompts):
        prompts.append(b"".join(key_of(number * num_blocks + i) for i in range(num_blocks)))
        replay.run([Request(number * PROMPT_NS, options.tokens, prompts[-1])])
        if number >= num_prompts // 2:
            found.append(shares(replay, pool_bytes, prompts))
    replay.pool.check_invariants()
    num_evictions = replay.pool.statistics()["num_evictions"]
    assert isinstance(num_evictions, int)
    means = (statistics.fmean(getattr(each, f.name) for each in found) for f in fields(Shares))
    return Fill(step_tokens, inner_pages, num_prompts, num_evictions, Shares(*means))


def table(fills: Sequence[Fill]) -> str:
    """Return a Markdown table in percent: a row for each fill."""
    names = [field.name for field in fields(Shares)]
    lines = [["tokens a step", "inner pages", *names], ["---"] * (2 + len(names))]
    for each in fills:
        percent = (f"{100 * getattr(each.shares, name):.1f}" for name in names)
        lines.append([f"{each.step_tokens:,}", f"{each.inner_pages:g}", *percent])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> None:
    """Fill a pool for each length of steps and each rule, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="100GiB", help="of the pool")
    parser.add_argument("--tokens", type=int, default=131_072, help="of a prompt")
    parser.add_argument("--turnovers", type=float, default=10, help="pages stored, in pools")
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[16_384, 8192])
    parser.add_argument("--inner-pages", type=float, nargs="+", default=[0, INNER_PAGES])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    fills = [
        fill(options, step_tokens, inner_pages)
        for step_tokens in options.step_tokens
        for inner_pages in options.inner_pages
    ]
    if options.json:
        data = {"options": vars(options), "fills": [asdict(each) for each in fills]}
        print(json.dumps(envelope(["python", *sys.argv], data), indent=1))
    else:
        print(table(fills))


if __name__ == "__main__":
    main()
