"""What stores and loads do to the tokens of another request on the same replica.

    python benchmarks/gpu/latency.py --model MODEL [--engine JSON] [--json PATH]
                                     [--length 131072] [--loads 20] [--stores 5]

Two engines on one GPU: "on" has the connector, "off" has none at all. One request decodes all
the time; while it does, another one comes with a prompt of --length tokens:

- load: the prompt is in the pool. Waits between tokens from its arrival until it is computed,
  against those before it came (idle) in the same run, for a machine has slow seconds; the arrival
  itself, and the steps that compute what is left, beside those of the same prompt again, which is
  then a local hit. --loads of them, and local hits after the first five.
- store: nobody has seen the prompt; all of it is computed and, with the pool, stored. Waits
  until its first token ("during", one a step) and --tail tokens after it, while the last blocks
  are copied, against the same prompt on the engine without a connector, ON OFF OFF ON.

A 27B hybrid in fp8 on one H200 takes about six minutes: 1 for the start of the engines, 2 for
the loads, 2.5 for the stores. Ends with 1 where a ratio is above 1.05: for loads and tails the
median of the runs' ratios, during a prefill that of all waits.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from engines import Answer, Ask, Replica
from runs import (
    Bench,
    loaded_bytes,
    median,
    on_and_off,
    parser,
    percentile,
    prefill_s,
    rounded,
)

LATENCY_RATIO_MAX = 1.05
LOCAL_MAX = 5
STREAM_TOKENS = 256
STREAM_TOKENS_MAX = 4000
SETTLING_TOKENS = 4
"""The stream's first waits follow its own prefill."""


@dataclass(frozen=True)
class Waits:
    """Seconds between two tokens of the stream, by what the other request did meanwhile."""

    idle: list[float]
    arrival: list[float]
    waiting: list[float]
    computing: list[float]
    tail: list[float]

    @classmethod
    def of(cls, stream: Answer, other: Answer) -> "Waits":
        """Sort the waits of one run."""
        sorted_waits = cls([], [], [], [], [])
        first_token_s = other.token_s[0]
        running_s = first_token_s if other.running_s is None else other.running_s
        for begin_s, end_s in stream.intervals_s[SETTLING_TOKENS:]:
            if end_s <= other.arrived_s:
                kind = sorted_waits.idle
            elif begin_s >= first_token_s:
                kind = sorted_waits.tail
            elif end_s >= running_s:
                kind = sorted_waits.computing
            elif begin_s <= other.arrived_s:
                kind = sorted_waits.arrival
            else:
                kind = sorted_waits.waiting
            kind.append(end_s - begin_s)
        return sorted_waits

    def add(self, other: "Waits") -> None:
        """Take in the waits of another run."""
        for name in ("idle", "arrival", "waiting", "computing", "tail"):
            getattr(self, name).extend(getattr(other, name))


def beside_a_stream(bench: Bench, replica: Replica, prompt: Sequence[int]) -> tuple[Answer, Answer]:
    """Ask a prompt while another request decodes; return the stream's answer and its own."""
    stream = Ask(bench.prompts.draw(STREAM_TOKENS), STREAM_TOKENS_MAX)
    other = Ask(prompt, 1, after_tokens=bench.asked.idle)
    answers = replica.serve([stream, other], tail_tokens=bench.asked.tail)
    bench.pool.settle()
    return answers[0], answers[1]


def summary(waits: Sequence[float]) -> dict[str, object]:
    """Return what is said of some waits."""
    if not waits:
        return {"number": 0}
    return {
        "number": len(waits),
        "median_s": median(waits),
        "p99_s": percentile(waits, 99),
        "max_s": round(max(waits), 4),
    }


