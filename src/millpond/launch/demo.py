"""The demonstration: one prompt, asked of two replicas, with the pool off and on.

    A cold        nobody has seen the prompt                         computes all of it
    A again       its own local cache has it                         computes the last block
    B, pool off   a moved request as it is without Millpond          computes all of it
    B, pool on    the same moved request; B has forgotten it again   loads what A wrote

Each round takes fresh prompts, so no figure profits from an earlier one. All four answers
must be the same, and the last must have been served from the pool.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from millpond.launch.asking import Asking, random_prompt
from millpond.launch.engine_client import Completion
from millpond.service.protocol import Report

NUM_REPLICAS: Final = 2
ENGINE_ARGS: Final = ("--max-num-seqs", "4", "--max-model-len", "20000")
ENGINE_ENVIRON: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

SAME_STEPS_TOLERANCE: Final = 0.001
"""Largest difference of a log-probability between requests computed in the same steps: A cold
and B with the pool off; A again and B with the pool on. The arithmetic is the same, so any
difference is wrong data."""
OTHER_STEPS_TOLERANCE: Final = 0.25
"""The same between a computed and a cached request, which the engine cuts into other steps:
rounding to 8 bits of logits of about 8 moves a log-probability by several hundredths."""

_WARM_UP_TOKENS: Final = 1100


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to ask: prompt lengths in tokens, and how often with fresh prompts."""

    lengths: tuple[int, ...]
    num_rounds: int
    seed: int


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One prompt length: medians over the rounds, and what was checked in all of them."""

    prompt_tokens: int
    cold_ttft_s: float
    local_ttft_s: float
    moved_off_ttft_s: float
    moved_on_ttft_s: float
    loaded_bytes: int
    identical: bool
    loaded_tokens: int
    written_by: dict[str, int]
    same_steps_logprob_difference: float
    other_steps_logprob_difference: float
    num_rounds: int

    def as_json(self) -> dict[str, object]:
        """Return the row as plain values."""
        return asdict(self)

    def faults(self) -> list[str]:
        """Return what is wrong with this row, for people; empty if nothing is."""
        found: list[str] = []
        if not self.identical:
            found.append(f"{self.prompt_tokens} tokens: the outputs differ")
        if self.loaded_tokens == 0:
            found.append(
                f"{self.prompt_tokens} tokens: the moved request was not served by the pool"
            )
        return found


@dataclass(frozen=True, slots=True)
class _Round:
    """One prompt's four answers."""

    cold: Completion
    local: Completion
    off: Completion
    on: Completion
    on_report: Report
    loaded_bytes: int

    def same_tokens(self) -> bool:
        answers = (self.cold, self.local, self.off, self.on)
        return len({answer.token_ids for answer in answers}) == 1

    def same_steps_difference(self) -> float:
        return max(self.cold.logprob_difference(self.off), self.local.logprob_difference(self.on))

    def other_steps_difference(self) -> float:
        return self.cold.logprob_difference(self.on)


class Demo(Asking):
    """Compares cold, local and moved requests on the replicas ``a`` and ``b``."""

    def run(self, options: DemoOptions) -> list[DemoRow]:
        """Return one row for each length.

        Raises ``RequestTimedOut`` where a replica does not join the pool or the pool stays
        busy, ``ExpectedError`` or ``httpx.HTTPError`` where a replica fails.
        """
        chance = random.Random(options.seed)
        self._wait_joined()
        self._warm_up(chance)
        rows: list[DemoRow] = []
        for num_tokens in options.lengths:
            rounds = [
                self._round(random_prompt(chance, num_tokens), f"{num_tokens}-{i}")
                for i in range(options.num_rounds)
            ]
            rows.append(_row(num_tokens, rounds))
        return rows

    def _warm_up(self, chance: random.Random) -> None:
        """Have both replicas do everything once: their first requests are slow."""
        self._on_step("warming up")
        self._round(random_prompt(chance, _WARM_UP_TOKENS), "warm-up")

    def _round(self, prompt: Sequence[int], name: str) -> _Round:
        self._on_step(f"{len(prompt):,} tokens: A cold")
        cold = self._ask(self._a, prompt, f"demo-{name}-cold")
        local = self._ask(self._a, prompt, f"demo-{name}-local")
        self._wait_committed()
        self._admin.switch(enabled=False)
        self._on_step(f"{len(prompt):,} tokens: B, pool off")
        off = self._ask(self._b, prompt, f"demo-{name}-off")
        self._b.reset_prefix_cache()
        self._admin.switch(enabled=True)
        read_before = self._bytes_read_by_b()
        on = self._ask(self._b, prompt, f"demo-{name}-on")
        report = self._report(on.request_id)
        return _Round(cold, local, off, on, report, self._bytes_read_by_b() - read_before)


def _row(num_tokens: int, rounds: Sequence[_Round]) -> DemoRow:
    same_steps = max(each.same_steps_difference() for each in rounds)
    other_steps = max(each.other_steps_difference() for each in rounds)
    last = rounds[-1]
    return DemoRow(
        prompt_tokens=num_tokens,
        cold_ttft_s=statistics.median(each.cold.ttft_s for each in rounds),
        local_ttft_s=statistics.median(each.local.ttft_s for each in rounds),
        moved_off_ttft_s=statistics.median(each.off.ttft_s for each in rounds),
        moved_on_ttft_s=statistics.median(each.on.ttft_s for each in rounds),
        loaded_bytes=last.loaded_bytes,
        identical=(
            all(each.same_tokens() for each in rounds)
            and same_steps <= SAME_STEPS_TOLERANCE
            and other_steps <= OTHER_STEPS_TOLERANCE
        ),
        loaded_tokens=min(each.on_report.loaded_tokens for each in rounds),
        written_by=dict(last.on_report.writers),
        same_steps_logprob_difference=same_steps,
        other_steps_logprob_difference=other_steps,
        num_rounds=len(rounds),
    )
