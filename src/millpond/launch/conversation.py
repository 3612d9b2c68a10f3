"""A conversation through the router: each turn lands on another replica, with the pool off and on.

    pool off   each replica has heard half of it, and computes what the other one has heard
    pool on    each loads what the other one wrote, and computes what is new

Both have the same words. A cache salt of their own keeps them apart in every cache, so that the
second finds nothing of the first. What the router's access log says of each request is summed,
and has to be what engines and pool have counted.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, cast

from millpond.launch.asking import Asking, random_prompt
from millpond.launch.demo import OTHER_STEPS_TOLERANCE
from millpond.launch.engine_client import Completion, EngineClient
from millpond.launch.system import System

SOURCES: Final = ("computed", "local", "loaded")
ROUTER_POLICY: Final = "alternate"
_REPLICAS: Final = ("a", "b")
_SOURCES_OF_ENGINE: Final = {
    "computed": "local_compute",
    "local": "local_cache_hit",
    "loaded": "external_kv_transfer",
}

Tokens = Mapping[str, Mapping[str, int]]
"""Prompt tokens by replica and source."""


@dataclass(frozen=True, slots=True)
class ConversationOptions:
    """What is said: tokens of the first turn, and of each later one."""

    first_tokens: int
    next_tokens: int
    num_turns: int
    seed: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: its client's time, and what the router's access log says of it.

    ``attribution`` is where the log has the tokens from: ``pool`` where the replica told.
    """

    number: int
    prompt_tokens: int
    ttft_s: float
    replica: str
    prefix_holder: str | None
    is_moved: bool
    attribution: str
    computed_tokens: int
    local_tokens: int
    pool_own_tokens: int
    pool_other_tokens: int
    written_by: Mapping[str, int]

    @property
    def loaded_tokens(self) -> int:
        """Tokens from the pool."""
        return self.pool_own_tokens + self.pool_other_tokens

    def tokens_of(self, source: str) -> int:
        """Return the tokens of one of SOURCES."""
        return {
            "computed": self.computed_tokens,
            "local": self.local_tokens,
            "loaded": self.loaded_tokens,
        }[source]


@dataclass(frozen=True, slots=True)
class Conversation:
    """The same conversation twice, and its tokens as three parties count them."""

    off: Sequence[Turn]
    on: Sequence[Turn]
    identical: bool
    logprob_difference: float
    counts: Mapping[str, Tokens]

    @property
    def off_ttft_s(self) -> float:
        """What a client has waited for first tokens, all turns together, with the pool off."""
        return sum(turn.ttft_s for turn in self.off)

    @property
    def on_ttft_s(self) -> float:
        """The same with the pool on."""
        return sum(turn.ttft_s for turn in self.on)

    def as_json(self) -> dict[str, object]:
        """Return everything as plain values."""
        return {"off_ttft_s": self.off_ttft_s, "on_ttft_s": self.on_ttft_s, **asdict(self)}

    def faults(self) -> list[str]:
        """Return what is wrong, for people; empty if nothing is."""
        found = [] if self.identical else ["conversation: the outputs differ"]
        for pool, turns in (("off", self.off), ("on", self.on)):
            for turn in turns:
                found += [
                    f"conversation, pool {pool}, turn {turn.number}: {what}"
                    for what in _faults(turn, pool)
                ]
        first, *others = self.counts
        found += [
            f"conversation: {first} counts the tokens {self.counts[first]}, "
            f"{other} {self.counts[other]}"
            for other in others
            if self.counts[other] != self.counts[first]
        ]
        return found


def _faults(turn: Turn, pool: str) -> list[str]:
    found: list[str] = []
    if turn.attribution != "pool":
        found.append("nobody has told where its tokens came from")
    if turn.number > 1 and not turn.is_moved:
        found.append("it did not move")
    if turn.number > 1 and pool == "on" and turn.pool_other_tokens == 0:
        found.append("it was not served by what the other replica wrote")
    if pool == "off" and turn.loaded_tokens:
        found.append("it was served by a pool that is off")
    return found


