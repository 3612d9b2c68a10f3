"""Two replicas at one pool, as the service regression asks them and looks at the pool.

    reference    the pool is off for this request, and a salt of its own keeps it out of every
                 cache: all of it is computed
    with pool    a salt that the replicas share for one prompt: nobody else has its blocks, so
                 that each case knows what there is to hit

Both go by fields of the request alone, so that the replicas need no restart and no switch.
"""

import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, cast

import httpx

from millpond.launch.engine_client import Completion, EngineClient
from millpond.model.errors import ExpectedError
from millpond.service.client import AdminClient
from millpond.service.protocol import Report

A: Final = "a"
B: Final = "b"
NUM_TOKENS: Final = 8

TOLERANCE: Final = 0.25
"""Largest difference of a log-probability between a computed and a cached request that counts
as equal: the engine cuts the two into other steps, and rounding to 8 bits of logits of about 8
moves a log-probability by several hundredths."""

_REQUEST_TIMEOUT_S: Final = 300.0
_ADMIN_TIMEOUT_S: Final = 10.0
_SETTLE_S_MAX: Final = 60.0
_POLL_S: Final = 0.005
_CLOSE_CALLS_MAX: Final = 2
_CLOSE_SHARE_MAX: Final = 0.05
"""Of an answer's tokens, whichever is more, may be others because they were equally likely."""
_ROUNDING_RATIO_MAX: Final = 2
"""Of a batch with the pool to one without: no two batches are cut alike."""
_CROWD_RATIO_MAX: Final = 3
_CROWD_CLOSE_SHARE_MAX: Final = 0.2
"""More than so many times the tolerance, or such a share of other tokens, is no rounding."""
_TOKEN_IDS: Final = range(10, 2000)
"""Ids that every model's vocabulary has."""


class Mismatch(Exception):
    """A case is wrong; the message says what was expected and what came."""


