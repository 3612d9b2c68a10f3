"""Six-turn sessions on two replicas, alternating and fixed, without the pool and with it.

    python benchmarks/gpu/sessions.py --model MODEL [--same-gpu] [--engine JSON] [--json PATH]
                                      [--sessions 32768x5,131072x5] [--group 2] [--no-decode]

A session begins with so many tokens on replica a, and grows by an answer of --output tokens and
--growth new ones a turn. Its further turns go to b, a, b, ... ("alternate") or stay on a
("fixed"). Figure: the sum of the times to the first token of all turns.

The pool is switched, not the engines restarted: "off" is the same two engines with the pool
switched off, and both engines and the pool forget everything before each turn-over.
To save time the sessions of a group go through their turns in step, as many as engine and pool
hold beside each other (--group; a pool of 64 GiB holds five of 128k): first tokens one at a
time, with nothing else going on, then the rest of all answers of a turn as one batch. Both ways
of a session share its first turn, and differ in what they add from the second turn on, so that
neither finds the other's.
--no-decode draws answers instead of decoding them, so that the next turn computes them too.

A 27B hybrid in fp8, with two GPUs: 2 minutes for the start, 2.5 for five sessions from 32k, and
5.5 for five from 128k; on one GPU (--same-gpu) a group holds two sessions of 128k, and these
take 7. With --no-decode it is 1.2 and 4.2. Ends with 1 where alternating sessions gain
less than the founding study's 35 % (45 % from 100k on), or fixed ones differ by more than 3 %.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from engines import Answer, Ask, Replica
from runs import (
    LONG_TOKENS,
    STARTS_S,
    Clock,
    Pool,
    Prompts,
    Results,
    counts,
    forget,
    loaded_bytes,
    median,
    parser,
    prefill_s,
    rounded,
    running_pair,
)

from millpond.config.values import parse_size

WAYS = ("alternate", "fixed")
GAIN_MIN = 0.35
GAIN_LONG_MIN = 0.45
FIXED_RATIO_MAX = 1.03
USABLE_RATIO = 0.85
"""Of an engine's memory: the rest is recurrent states that nobody comes back to."""


@dataclass
class Session:
    """What a session says, the same in every arm, and how it went in this one."""

    start: list[int]
    growth: dict[str, list[list[int]]]
    drawn_answers: list[list[int]]
    contexts: dict[str, list[int]] = field(default_factory=dict)
    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)

    def begin(self) -> None:
        """Go back to the first turn."""
        self.contexts = {way: list(self.start) for way in WAYS}
        self.ttft_s = {way: [] for way in WAYS}
        self.tokens = {way: [] for way in WAYS}
        self.prompts = {way: [] for way in WAYS}

    def answered(self, way: str, turn: int, answer: Sequence[int]) -> None:
        """Add an answer and what comes after it."""
        self.contexts[way] += [*answer, *self.growth[way][turn]]

    def asked(self, way: str, answer: Answer) -> None:
        """Note a first token, and to what it was the answer."""
        self.ttft_s[way].append(answer.ttft_s)
        self.tokens[way].append(answer.tokens[0])
        self.prompts[way].append(hash(tuple(self.contexts[way])))


@dataclass
class Talks:
    """What all groups need."""

    a: Replica
    b: Replica
    pool: Pool
    prompts: Prompts
    results: Results
    clock: Clock
    asked: argparse.Namespace

    def draw(self, length: int) -> Session:
        """Return a new session."""
        asked = self.asked
        return Session(
            start=self.prompts.draw(length),
            growth={
                way: [self.prompts.draw(asked.growth) for _ in range(asked.turns)] for way in WAYS
            },
            drawn_answers=[self.prompts.draw(asked.output - 1) for _ in range(asked.turns)],
        )

    def forget(self) -> None:
        """Leave nothing cached."""
        forget(self.pool, self.a, self.b)

    def replica(self, way: str, turn: int) -> Replica:
        """Return where a turn goes; the first is turn 0."""
        return self.b if way == "alternate" and turn % 2 else self.a

    def loaded(self) -> int:
        """Return the bytes that both replicas have loaded so far."""
        status = self.pool.settle()
        return loaded_bytes(status, "a") + loaded_bytes(status, "b")


