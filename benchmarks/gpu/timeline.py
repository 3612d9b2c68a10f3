"""Where the time of one moved request goes, and whether it gains by starting early.

    python benchmarks/gpu/timeline.py --model MODEL [--same-gpu] [--lengths 32768,131072,261900]
                                      [--repeats 5] [--engine JSON] [--json PATH] [--svg PATH]

Replica a computes a prompt; then b, --repeats times each way, interleaved: forgets its own
prefixes and asks. `early` (connector.early_loads): the forward pass is launched while the load
goes on, and waits for it on the GPU. `late`: it is launched when the load has landed. A local hit
comes in between. Rows have the medians, the floor (local hit + loaded bytes over the link) and,
of the request nearest to the median, every span: lookup, allocation, handing over, load, forward
pass (launch and GPU), sampling. --svg draws the last length. A 27B hybrid on one H200 takes two
minutes for 131072 alone, three for all. Ends with 1 where tokens differ, where early takes longer
than late, or more than 1.15 times the floor, or where a prompt of 100,000 tokens or more takes more
than 1.15 times its attention bytes in the pool.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from engines import Answer, Replica
from runs import (
    Pool,
    Prompts,
    Results,
    counts,
    loaded_bytes,
    median,
    parser,
    rounded,
    running_pair,
    say,
)
from tracing import COMPUTE, COPIES, HOST, Span

FLOOR_RATIO_MAX = 1.15
EARLY, LATE, LOCAL = "early", "late", "local"
WIDTH, LEFT, BAR, GAP = 900, 90, 22, 14
COLORS = {HOST: "#4477aa", COPIES: "#ccbb44", COMPUTE: "#228833"}


def traced(replica: Replica, prompt: Sequence[int]) -> tuple[Answer, list[dict[str, object]]]:
    """Ask, and return the spans in milliseconds since the request's arrival."""
    replica.trace_begin()
    answer = replica.ask(prompt)
    spans: list[Span] = replica.trace_end()
    return answer, [
        {
            "track": span.track,
            "name": span.name,
            "begin_ms": round((span.begin_s - answer.arrived_s) * 1e3, 2),
            "end_ms": round((span.end_s - answer.arrived_s) * 1e3, 2),
        }
        for span in spans
    ]


def measure(replicas: tuple[Replica, Replica], pool: Pool, prompt: list[int], repeats: int) -> dict:
    """Return the row of one prompt."""
    a, b = replicas
    held = held_bytes(pool)
    cold = a.ask(prompt)
    added_bytes = held_bytes(pool) - held
    attention_bytes = a.facts.attention_bytes(len(prompt))
    before = loaded_bytes(pool.settle(), "b")
    taken: dict[str, list] = {EARLY: [], LATE: [], LOCAL: []}
    for i in range(repeats):
        for way in (EARLY, LATE) if i % 2 == 0 else (LATE, EARLY):
            b.tell_early(enabled=way == EARLY)
            b.forget()
            taken[way].append(traced(b, prompt))
            taken[LOCAL].append(traced(b, prompt))
    b.tell_early(enabled=True)
    num_bytes = (loaded_bytes(pool.settle(), "b") - before) // (2 * repeats)
    seconds = {way: [answer.ttft_s for answer, _ in each] for way, each in taken.items()}
    link = pool.link_gb_s("b")
    floor_s = median(seconds[LOCAL]) + (num_bytes / link / 1e9 if link else 0.0)
    return {
        "prompt_tokens": len(prompt),
        "cold_s": round(cold.ttft_s, 4),
        "added_bytes": added_bytes,
        "attention_bytes": attention_bytes,
        "memory_vs_attention_ratio": round(added_bytes / attention_bytes, 3),
        "loaded_bytes": num_bytes,
        "link_gb_s": link,
        "floor_s": round(floor_s, 4),
        **{f"{way}_median_s": median(each) for way, each in seconds.items()},
        "early_vs_late_ratio": round(median(seconds[EARLY]) / median(seconds[LATE]), 3),
        "early_vs_floor_ratio": round(median(seconds[EARLY]) / floor_s, 3),
        "late_vs_floor_ratio": round(median(seconds[LATE]) / floor_s, 3),
        "same_tokens": all(a.tokens == cold.tokens for each in taken.values() for a, _ in each),
        "samples_s": {way: rounded(each) for way, each in seconds.items()},
        "spans": {way: nearest_to_median(each) for way, each in taken.items()},
    }


