"""Cold prefill with Millpond against an engine without it, and two traps of vLLM 0.26.

    python benchmarks/gpu/cold.py --model MODEL [--engine JSON] [--json PATH]
                                  [--lengths 32768x5,131072x5,261900x3] [--exact 32768x3,131072x1]
                                  [--diverging 3] [--order exact,cold,diverging]

Two engines on one GPU: "on" has the connector, "off" has none at all. Random prompts, each used
once by either, ON OFF OFF ON:

- cold: time to the first token, and the tokens, of prompts that nobody has seen. Then "on"
  forgets its own prefixes and answers again, from the pool: the tokens have to be those of "off".
- exact: a prompt of whole blocks, asked again on the same engine. 0.26 keeps the state at its
  end, from which it cannot resume, and computes everything after the last step's end again.
  Millpond keeps the state one block earlier. Lengths are taken one block under a multiple of
  the largest step, where most is lost.
- diverging: a prompt that shares blocks with one before, of which the engine has attention
  pages and no recurrent state. 0.26 takes that for a hit with any connector on a hybrid model
  and answers wrongly. "unmended" is the "on" engine with Millpond's remedy taken away for this
  one request, and "alone" the "off" engine with nothing cached. Log-probabilities are compared.

A 27B hybrid in fp8 on one H200 takes about eleven minutes: 2 for the start of the engines, 1 for
diverging and exact, 0.5 for 32k, 2.5 for 128k and 4.5 for 256k. Ends with 1 where a median of
the ratios is above 1.02, where tokens differ, or where the remedies do not help.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from engines import Answer, Ask, Replica
from runs import Bench, counts, median, on_and_off, parser, prefill_s, rounded

COLD_RATIO_MAX = 1.02
EXACT_RATIO_MAX = 0.5
NUM_TOKENS = 16
NUM_LOGPROBS = 20
AGAIN_REPEATS = 3
DIVERGING_TOKENS_MAX = 10_000
"""Of prompts that share half a step, where that is so long."""
SAME_MAX = 0.15
"""Between two ways to cut the same prompt into steps; a wrong state changes several times that."""


def ask_both(bench: Bench, number: int, ask: Callable[[Replica], Answer]) -> tuple[Answer, Answer]:
    """Ask both, in turns of ON OFF OFF ON; return the answers as on, off."""
    answers: dict[str, Answer] = {}
    for replica in [bench.on, bench.off] if number % 2 == 0 else [bench.off, bench.on]:
        answers[replica.name] = ask(replica)
        bench.pool.settle()  # or the copies of one would go on beside the other
    return answers["on"], answers["off"]


def cold(bench: Bench, length: int, number: int) -> None:
    """Add a row: fresh prompts of one length."""
    on_s: list[float] = []
    off_s: list[float] = []
    loaded_s: list[float] = []
    same: list[bool] = []
    same_loaded: list[bool] = []
    distinct: list[int] = []
    loaded_tokens: list[int] = []
    for i in range(number):
        bench.clock.say(f"cold, {length} tokens, {i + 1} of {number}")
        prompt = bench.prompts.draw(length)
        on, off = ask_both(bench, i, lambda replica, prompt=prompt: replica.ask(prompt, NUM_TOKENS))
        bench.on.forget()
        loaded = bench.on.ask(prompt, NUM_TOKENS)
        bench.pool.settle()
        on_s.append(on.ttft_s)
        off_s.append(off.ttft_s)
        loaded_s.append(loaded.ttft_s)
        loaded_tokens.append(loaded.cached_tokens or 0)
        same.append(on.tokens == off.tokens)
        same_loaded.append(loaded.tokens == off.tokens)
        distinct.append(len({*off.tokens, prompt[-1]}) - 1)
    ratios = [a / b for a, b in zip(on_s, off_s, strict=True)]
    bench.forget()
    bench.results.row(
        what="cold",
        prompt_tokens=length,
        on_s=rounded(on_s),
        off_s=rounded(off_s),
        on_median_s=median(on_s),
        off_median_s=median(off_s),
        ratios=rounded(ratios),
        ratio=median(ratios),
        loaded_s=rounded(loaded_s),
        loaded_tokens=loaded_tokens,
        same_tokens=same,
        same_tokens_loaded=same_loaded,
        distinct_tokens=distinct,
    )
    bench.results.at_most(f"cold at {length}, on / off", median(ratios), COLD_RATIO_MAX)
    bench.results.true(f"same {NUM_TOKENS} tokens, cold at {length}", holds=all(same))
    name = f"same {NUM_TOKENS} tokens, loaded at {length} and without the pool"
    bench.results.true(name, holds=all(same_loaded) and all(loaded_tokens))


def exact(bench: Bench, length: int, number: int) -> None:
    """Add a row: prompts of whole blocks, again on the same engine."""
    facts = bench.on.facts
    num_tokens = max(1, length // facts.step_tokens) * facts.step_tokens - facts.block_tokens
    again: dict[str, list[list[float]]] = {"on": [], "off": []}
    cold_s: dict[str, list[float]] = {"on": [], "off": []}
    same: list[bool] = []
    for i in range(number):
        bench.clock.say(f"exact multiple, {num_tokens} tokens, {i + 1} of {number}")
        prompt = bench.prompts.draw(num_tokens)
        firsts = ask_both(bench, i, lambda replica, prompt=prompt: replica.ask(prompt))
        for replica, first in zip((bench.on, bench.off), firsts, strict=True):
            answers = [replica.ask(prompt) for _ in range(AGAIN_REPEATS)]
            cold_s[replica.name].append(first.ttft_s)
            again[replica.name].append(rounded(answer.ttft_s for answer in answers))
            same.append(all(answer.tokens == first.tokens for answer in answers))
    bench.forget()
    firsts_s = {name: median([each[0] for each in rows]) for name, rows in again.items()}
    bench.results.row(
        what="exact",
        prompt_tokens=num_tokens,
        blocks=num_tokens // facts.block_tokens,
        cold_s={name: rounded(values) for name, values in cold_s.items()},
        again_s=again,
        first_again_median_s=firsts_s,
        ratio=round(firsts_s["on"] / firsts_s["off"], 3),
        same_tokens=same,
    )
    bench.results.at_most(
        f"exact multiple of {num_tokens} again, on / off",
        firsts_s["on"] / firsts_s["off"],
        EXACT_RATIO_MAX,
    )
    bench.results.true(f"same token, exact multiple of {num_tokens} again", holds=all(same))


def logprob_distance(left: Answer, right: Answer) -> float:
    """Return the largest difference of the first token's log-probabilities.

    Of the candidates that both have; where those are fewer than half, infinite.
    """
    first, second = left.logprobs[0], right.logprobs[0]
    common = first.keys() & second.keys()
    if len(common) < len(first) / 2:
        return float("inf")
    return max(abs(first[token] - second[token]) for token in common)


@dataclass
class Case:
    """Two prompts that share blocks, and what the engines say to the second one."""

    earlier: list[int]
    later: list[int]
    answers: dict[str, Answer]

    def distance(self, name: str) -> float:
        """Return how far an answer is from that of the engine with nothing cached."""
        return logprob_distance(self.answers[name], self.answers["alone"])


def ask_later(bench: Bench, case: Case, *, mended: bool) -> Answer:
    """Ask the "on" engine both prompts, the second one with the remedy or without."""
    bench.forget()
    bench.on.mend(enabled=True)
    bench.on.ask(case.earlier)
    bench.pool.settle()
    bench.on.mend(enabled=mended)
    answer = bench.on.serve([Ask(case.later, NUM_TOKENS, num_logprobs=NUM_LOGPROBS)])[0]
    bench.on.mend(enabled=True)
    return answer


def diverging(bench: Bench, number: int) -> None:
    """Add rows of pairs of prompts of which the second hits attention pages alone."""
    block, step = bench.on.facts.block_tokens, bench.on.facts.step_tokens
    most = DIVERGING_TOKENS_MAX // block - 2
    shared = max(1, min(step // block // 2, most)) * block
    cases: list[Case] = []
    for i in range(number):
        bench.clock.say(f"diverging hits, {i + 1} of {number}")
        earlier = bench.prompts.draw(shared + block + block // 2)
        case = Case(earlier, earlier[:shared] + bench.prompts.draw(1 + 16 * i), {})
        bench.off.forget()
        ask = Ask(case.later, NUM_TOKENS, num_logprobs=NUM_LOGPROBS)
        case.answers["alone"] = bench.off.serve([ask])[0]
        case.answers["mended"] = ask_later(bench, case, mended=True)
        cases.append(case)
        bench.results.row(what="diverging, with the remedy", **figures(case, "mended"))
    worst = max((case.distance("mended") for case in cases), default=0.0)
    bench.results.at_most("diverging hits with the remedy, log-probabilities", worst, SAME_MAX)
    # Last of all: an engine that is left as it was shipped may not survive it.
    if not bench.on.mend(enabled=True):
        bench.results.say(remedy="not needed by this version of vLLM")
        return
    for case in cases:
        try:
            case.answers["unmended"] = ask_later(bench, case, mended=False)
        except (RuntimeError, EOFError, OSError) as error:
            bench.results.row(what="diverging, without the remedy", engine_died=repr(error)[-500:])
            return
        bench.results.row(what="diverging, without the remedy", **figures(case, "unmended"))
    wrong = max((case.distance("unmended") for case in cases), default=0.0)
    bench.results.true("diverging hits without the remedy are wrong", holds=wrong > SAME_MAX)


def figures(case: Case, name: str) -> dict[str, object]:
    """Return what is said of one answer beside that of the engine with nothing cached."""
    answer, alone = case.answers[name], case.answers["alone"]
    return {
        "prompt_tokens": len(case.later),
        "cached_tokens": answer.cached_tokens,
        "ttft_s": round(answer.ttft_s, 4),
        "ttft_alone_s": round(alone.ttft_s, 4),
        "logprob_distance": str(round(case.distance(name), 4)),
        "num_same_tokens": f"{_same(answer, alone)} of {len(alone.tokens)}",
        "top_logprobs": [round(value, 3) for value in _top(answer)],
        "top_logprobs_alone": [round(value, 3) for value in _top(alone)],
    }


def _same(left: Answer, right: Answer) -> int:
    return sum(a == b for a, b in zip(left.tokens, right.tokens, strict=True))


def _top(answer: Answer) -> list[float]:
    return sorted(answer.logprobs[0].values(), reverse=True)[:3]


def add_options(made: argparse.ArgumentParser) -> None:
    """Add this script's own."""
    made.add_argument("--lengths", default="32768x5,131072x5,261900x3")
    made.add_argument("--exact", default="32768x3,131072x1")
    made.add_argument("--diverging", type=int, default=3)
    made.add_argument("--order", default="exact,cold,diverging")


def longest(asked: argparse.Namespace) -> int:
    """Return the tokens of the longest prompt."""
    diverging_max = DIVERGING_TOKENS_MAX if "diverging" in asked.order and asked.diverging else 1
    return max((*counts(asked.lengths), *counts(asked.exact), diverging_max))


def expected_s(asked: argparse.Namespace) -> float:
    """Return what a 27B on an H200 is expected to take."""
    lengths = [*counts(asked.lengths).items(), *counts(asked.exact).items()]
    return sum(2 * number * (prefill_s(length) + 0.7) for length, number in lengths) + (
        8 * asked.diverging
    )


def measure(bench: Bench) -> None:
    """Do all parts in their order."""
    for part in bench.asked.order.split(","):
        if part == "diverging" and bench.asked.diverging:
            diverging(bench, bench.asked.diverging)
        for length, number in counts(bench.asked.exact).items() if part == "exact" else ():
            exact(bench, length, number)
        for length, number in counts(bench.asked.lengths).items() if part == "cold" else ():
            cold(bench, length, number)


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    add_options(made)
    asked = made.parse_args()
    with on_and_off(asked, longest=longest(asked), expected_s=expected_s(asked)) as bench:
        measure(bench)


if __name__ == "__main__":
    main()