def run_turns(talks: Talks, group: list[Session]) -> dict[str, list[int]]:
    """Take a group through all its turns; return the bytes loaded, by way and turn."""
    loads: dict[str, list[int]] = {way: [] for way in WAYS}
    for session in group:
        session.begin()
    for turn in range(talks.asked.turns):
        # Both ways are still the same session: asked once, counted for either.
        for way in WAYS[:1] if turn == 0 else WAYS:
            before = talks.loaded()
            for session in group:
                answer = talks.replica(way, turn).ask(session.contexts[way])
                for counted in WAYS if turn == 0 else (way,):
                    session.asked(counted, answer)
            num_bytes = talks.loaded() - before
            for counted in WAYS if turn == 0 else (way,):
                loads[counted].append(num_bytes)
        if turn + 1 < talks.asked.turns:
            answer_all(talks, group, turn)
    return loads


def answer_all(talks: Talks, group: list[Session], turn: int) -> None:
    """Make the rest of all answers of a turn, by both replicas at once."""
    ways = WAYS[:1] if turn == 0 else WAYS
    places = [(session, way) for session in group for way in ways]
    rest: dict[int, list[int]] = {}
    if talks.asked.no_decode:
        rest = {i: session.drawn_answers[turn] for i, (session, _) in enumerate(places)}
    else:
        waiting = []
        for replica in (talks.a, talks.b):
            mine = [i for i, (_, way) in enumerate(places) if talks.replica(way, turn) is replica]
            asks = [_go_on(*places[i], talks.asked.output - 1) for i in mine]
            if asks:
                waiting.append((mine, replica.begin(asks)))
        for mine, answers in waiting:
            rest |= {i: answer.tokens for i, answer in zip(mine, answers(), strict=True)}
    for i, (session, way) in enumerate(places):
        for counted in WAYS if turn == 0 else (way,):
            session.answered(counted, turn, [session.tokens[counted][-1], *rest[i]])


def _go_on(session: Session, way: str, num_tokens: int) -> Ask:
    return Ask([*session.contexts[way], session.tokens[way][-1]], num_tokens)


def run_length(talks: Talks, length: int, number: int) -> None:
    """Add a row for each group of sessions, and one for all of them."""
    size = talks.asked.group or group_size(talks, length)
    sums: dict[str, dict[str, list[float]]] = {
        cache: {way: [] for way in WAYS} for cache in ("off", "on")
    }
    for first in range(0, number, size):
        group = [talks.draw(length) for _ in range(min(size, number - first))]
        order = ("off", "on") if first // size % 2 == 0 else ("on", "off")
        firsts: dict[str, list[tuple[int, int]]] = {}
        arms: dict[str, object] = {}
        for cache in order:
            talks.clock.say(
                f"{length} tokens, sessions {first + 1} to {first + len(group)}, {cache}"
            )
            talks.forget()
            talks.pool.switch(enabled=cache == "on")
            loads = run_turns(talks, group)
            talks.pool.switch(enabled=True)
            firsts[cache] = [first for session in group for first in first_tokens(session)]
            for way in WAYS:
                sums[cache][way] += [sum(session.ttft_s[way]) for session in group]
            arms[cache] = {
                "ttft_s": [
                    {way: rounded(each) for way, each in session.ttft_s.items()}
                    for session in group
                ],
                "loaded_bytes_by_turn": loads,
            }
        talks.results.row(
            what="group",
            start_tokens=length,
            order=order,
            first_tokens=compare(firsts["off"], firsts["on"]),
            **arms,
        )
    talks.forget()
    summarize(talks, length, sums)


def first_tokens(session: Session) -> list[tuple[int, int]]:
    """Return (what was asked, the first token) of all turns, both ways."""
    return [
        pair for way in WAYS for pair in zip(session.prompts[way], session.tokens[way], strict=True)
    ]