def held_bytes(pool: Pool) -> int:
    """Return the bytes that the pool holds once everything is written."""
    return int(pool.settle()["pool"]["bytes"]["committed"])


def nearest_to_median(taken: list[tuple[Answer, list]]) -> list:
    """Return the spans of the request that took about as long as most."""
    ordered = sorted(taken, key=lambda each: each[0].ttft_s)
    return ordered[len(ordered) // 2][1]


def drawn(row: dict) -> str:
    """Return a picture of the row's spans, one way above the other."""
    ways = [way for way in (LATE, EARLY) if way in row["spans"]]
    longest_ms = 1e3 * max(row[f"{way}_median_s"] for way in ways) * 1.02
    scale = (WIDTH - LEFT - 10) / longest_ms
    lines, y = [], 24
    for way in ways:
        title = f"{way}: {row[f'{way}_median_s'] * 1e3:.0f} ms"
        lines.append(f'<text x="4" y="{y}" class="title">{title}</text>')
        y += GAP - 6
        for track in (HOST, COPIES, COMPUTE):
            lines.append(f'<text x="4" y="{y + 15}">{track}</text>')
            for span in row["spans"][way]:
                if span["track"] == track:
                    lines += bar(span, y, scale)
            y += BAR + 6
        y += 2 * GAP
    step_ms = 50 if longest_ms < 600 else 100
    for ms in range(0, int(longest_ms) + 1, step_ms):
        x = LEFT + ms * scale
        lines.insert(0, f'<path d="M{x:.1f} 28V{y - 20}" class="grid"/>')
        lines.append(f'<text x="{x:.1f}" y="{y - 6}" text-anchor="middle">{ms} ms</text>')
    style = (
        "text{font:12px sans-serif;fill:#555}.title{font-weight:bold}"
        ".on{fill:#fff;font-size:11px}.grid{stroke:#ddd}"
    )
    words = f"One moved request of {row['prompt_tokens']:,} tokens, part by part"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">'
        f"<title>{words}</title><style>{style}</style>"
        f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>' + "".join(lines) + "</svg>\n"
    )


def bar(span: dict, y: float, scale: float) -> list[str]:
    """Return a span's bar, with its name where there is room."""
    x, width = LEFT + span["begin_ms"] * scale, (span["end_ms"] - span["begin_ms"]) * scale
    ms = span["end_ms"] - span["begin_ms"]
    name = f"{span['name']}, {ms:.1f} ms"
    box = f'x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{BAR}"'
    color = COLORS[span["track"]]
    lines = [f'<rect {box} fill="{color}"><title>{name}</title></rect>']
    if width > 7 * len(name):
        lines.append(f'<text x="{x + 5:.1f}" y="{y + 15}" class="on">{name}</text>')
    return lines


def add_options(made: argparse.ArgumentParser) -> None:
    """Add this script's own."""
    made.add_argument("--lengths", default="32768,131072,261900")
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--svg", type=Path, help="draw the last length")


def longest(asked: argparse.Namespace) -> int:
    """Return the tokens of the longest prompt."""
    return max(counts(asked.lengths))


def run(
    asked: argparse.Namespace,
    replicas: tuple[Replica, Replica],
    pool: Pool,
    prompts: Prompts,
    results: Results,
) -> None:
    """Measure all lengths, and draw the last one."""
    for length in counts(asked.lengths):
        say(f"{length} tokens")
        row = measure(replicas, pool, prompts.draw(length), asked.repeats)
        results.row(what="timeline", **row)
        results.true(f"same tokens at {length}", holds=row["same_tokens"])
        results.at_most(f"early / late at {length}", row["early_vs_late_ratio"], 1.0)
        results.at_most(f"moved / floor at {length}", row["early_vs_floor_ratio"], FLOOR_RATIO_MAX)
        results.memory(length, row["memory_vs_attention_ratio"])
        if asked.svg is not None:
            asked.svg.write_text(drawn(row), encoding="utf-8")


def main() -> None:
    """Measure and print, or draw what was measured."""
    made = parser(__doc__)
    add_options(made)
    made.add_argument("--same-gpu", action="store_true")
    asked = made.parse_args()
    prompts, results = Prompts(asked.seed, asked.token_ids), Results(asked)
    with running_pair(asked, longest(asked), prompts, results) as (a, b, pool):
        run(asked, (a, b), pool, prompts, results)
    results.finish()


if __name__ == "__main__":
    main()