def ratios(runs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[float]:
    """Return the ratio of the two medians of each run, where it has both."""
    return [
        statistics.median(these) / statistics.median(those)
        for these, those in runs
        if these and those
    ]


def median_ratio(runs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float | None:
    """Return the median of the runs' ratios, None where no run has any."""
    found = ratios(runs)
    return round(statistics.median(found), 3) if found else None


def loads(bench: Bench) -> None:
    """Add a row: a prefix is loaded beside a stream, and is then there locally."""
    prompt = bench.prompts.draw(bench.asked.length)
    bench.clock.say(f"cold, {len(prompt)} tokens, for the loads")
    bench.on.ask(prompt)
    before = loaded_bytes(bench.pool.settle(), bench.on.name)
    waits = {"load": Waits([], [], [], [], []), "local": Waits([], [], [], [], [])}
    runs: dict[str, list[Waits]] = {"load": [], "local": []}
    ttft_s: dict[str, list[float]] = {"load": [], "local": []}
    for i in range(bench.asked.loads):
        if i % 5 == 0:
            bench.clock.say(f"load, {i + 1} of {bench.asked.loads}")
        bench.on.forget()
        for name in ("load", "local") if i < LOCAL_MAX else ("load",):
            stream, other = beside_a_stream(bench, bench.on, prompt)
            runs[name].append(Waits.of(stream, other))
            waits[name].add(runs[name][-1])
            ttft_s[name].append(other.ttft_s)
    num_bytes = loaded_bytes(bench.pool.settle(), bench.on.name) - before
    idle = waits["load"].idle + waits["local"].idle
    loading = waits["load"].arrival + waits["load"].waiting
    row: dict[str, object] = {
        "what": "load",
        "prompt_tokens": len(prompt),
        "loaded_bytes": num_bytes // bench.asked.loads,
        "ttft_s": {name: rounded(each) for name, each in ttft_s.items()},
        "idle": summary(idle),
        "loading": summary(loading),
    }
    for name, each in waits.items():
        row[name] = {
            "arrival": summary(each.arrival),
            "waiting": summary(each.waiting),
            "computing": summary(each.computing),
            "tail": summary(each.tail),
        }
    row["samples_s"] = {
        name: [
            {kind: rounded(each) for kind, each in vars(run).items() if kind != "tail"}
            for run in each_run
        ]
        for name, each_run in runs.items()
    }
    bench.results.true("waits were seen while a prefix was loaded", holds=bool(loading))
    by_run = ratios([(run.arrival + run.waiting, run.idle) for run in runs["load"]])
    if by_run:
        row |= {
            "ratio": median(by_run),
            "ratios": rounded(by_run),
            "arrival_ratio": median_ratio([(run.arrival, run.idle) for run in runs["load"]]),
            "waiting_ratio": median_ratio([(run.waiting, run.idle) for run in runs["load"]]),
            "ratio_of_longest": median_ratio(
                [
                    ([max(run.arrival + run.waiting)], [max(run.idle)])
                    for run in runs["load"]
                    if run.idle and run.arrival + run.waiting
                ]
            ),
            "ratio_of_all": round(median(loading) / median(idle), 3),
            "p99_ratio": round(percentile(loading, 99) / percentile(idle, 99), 3),
        }
        bench.results.at_most(
            "tokens while a prefix is loaded, against idle", median(by_run), LATENCY_RATIO_MAX
        )
    bench.results.true("prefixes came from the pool", holds=num_bytes > 0)
    bench.results.row(**row)


def stores(bench: Bench) -> None:
    """Add a row: a prompt is computed beside a stream, with stores and without."""
    during: dict[str, list[list[float]]] = {"on": [], "off": []}
    tails: dict[str, list[list[float]]] = {"on": [], "off": []}
    idle: dict[str, list[float]] = {"on": [], "off": []}
    ttft_s: dict[str, list[float]] = {"on": [], "off": []}
    for i in range(bench.asked.stores):
        bench.clock.say(f"store, {i + 1} of {bench.asked.stores}")
        prompt = bench.prompts.draw(bench.asked.length)
        both = [("on", bench.on), ("off", bench.off)]
        for name, replica in both if i % 2 == 0 else reversed(both):
            stream, other = beside_a_stream(bench, replica, prompt)
            waits = Waits.of(stream, other)
            during[name].append(waits.arrival + waits.waiting + waits.computing)
            tails[name].append(waits.tail)
            idle[name] += waits.idle
            ttft_s[name].append(other.ttft_s)
    flat = {name: [wait for run in runs for wait in run] for name, runs in during.items()}
    tail = {name: [wait for run in runs for wait in run] for name, runs in tails.items()}
    by_step = [
        on / off
        for run_on, run_off in zip(during["on"], during["off"], strict=True)
        for on, off in zip(run_on, run_off, strict=False)
    ]
    during_ratio = median(flat["on"]) / median(flat["off"])
    tail_ratios = ratios(list(zip(tails["on"], tails["off"], strict=True)))
    bench.results.row(
        what="store",
        prompt_tokens=bench.asked.length,
        ttft_s={name: rounded(each) for name, each in ttft_s.items()},
        during={name: summary(each) for name, each in flat.items()},
        tail={name: summary(each) for name, each in tail.items()},
        idle={name: summary(each) for name, each in idle.items()},
        during_ratio=round(during_ratio, 3),
        during_ratio_by_step=round(median(by_step), 3),
        during_p99_ratio=round(percentile(flat["on"], 99) / percentile(flat["off"], 99), 3),
        tail_ratio=median(tail_ratios),
        tail_ratios=rounded(tail_ratios),
        samples_s={
            "during": {name: [rounded(run) for run in runs] for name, runs in during.items()},
            "tail": {name: [rounded(run) for run in runs] for name, runs in tails.items()},
        },
    )
    bench.results.at_most("tokens during a prefill, on / off", during_ratio, LATENCY_RATIO_MAX)
    name = "tokens right after it, on / off"
    bench.results.at_most(name, median(tail_ratios), LATENCY_RATIO_MAX)


def add_options(made: argparse.ArgumentParser) -> None:
    """Add this script's own."""
    made.add_argument("--length", type=int, default=131_072)
    made.add_argument("--loads", type=int, default=20)
    made.add_argument("--stores", type=int, default=5)
    made.add_argument("--idle", type=int, default=16, help="tokens before the other comes")
    made.add_argument("--tail", type=int, default=12, help="tokens after the other is over")


def expected_s(asked: argparse.Namespace) -> float:
    """Return what a 27B on an H200 is expected to take."""
    cold_s = prefill_s(asked.length)
    return (
        cold_s
        + 2.5 * (asked.loads + min(asked.loads, LOCAL_MAX))
        + 2 * asked.stores * (cold_s + 1.5)
    )


def measure(bench: Bench) -> None:
    """Do both parts."""
    if bench.asked.loads:
        loads(bench)
    if bench.asked.stores:
        stores(bench)


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    add_options(made)
    asked = made.parse_args()
    longest = asked.length + STREAM_TOKENS_MAX
    with on_and_off(asked, longest=longest, expected_s=expected_s(asked)) as bench:
        measure(bench)


if __name__ == "__main__":
    main()