def compare(off: Sequence[tuple[int, int]], on: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Count first tokens that are the same, of the turns that were asked the same in both arms.

    Arms cut prompts into other steps, so an answer may differ where two tokens are as likely;
    what follows in that session is then not the same question.
    """
    pairs = list(zip(off, on, strict=True))
    asked_alike = [(left[1], right[1]) for left, right in pairs if left[0] == right[0]]
    same = sum(left == right for left, right in asked_alike)
    return {"turns": len(pairs), "asked_alike": len(asked_alike), "same": same}


def summarize(talks: Talks, length: int, sums: dict[str, dict[str, list[float]]]) -> None:
    """Add the row of all sessions from one length, and its bounds."""
    ratios = {
        way: [on / off for on, off in zip(sums["on"][way], sums["off"][way], strict=True)]
        for way in WAYS
    }
    gain = 1 - median(ratios["alternate"])
    talks.results.row(
        what="sessions",
        start_tokens=length,
        number=len(ratios["fixed"]),
        sum_of_ttft_s={
            cache: {way: rounded(each) for way, each in ways.items()}
            for cache, ways in sums.items()
        },
        medians_s={
            cache: {way: median(each) for way, each in ways.items()} for cache, ways in sums.items()
        },
        ratios={way: rounded(each) for way, each in ratios.items()},
        alternate_gain=round(gain, 3),
        fixed_ratio=median(ratios["fixed"]),
    )
    least = GAIN_LONG_MIN if length >= LONG_TOKENS else GAIN_MIN
    talks.results.at_least(f"gain of alternating from {length}", gain, least)
    for_fixed = f"fixed from {length}, on / off"
    talks.results.at_most(for_fixed, median(ratios["fixed"]), FIXED_RATIO_MAX)
    talks.results.at_least(for_fixed, median(ratios["fixed"]), 2 - FIXED_RATIO_MAX)


def group_size(talks: Talks, length: int) -> int:
    """Return how many sessions the smaller engine keeps beside each other, both ways of each.

    The pool has to hold them too.
    """
    asked = talks.asked
    needed = first_turn = 0.0
    for replica in (talks.a, talks.b):
        facts = replica.facts
        # One state for each step of the first turn, as large as three blocks in a 27B hybrid.
        first_turn = length * (1 + 3 * facts.block_tokens / facts.step_tokens)
        turn = asked.growth + asked.output + 2 * facts.block_tokens
        whole = first_turn + len(WAYS) * asked.turns * turn
        needed = max(needed, whole / facts.num_kv_tokens)
    session_bytes = first_turn * talks.a.facts.attention_token_bytes
    in_pool = parse_size(asked.pool) * USABLE_RATIO / session_bytes
    return max(1, int(min(USABLE_RATIO / needed, in_pool)))


def expected_s(asked: argparse.Namespace) -> float:
    """Return what a 27B on H200s is expected to take, engine starts included."""
    total_s = STARTS_S if asked.same_gpu else STARTS_S / 2
    for length, number in counts(asked.sessions).items():
        # Off computes the beginning twice, on once; nine more turns are short.
        total_s += number * (3 * prefill_s(length) + 2 * 9 * 0.3)
        groups = 1 if length < LONG_TOKENS or not asked.same_gpu else -(-number // 2)
        total_s += 0 if asked.no_decode else groups * 2 * (asked.turns - 1) * 5.5
    return total_s


def add_options(made: argparse.ArgumentParser) -> None:
    """Add this script's own."""
    made.add_argument("--sessions", default="32768x5,131072x5")
    made.add_argument("--group", type=int, help="sessions in step; default: what fits")
    made.add_argument("--turns", type=int, default=6)
    made.add_argument("--growth", type=int, default=1000)
    made.add_argument("--output", type=int, default=128)
    made.add_argument("--no-decode", action="store_true")
    made.add_argument("--same-gpu", action="store_true")


def longest(asked: argparse.Namespace) -> int:
    """Return the tokens of the longest context."""
    return max(counts(asked.sessions)) + asked.turns * (asked.growth + asked.output)


def main() -> None:
    """Measure and print."""
    made = parser(__doc__)
    add_options(made)
    asked = made.parse_args()
    prompts = Prompts(asked.seed, asked.token_ids)
    results = Results(asked)
    clock = Clock(expected_s(asked))
    with running_pair(asked, longest(asked), prompts, results) as (a, b, pool):
        talks = Talks(a, b, pool, prompts, results, clock, asked)
        for length, number in counts(asked.sessions).items():
            run_length(talks, length, number)
    results.finish()


if __name__ == "__main__":
    main()
