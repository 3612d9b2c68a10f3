"""Moved requests between two engines, against the floor, in one run.

    python benchmarks/gpu/moved.py --model MODEL [--same-gpu] [--lengths 32768,131072,261900]
                                   [--repeats 7] [--pool 32GiB] [--engine JSON] [--json PATH]

Starts a pool and two engines in this machine, one a GPU or both on one (--same-gpu), and sends
random prompts of each length. Replica a computes a prompt; then b, --repeats times: forgets its
own prefixes, asks (moved), asks again (local). With every prompt the pool's way is measured as
well: bytes that b loaded, and the link that b has measured. The floor of a moved request is the
median local hit plus the loaded bytes over that link.

MODEL is a name or a folder, as for vLLM; --engine holds more arguments of vllm.LLM, such as
'{"load_format": "dummy", "quantization": "fp8", "gpu_memory_utilization": 0.46}'. Prints one
line of JSON a length and the bounds at the end; progress goes to stderr. A 27B hybrid on one
H200 takes three minutes. Ends with 1 where tokens differ, or where a moved request takes more
than 1.15 times its floor.
"""

import statistics
from dataclasses import asdict, dataclass

from engines import Answer, Replica
from runs import (
    Pool,
    Prompts,
    Results,
    loaded_bytes,
    parser,
    rounded,
    running_pair,
    say,
)

FLOOR_RATIO_MAX = 1.15


@dataclass(frozen=True)
class Row:
    """One prompt length; seconds to the first token."""

    prompt_tokens: int
    cold_s: float
    moved_s: list[float]
    local_s: list[float]
    loaded_bytes: int
    link_gb_s: float | None
    same_tokens: bool

    def figures(self) -> dict[str, object]:
        """Return samples and ratios."""
        moved, local = statistics.median(self.moved_s), statistics.median(self.local_s)
        return asdict(self) | {
            "moved_median_s": round(moved, 4),
            "local_median_s": round(local, 4),
            "floor_s": round(self.floor_s, 4),
            "moved_vs_floor_ratio": round(moved / self.floor_s, 3),
            "cold_vs_moved_ratio": round(self.cold_s / moved, 1),
        }

    @property
    def floor_s(self) -> float:
        """A local hit, and the loaded bytes over the link."""
        link = self.loaded_bytes / self.link_gb_s / 1e9 if self.link_gb_s else 0.0
        return statistics.median(self.local_s) + link


def measure(a: Replica, b: Replica, pool: Pool, prompt: list[int], repeats: int) -> Row:
    """Return the row of one prompt."""
    cold = a.ask(prompt)
    before = loaded_bytes(pool.settle(), "b")
    moved: list[Answer] = []
    local: list[Answer] = []
    for _ in range(repeats):
        b.forget()
        moved.append(b.ask(prompt))
        local.append(b.ask(prompt))
    after = pool.settle()
    return Row(
        prompt_tokens=len(prompt),
        cold_s=round(cold.ttft_s, 4),
        moved_s=rounded(answer.ttft_s for answer in moved),
        local_s=rounded(answer.ttft_s for answer in local),
        loaded_bytes=(loaded_bytes(after, "b") - before) // repeats,
        link_gb_s=pool.link_gb_s("b"),
        same_tokens=all(answer.tokens == cold.tokens for answer in moved + local),
    )


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    made.add_argument("--lengths", default="32768,131072,261900")
    made.add_argument("--repeats", type=int, default=7)
    made.add_argument("--same-gpu", action="store_true")
    asked = made.parse_args()
    lengths = [int(length) for length in asked.lengths.split(",")]
    prompts = Prompts(asked.seed, asked.token_ids)
    results = Results(asked)
    with running_pair(asked, max(lengths), prompts, results) as (a, b, pool):
        for length in lengths:
            say(f"{length} tokens")
            row = measure(a, b, pool, prompts.draw(length), asked.repeats)
            results.row(**row.figures())
            results.true(f"same tokens at {length}", holds=row.same_tokens)
            moved = statistics.median(row.moved_s)
            results.at_most(
                f"moved against the floor at {length}", moved / row.floor_s, FLOOR_RATIO_MAX
            )
    results.finish()


if __name__ == "__main__":
    main()
