"""What the service regression compares on any two replicas: each case against the pool off.

A case returns how many tokens it compared, and raises ``Mismatch`` or ``CannotCheck``.
"""

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from millpond.gate.service_pair import (
    NUM_TOKENS,
    A,
    B,
    CannotCheck,
    Mismatch,
    Pair,
    Place,
    new_salt,
)
from millpond.model.errors import ExpectedError

OFFSETS: Final = (-2, -1, 0, 1, 2)
_NUM_CONCURRENT: Final = 6
_CANCEL_ATTEMPTS: Final = 3
_IN_FLIGHT_S_MAX: Final = 60.0
_POLL_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class Case:
    """A name for ``--only``, what it shows, and how. Some need control over the processes."""

    name: str
    what: str
    run: Callable[[], int]


def cases_for(pair: Pair) -> Iterator[Case]:
    """Yield the cases that need nothing but requests."""
    for name, what, run in (
        ("cold", "a prompt that nobody has seen is computed, and stored", _cold),
        ("local-hit", "the same prompt again at the same replica", _local_hit),
        ("moved-hit", "the same prompt at the other replica", _moved_hit),
        ("partial-hit", "a longer prompt, at every offset around block boundaries", _partial_hit),
        ("block-multiples", "prompts of exactly 1, 2 and 3 blocks", _block_multiples),
        ("concurrent", f"{_NUM_CONCURRENT} requests for one prefix at once", _concurrent),
        ("cancel-load", "a request given up while its load is in flight", _cancel_load),
    ):
        yield Case(name, what, lambda run=run: run(pair))


def _cold(pair: Pair) -> int:
    num_compared = 0
    for num_tokens in (pair.block // 2, pair.block + 70, 2 * pair.block + 20):
        ids = pair.prompt(num_tokens)
        answer = pair.ask(A, ids, new_salt())
        what = f"{num_tokens} tokens, cold"
        report = pair.report(answer)
        if report.computed_tokens != num_tokens:
            raise Mismatch(f"{what}: {report.computed_tokens} of {num_tokens} tokens computed")
        num_compared += pair.compare(answer, pair.reference(ids), what)
    return num_compared


def _local_hit(pair: Pair) -> int:
    ids, salt = pair.prompt(2 * pair.block + 20), new_salt()
    reference = pair.reference(ids)
    pair.ask(A, ids, salt)
    answer = pair.ask(A, ids, salt)
    report = pair.report(answer)
    if not report.local_tokens:
        raise CannotCheck("the replica's own cache did not hit: is prefix caching on?")
    if report.loaded_tokens:
        raise Mismatch(f"{report.loaded_tokens} tokens were loaded that the replica has itself")
    return pair.compare(answer, reference, "local hit")


def _moved_hit(pair: Pair) -> int:
    return sum(
        moved(pair, num_blocks * pair.block + 40, f"moved from {writer}", writer, reader)
        for writer, reader in ((A, B), (B, A))
        for num_blocks in (1, 3)
    )


def _block_multiples(pair: Pair) -> int:
    return sum(
        moved(pair, num_blocks * pair.block, f"{num_blocks} whole blocks", A, B)
        for num_blocks in (1, 2, 3)
    )


def moved(pair: Pair, num_tokens: int, what: str, writer: str, reader: str) -> int:
    """Compare a new prompt at ``writer``, then at ``reader``, which must load what it can."""
    ids, salt = pair.prompt(num_tokens), new_salt()
    reference = pair.reference(ids)
    num_compared = pair.compare(pair.ask(writer, ids, salt), reference, f"{what}, cold")
    pair.settle()
    answer = pair.ask(reader, ids, salt)
    pair.require_loaded(answer, what, [pair.full_blocks(num_tokens)])
    return num_compared + pair.compare(answer, reference, what)


def _partial_hit(pair: Pair) -> int:
    num_compared = 0
    for num_blocks in (1, 2):
        for offset in OFFSETS:
            pair.on_step(f"partial-hit: {num_blocks} blocks {offset:+d}")
            shared = pair.prompt(num_blocks * pair.block + offset)
            longer = [*shared, *pair.prompt(50)]
            salt = new_salt()
            pair.ask(A, shared, salt, num_tokens=1)
            pair.settle()
            answer = pair.ask(B, longer, salt)
            what = f"{len(longer)} tokens, of which {len(shared)} were there"
            # Whether a block that ends with the first prompt is kept is the model's affair.
            may_load = [pair.full_blocks(len(shared)), len(shared) // pair.block * pair.block]
            pair.require_loaded(answer, what, may_load)
            num_compared += pair.compare(answer, pair.reference(longer), what)
    return num_compared


def _concurrent(pair: Pair) -> int:
    ids, salt = pair.prompt(2 * pair.block + 9), new_salt()
    pair.ask(A, ids, salt)
    pair.settle()
    answers = pair.ask_all(B, [(ids, salt)] * _NUM_CONCURRENT, num_tokens=NUM_TOKENS)
    if not any(pair.report(answer).loaded_tokens for answer in answers):
        raise Mismatch("none of the concurrent requests loaded anything")
    return sum(
        pair.compare_in_batch(ids, answer, "concurrent requests", replica=A) for answer in answers
    )


def _cancel_load(pair: Pair) -> int:
    num_compared = 0
    for _ in range(_CANCEL_ATTEMPTS):
        ids, salt = pair.prompt(3 * pair.block + 20), new_salt()
        reference = pair.reference(ids)
        pair.ask(A, ids, salt)
        pair.settle()
        was_loading = _give_up(pair, pair.places[B], ids, salt)
        pair.settle()
        answer = pair.ask(B, ids, salt)
        num_compared += pair.compare(answer, reference, "after a request given up")
        if was_loading:
            return num_compared
    raise CannotCheck("no load was in flight when its request was given up: copies are too quick")


def _give_up(pair: Pair, place: Place, ids: Sequence[int], salt: str) -> bool:
    """Ask, and hang up once a load is in flight; return whether it still was then."""
    address = urlsplit(place.url)
    body = {"model": place.model, "prompt": list(ids), "max_tokens": 64, "cache_salt": salt}
    headers = {"Content-Type": "application/json"}
    # Not httpx: its answer would have to arrive before the connection can be closed.
    line = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10.0)
    with closing(line):
        line.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        wait_for_lease(pair, "load")
    return pair.num_leases("load") > 0


def wait_for_lease(pair: Pair, kind: str) -> bool:
    """Wait until a copy of that kind is under way; return whether one was seen."""
    deadline_s = time.monotonic() + _IN_FLIGHT_S_MAX
    while time.monotonic() < deadline_s:
        try:
            if pair.num_leases(kind):
                return True
        except ExpectedError:
            return False
        time.sleep(_POLL_S)
    return False
