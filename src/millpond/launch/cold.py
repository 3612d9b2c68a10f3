"""What the pool costs a request that it cannot help: cold prefill with the pool off and on.

Each pair asks one fresh prompt of replica ``a`` twice, once with the pool off and once with it
on, and the order changes from pair to pair: OFF-ON, ON-OFF, OFF-ON and so on. Both are cold:
the replica's own cache is emptied between them, and with the pool off nothing is found or
kept. With the pool on, all blocks are looked up and stored.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from millpond.launch.asking import Asking, random_prompt
from millpond.model.errors import ExpectedError

_WARM_UP_PAIRS: Final = 2


@dataclass(frozen=True, slots=True)
class ColdPair:
    """Time to the first token of one prompt, in seconds."""

    off_ttft_s: float
    on_ttft_s: float


class ColdPairs(Asking):
    """See the module."""

    def run(self, *, num_tokens: int, num_pairs: int, seed: int) -> list[ColdPair]:
        """Return the pairs in their order, without the two that warm up.

        Raises ``ExpectedError`` where a replica fails or a request was not what it should be.
        """
        chance = random.Random(seed)
        self._wait_joined()
        try:
            pairs = [
                self._pair(random_prompt(chance, num_tokens), i)
                for i in range(_WARM_UP_PAIRS + num_pairs)
            ]
        finally:
            self._admin.switch(enabled=True)
        return pairs[_WARM_UP_PAIRS:]

    def _pair(self, prompt: Sequence[int], number: int) -> ColdPair:
        order = (False, True) if number % 2 == 0 else (True, False)
        seconds = {is_on: self._cold(prompt, number, is_on=is_on) for is_on in order}
        return ColdPair(off_ttft_s=seconds[False], on_ttft_s=seconds[True])

    def _cold(self, prompt: Sequence[int], number: int, *, is_on: bool) -> float:
        name = f"cold-{number}-{'on' if is_on else 'off'}"
        self._on_step(f"{len(prompt):,} tokens: {name}")
        self._admin.switch(enabled=is_on)
        self._a.reset_prefix_cache()
        written_before = self._count("a", "num_blocks_written")
        ttft_s = self._ask(self._a, prompt, name).ttft_s
        self._wait_committed()
        report = self._report(name)
        if report.computed_tokens != len(prompt):
            raise ExpectedError(f"{name} computed {report.computed_tokens} of {len(prompt)} tokens")
        has_written = self._count("a", "num_blocks_written") > written_before
        if has_written != is_on:
            raise ExpectedError(f"{name} {'wrote' if has_written else 'did not write'} blocks")
        return ttft_s