class CannotCheck(Exception):
    """A case says nothing here; the message says why."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far answers of a batch were from those of requests alone, without the pool.

    The largest difference of a log-probability, and the most close calls in an answer.
    """

    difference: float
    num_close: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica listens, what its model is called, and how long a request may be."""

    url: str
    model: str
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """``block_tokens``: of Millpond's blocks. ``is_own``: nobody else uses the pool.

    ``tolerance`` is the largest difference of a log-probability that counts as equal; 0 is for
    engines whose answers do not depend on how requests were batched.
    """

    socket: str
    block_tokens: int
    tolerance: float
    seed: int
    is_own: bool


@dataclass
class Pair:
    """The replicas ``a`` and ``b``. Every wait is bounded and raises ``CannotCheck``."""

    places: Mapping[str, Place]
    options: PairOptions
    on_step: Callable[[str], None]
    num_close_calls: int = 0
    _chance: Random = field(init=False)

    def __post_init__(self) -> None:
        # The same prompts again with the same seed; salts keep runs apart.
        self._chance = Random(self.options.seed)

    @property
    def is_exact(self) -> bool:
        """Whether every answer is to be the same to the last bit, those of a batch too."""
        return self.options.tolerance == 0

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.options.block_tokens

    def full_blocks(self, num_tokens: int) -> int:
        """Return tokens that a request can load: whole blocks, and never its last token."""
        return (num_tokens - 1) // self.block * self.block

    def prompt(self, num_tokens: int, chance: Random | None = None) -> list[int]:
        """Return token ids that no other prompt begins with; ``chance`` is the seed's, or given."""
        longest = min((p.max_tokens for p in self.places.values() if p.max_tokens), default=None)
        if longest is not None and num_tokens + self.block > longest:
            raise CannotCheck(f"the replicas take {longest} tokens, too few for {num_tokens}")
        chance = chance or self._chance
        return [chance.choice(_TOKEN_IDS) for _ in range(num_tokens)]

    # -------------------------------------------------------------- asking

    def ask(
        self, replica: str, ids: Sequence[int], salt: str, *, num_tokens: int = NUM_TOKENS
    ) -> Completion:
        """Return one greedy completion, with the pool on."""
        return self._ask(replica, ids, {"cache_salt": salt}, num_tokens)

    def reference(
        self, ids: Sequence[int], *, replica: str = A, num_tokens: int = NUM_TOKENS
    ) -> Completion:
        """Return the completion that is computed whole: pool off, and in nobody's cache."""
        fields = {"cache_salt": new_salt(), "kv_transfer_params": {"millpond": "off"}}
        return self._ask(replica, ids, fields, num_tokens)

    def _ask(
        self, replica: str, ids: Sequence[int], fields: Mapping[str, object], num_tokens: int
    ) -> Completion:
        place = self.places[replica]
        name = f"gate-{secrets.token_hex(8)}"
        with EngineClient(place.url, place.model, timeout_s=_REQUEST_TIMEOUT_S) as client:
            return client.complete(ids, num_tokens=num_tokens, request_id=name, fields=fields)

    def references(
        self, prompts: Sequence[Sequence[int]], *, replica: str, num_tokens: int
    ) -> list[Completion]:
        """Return what ``reference`` does, for prompts that are asked all at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            asked = [
                threads.submit(self.reference, ids, replica=replica, num_tokens=num_tokens)
                for ids in prompts
            ]
            return [one.result() for one in asked]

    def ask_all(
        self, replica: str, prompts: Sequence[tuple[Sequence[int], str]], *, num_tokens: int
    ) -> list[Completion]:
        """Ask (prompt, salt) all at once, and return the answers in that order."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            asked = [
                threads.submit(self.ask, replica, ids, salt, num_tokens=num_tokens)
                for ids, salt in prompts
            ]
            return [one.result() for one in asked]

    # -------------------------------------------------------------- judging

    def compare(self, answer: Completion, reference: Completion, what: str) -> int:
        """Return the tokens compared; raises ``Mismatch`` unless both answers are the same."""
        if answer.token_ids != reference.token_ids:
            raise Mismatch(
                f"{what}: tokens {list(answer.token_ids)}, {list(reference.token_ids)} without "
                "the pool"
            )
        self._compare_odds(answer.logprobs, reference.logprobs, what, self.options.tolerance)
        return len(answer.token_ids)

    def compare_in_batch(
        self,
        ids: Sequence[int],
        answer: Completion,
        what: str,
        *,
        replica: str,
        rounding: Rounding | None = None,
    ) -> int:
        """As ``compare``, for a request that the engine computed in one batch with others.

        There rounding differs from step to step: where two tokens are equally likely within
        the tolerance, either may be the answer. What follows is compared with what ``replica``
        says without the pool to the prompt and the answer so far. An answer with many of
        these is a mismatch: rounding does not explain it. With ``rounding``, what the same batch
        does without the pool, twice as much is equal, of that or of the tolerance, up to a limit.
        None of this where nothing is rounded differently (``is_exact``).
        """
        num_tokens = len(answer.token_ids)
        if self.is_exact:
            reference = self.reference(ids, replica=replica, num_tokens=num_tokens)
            return self.compare(answer, reference, what)
        num_close = 0
        num_close_max = max(_CLOSE_CALLS_MAX, int(_CLOSE_SHARE_MAX * num_tokens))
        most = self.options.tolerance
        if rounding is not None:
            num_close_max = max(num_close_max, _ROUNDING_RATIO_MAX * rounding.num_close)
            most = _ROUNDING_RATIO_MAX * max(most, rounding.difference)
            num_close_max = min(num_close_max, int(_CROWD_CLOSE_SHARE_MAX * num_tokens))
            most = min(most, self._crowd_difference_max)
        num_seen = 0
        for mine, theirs, is_close in self._pieces(ids, answer, replica):
            self._compare_odds(mine, theirs, f"{what}, from token {num_seen} on", most)
            num_seen += len(mine)
            num_close += is_close
            if num_close > num_close_max:
                raise Mismatch(
                    f"{what}: more than {num_close_max} of {num_tokens} tokens differ from those "
                    "without the pool, too many for rounding"
                )
        self.num_close_calls += num_close
        return num_tokens

    def rounding_in_batch(
        self, prompts: Sequence[Sequence[int]], *, replica: str, alone_at: str, num_tokens: int
    ) -> Rounding:
        """Return how far a batch is from requests alone: all at once at ``replica``, no pool.

        Raises ``CannotCheck`` where that is so far that nothing can be told from it.
        """
        answers = self.references(prompts, replica=replica, num_tokens=num_tokens)
        found = [
            self._rounding(ids, answer, alone_at)
            for ids, answer in zip(prompts, answers, strict=True)
        ]
        return Rounding(max(one.difference for one in found), max(one.num_close for one in found))

    def _rounding(self, ids: Sequence[int], answer: Completion, replica: str) -> Rounding:
        difference, num_close = 0.0, 0
        num_close_max = int(_CROWD_CLOSE_SHARE_MAX * len(answer.token_ids))
        for mine, theirs, is_close in self._pieces(ids, answer, replica):
            differences = [abs(x - y) for x, y in zip(mine, theirs, strict=True)]
            num_close += is_close
            if num_close > num_close_max or not all(
                one <= self._crowd_difference_max for one in differences
            ):
                raise CannotCheck(
                    f"without the pool a request of a crowd has {num_close} other tokens than "
                    f"alone, and log-probabilities that differ by {max(differences):.4f}"
                )
            difference = max(difference, *differences)
        return Rounding(difference, num_close)

    @property
    def _crowd_difference_max(self) -> float:
        return _CROWD_RATIO_MAX * self.options.tolerance

    def _pieces(
        self, ids: Sequence[int], answer: Completion, replica: str
    ) -> Iterator[tuple[Sequence[float], Sequence[float], bool]]:
        """Yield log-probabilities of an answer, those without the pool, and if its last differs.

        A piece ends with the first token that differs: both were the likeliest, each by its own
        sums. The next is compared with what follows the answer so far.
        """
        num_done, num_tokens = 0, len(answer.token_ids)
        while num_done < num_tokens:
            known = [*ids, *answer.token_ids[:num_done]]
            reference = self.reference(known, replica=replica, num_tokens=num_tokens - num_done)
            pairs = zip(answer.token_ids[num_done:], reference.token_ids, strict=True)
            num_same = next((i for i, (x, y) in enumerate(pairs) if x != y), num_tokens - num_done)
            stop = min(num_done + num_same + 1, num_tokens)
            theirs = reference.logprobs[: stop - num_done]
            yield answer.logprobs[num_done:stop], theirs, num_done + num_same < num_tokens
            num_done = stop

    def _compare_odds(
        self, mine: Sequence[float], theirs: Sequence[float], what: str, most: float
    ) -> None:
        differences = [abs(x - y) for x, y in zip(mine, theirs, strict=True)]
        for i, difference in enumerate(differences):
            if not difference <= most:  # which is so for what is no number, too
                raise Mismatch(
                    f"{what}: a log-probability ({i}) differs by {difference:.4f} from that "
                    f"without the pool, by at most {most:.4g} is equal; later ones by "
                    f"{[round(later, 2) for later in differences[i + 1 :]]}"
                )

    def is_changed(self, answer: Completion, reference: Completion) -> bool:
        """Return whether two answers differ by more than twice what counts as equal.

        Where only the same bits are equal, by as much as without that: wrong data has to show.
        """
        pairs = zip(answer.logprobs, reference.logprobs, strict=True)
        least = 2 * (self.options.tolerance or TOLERANCE)
        return answer.token_ids != reference.token_ids or not all(
            abs(x - y) <= least for x, y in pairs
        )

    def require_loaded(
        self, answer: Completion, what: str, expected: "range | Sequence[int]"
    ) -> Report:
        """Return the request's report; raises ``Mismatch`` unless it loaded that many tokens.

        On replicas of somebody's own, whose model may keep less, more than none will do.
        """
        report = self.report(answer)
        loaded = report.loaded_tokens
        is_right = loaded in expected if self.options.is_own else bool(loaded) == any(expected)
        if not is_right:
            raise Mismatch(f"{what}: {loaded} tokens were loaded, expected {list(expected)}")
        return report

    # -------------------------------------------------------------- the pool

    @contextmanager
    def admin(self) -> Generator[AdminClient]:
        """Connect as an operator."""
        with AdminClient.connect(self.options.socket, timeout_s=_ADMIN_TIMEOUT_S) as admin:
            yield admin

    def pool(self) -> dict[str, Any]:
        """Return the pool's statistics."""
        with self.admin() as admin:
            return cast("dict[str, Any]", admin.status()["pool"])

    def report(self, answer: Completion) -> Report:
        """Return where a request's tokens came from."""
        found: list[tuple[str, Report]] = []

        def ask() -> bool:
            with self.admin() as admin:
                found.extend(admin.requests_named(answer.request_id))
            return bool(found)

        self.wait_until(ask, "the pool was not told of a request: are the replicas at this pool?")
        return found[-1][1]

    def num_leases(self, kind: str) -> int:
        """Return how many ``store`` or ``load`` leases are live."""
        pool = self.pool()
        num_writing = pool["num_write_leases"]
        return num_writing if kind == "store" else pool["num_leases"] - num_writing

    def settle(self) -> None:
        """Wait until everything that was computed is readable for the other replica."""

        def is_settled() -> bool:
            pool = self.pool()
            return not pool["num_leases" if self.options.is_own else "num_write_leases"]

        self.wait_until(is_settled, "the pool does not come to rest: is it used by others?")

    def wait_until(
        self, condition: Callable[[], bool], otherwise: str, *, timeout_s: float = _SETTLE_S_MAX
    ) -> None:
        """Wait until ``condition`` holds; a daemon that is away for a moment is asked again."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                if condition():
                    return
            except ExpectedError:
                if time.monotonic() > deadline_s:
                    raise
            if time.monotonic() > deadline_s:
                raise CannotCheck(f"{otherwise} (after {timeout_s:g} s)")
            time.sleep(_POLL_S)


def new_salt() -> str:
    """Return a cache salt that nobody else has."""
    return f"gate-{secrets.token_hex(8)}"


def find_place(url: str) -> Place:
    """Return what a running replica serves; raises ``ExpectedError`` where there is none."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=10.0, trust_env=False)
        answer.raise_for_status()
        (model, *_) = answer.json()["data"]
        return Place(url.rstrip("/"), str(model["id"]), model.get("max_model_len"))
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ExpectedError(f"no replica answers at {url}: {error}") from error


def find_block_tokens(places: Mapping[str, Place], socket: str, seed: int) -> int:
    """Return the tokens of a block, from what a moved request loads.

    Raises ``Mismatch`` where it loads nothing, ``CannotCheck`` where others are loading too.
    """
    options = PairOptions(socket=socket, block_tokens=1, tolerance=0.0, seed=seed, is_own=False)
    pair = Pair(places, options, on_step=lambda _: None)
    longest = min((place.max_tokens or 4096) for place in places.values())
    ids, salt = pair.prompt(min(4096, longest - 64)), new_salt()
    pair.ask(A, ids, salt)
    pair.settle()
    before = _num_blocks_read(pair)
    report = pair.report(pair.ask(B, ids, salt))
    num_blocks = _num_blocks_read(pair) - before
    if not report.loaded_tokens:
        raise Mismatch("a moved request loaded nothing: do both replicas share one pool?")
    if num_blocks < 1 or report.loaded_tokens % num_blocks:
        raise CannotCheck("others load from this pool: say --block-tokens")
    return report.loaded_tokens // num_blocks


def _num_blocks_read(pair: Pair) -> int:
    return sum(replica["num_blocks_read"] for replica in pair.pool()["replicas"].values())