class Conversing(Asking):
    """Has a conversation with the router of a system whose policy is ROUTER_POLICY."""

    def __init__(self, system: System, *, on_step: Callable[[str], None]) -> None:
        super().__init__(system, on_step=on_step)
        self._access_log = system.front.access_log
        self._router = self._client(system.front.url, system.options.model)

    def close(self) -> None:
        """Close all connections."""
        self._router.close()
        super().close()

    def run(self, options: ConversationOptions) -> Conversation:
        """Return the conversation with the pool off and on, which it leaves on.

        Raises what ``Demo.run`` does.
        """
        self._wait_joined()
        chance = random.Random(options.seed)
        lengths = (options.first_tokens, *[options.next_tokens] * (options.num_turns - 1))
        words = [random_prompt(chance, length) for length in lengths]
        told_before, counted_before = self._told_by_pool(), self._counted_by_engines()
        off = self._converse(words, "off")
        on = self._converse(words, "on")
        turns = {pool: self._turns(answers) for pool, answers in (("off", off), ("on", on))}
        return Conversation(
            off=turns["off"],
            on=turns["on"],
            identical=are_identical(off, on),
            logprob_difference=largest_difference(off, on),
            counts={
                "router": _sums([*turns["off"], *turns["on"]]),
                "pool": _grown(told_before, self._told_by_pool()),
                "engines": _grown(counted_before, self._counted_by_engines()),
            },
        )

    def _converse(self, words: Sequence[Sequence[int]], pool: str) -> list[Completion]:
        self._admin.switch(enabled=pool == "on")
        prompt: list[int] = []
        answers: list[Completion] = []
        for i, said in enumerate(words):
            prompt += said
            name = f"demo-{pool}-turn-{i + 1}"
            self._on_step(f"conversation, pool {pool}: turn {i + 1}, {len(prompt):,} tokens")
            answers.append(self._ask(self._router, prompt, name, fields={"cache_salt": pool}))
            prompt += answers[-1].token_ids
            self._wait_committed()  # the client reads, and thinks
        return answers

    def _turns(self, answers: Sequence[Completion]) -> list[Turn]:
        return [
            _turn(i + 1, answer.ttft_s, self._logged(answer.request_id))
            for i, answer in enumerate(answers)
        ]

    def _logged(self, request_id: str) -> Mapping[str, object]:
        """Return the line of the access log about a request, which is written after its end."""
        found: dict[str, Mapping[str, object]] = {}

        def is_there() -> bool:
            with self._access_log.open(encoding="utf-8") as lines:
                found.update((each["request_id"], each) for each in map(json.loads, lines))
            return request_id in found

        self._wait_until(is_there, f"the router has not logged request {request_id}")
        return found[request_id]

    def _told_by_pool(self) -> Tokens:
        told = cast("Mapping[str, Mapping[str, int]]", self._admin.status()["tokens"])
        return {
            name: {source: told.get(name, {}).get(f"{source}_tokens", 0) for source in SOURCES}
            for name in _REPLICAS
        }

    def _counted_by_engines(self) -> Tokens:
        return {
            name: _of_engine(engine)
            for name, engine in zip(_REPLICAS, (self._a, self._b), strict=True)
        }


def are_identical(some: Sequence[Completion], others: Sequence[Completion]) -> bool:
    """Return whether answers have the same tokens, about as probable: steps may differ."""
    return [each.token_ids for each in some] == [each.token_ids for each in others] and (
        largest_difference(some, others) <= OTHER_STEPS_TOLERANCE
    )


def largest_difference(some: Sequence[Completion], others: Sequence[Completion]) -> float:
    """Return the largest difference of log-probabilities, token by token."""
    return max(one.logprob_difference(other) for one, other in zip(some, others, strict=True))


def _of_engine(engine: EngineClient) -> Mapping[str, int]:
    counted = engine.prompt_tokens_by_source()
    return {source: counted.get(name, 0) for source, name in _SOURCES_OF_ENGINE.items()}


def _turn(number: int, ttft_s: float, line: Mapping[str, object]) -> Turn:
    attribution = cast("Mapping[str, int]", line["attribution"])
    return Turn(
        number=number,
        prompt_tokens=attribution["prompt_tokens"],
        ttft_s=ttft_s,
        replica=cast("str", line["replica"]),
        prefix_holder=cast("str | None", line["prefix_holder"]),
        is_moved=cast("bool", line["is_moved"]),
        attribution=cast("str", attribution["source"]),
        computed_tokens=attribution["computed_tokens"],
        local_tokens=attribution["local_tokens"],
        pool_own_tokens=attribution["pool_own_tokens"],
        pool_other_tokens=attribution["pool_other_tokens"],
        written_by=cast("Mapping[str, int]", attribution["writers"]),
    )


def _sums(turns: Sequence[Turn]) -> Tokens:
    return {
        name: {
            source: sum(turn.tokens_of(source) for turn in turns if turn.replica == name)
            for source in SOURCES
        }
        for name in _REPLICAS
    }


def _grown(before: Tokens, after: Tokens) -> Tokens:
    return {
        name: {source: count - before[name][source] for source, count in sources.items()}
        for name, sources in after.items()
    }
