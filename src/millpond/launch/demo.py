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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, cast

from millpond.launch.engine_client import Completion, EngineClient
from millpond.launch.system import System
from millpond.launch.tiny import END_OF_TEXT_ID
from millpond.model.errors import ExpectedError, RequestTimedOut
from millpond.service.client import AdminClient
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

_NUM_TOKENS: Final = 16
_WARM_UP_TOKENS: Final = 1100
_REQUEST_TIMEOUT_S: Final = 600.0
_ADMIN_TIMEOUT_S: Final = 10.0
_SETTLE_S_MAX: Final = 30.0
_POLL_S: Final = 0.01


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
        return max(_difference(self.cold, self.off), _difference(self.local, self.on))

    def other_steps_difference(self) -> float:
        return _difference(self.cold, self.on)


class Demo:
    """Asks the replicas ``a`` and ``b`` of a running system. ``on_step`` hears what is next."""

    def __init__(self, system: System, *, on_step: Callable[[str], None]) -> None:
        self._on_step = on_step
        self._a, self._b = (
            EngineClient(replica.url, replica.model, timeout_s=_REQUEST_TIMEOUT_S)
            for replica in (system.replica("a"), system.replica("b"))
        )
        self._admin = AdminClient.connect(str(system.socket), timeout_s=_ADMIN_TIMEOUT_S)

    def close(self) -> None:
        """Close the connections to replicas and pool."""
        self._a.close()
        self._b.close()
        self._admin.close()

    def run(self, options: DemoOptions) -> list[DemoRow]:
        """Return one row for each length.

        Raises ``RequestTimedOut`` where a replica does not join the pool or the pool stays
        busy, ``ExpectedError`` or ``httpx.HTTPError`` where a replica fails.
        """
        chance = random.Random(options.seed)
        self._on_step("waiting for the replicas to join the pool")
        self._wait_until(self._has_both_replicas, "a replica has not joined the pool")
        self._warm_up(chance)
        rows: list[DemoRow] = []
        for num_tokens in options.lengths:
            rounds = [
                self._round(_prompt(chance, num_tokens), f"{num_tokens}-{i}")
                for i in range(options.num_rounds)
            ]
            rows.append(_row(num_tokens, rounds))
        return rows

    def _warm_up(self, chance: random.Random) -> None:
        """Have both replicas do everything once: their first requests are slow."""
        self._on_step("warming up")
        self._round(_prompt(chance, _WARM_UP_TOKENS), "warm-up")

    def _round(self, prompt: Sequence[int], name: str) -> _Round:
        self._on_step(f"{len(prompt):,} tokens: A cold")
        cold = self._ask(self._a, prompt, f"demo-{name}-cold")
        local = self._ask(self._a, prompt, f"demo-{name}-local")
        self._wait_until(self._has_committed, "blocks are still being written")
        self._admin.switch(enabled=False)
        self._on_step(f"{len(prompt):,} tokens: B, pool off")
        off = self._ask(self._b, prompt, f"demo-{name}-off")
        self._b.reset_prefix_cache()
        self._admin.switch(enabled=True)
        read_before = self._bytes_read()
        on = self._ask(self._b, prompt, f"demo-{name}-on")
        report = self._report(on.request_id)
        return _Round(cold, local, off, on, report, self._bytes_read() - read_before)

    def _ask(self, engine: EngineClient, prompt: Sequence[int], request_id: str) -> Completion:
        try:
            return engine.complete(prompt, num_tokens=_NUM_TOKENS, request_id=request_id)
        except ValueError as error:
            raise ExpectedError(f"a replica failed: {error}") from error

    def _report(self, request_id: str) -> Report:
        self._wait_until(
            lambda: bool(self._admin.requests_named(request_id)),
            f"no report of request {request_id}",
        )
        return self._admin.requests_named(request_id)[-1][1]

    def _has_both_replicas(self) -> bool:
        service = cast(
            "Mapping[str, Sequence[Mapping[str, object]]]", self._admin.status()["service"]
        )
        joined = {(client["replica"], client["role"]) for client in service["clients"]}
        return joined >= {(name, role) for name in "ab" for role in ("scheduler", "worker")}

    def _has_committed(self) -> bool:
        """Whether everything that was computed is readable for others."""
        return self._pool_statistics()["num_write_leases"] == 0

    def _wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + _SETTLE_S_MAX
        while not condition():
            if time.monotonic() > deadline:
                raise RequestTimedOut(f"{otherwise} after {_SETTLE_S_MAX:g} s")
            time.sleep(_POLL_S)

    def _bytes_read(self) -> int:
        replicas = cast("Mapping[str, Mapping[str, int]]", self._pool_statistics()["replicas"])
        return replicas["b"]["num_bytes_read"] if "b" in replicas else 0

    def _pool_statistics(self) -> Mapping[str, object]:
        return cast("Mapping[str, object]", self._admin.status()["pool"])


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


def _difference(one: Completion, other: Completion) -> float:
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return max(abs(mine - theirs) for mine, theirs in pairs)


def _prompt(chance: random.Random, num_tokens: int) -> list[int]:
    return [chance.randrange(END_OF_TEXT_ID) for _ in range(num_tokens)]
