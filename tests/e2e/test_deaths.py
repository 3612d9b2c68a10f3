"""A dead replica or daemon takes nobody down, leaks nothing, and hits return by themselves.

Copies are held back for a moment, so that a kill lands in the middle of them for certain.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import (
    BLOCK,
    LOGPROB_TOLERANCE,
    Replicas,
    eventually,
    prompt,
    started,
)

pytestmark = pytest.mark.timeout(400)

SEEDS = itertools.count(700_000)
COPY_DELAY_S = 2.0


@pytest.fixture(scope="module")
def slow(hybrid_model: str, model_dir: Path) -> Iterator[Replicas]:
    """Two replicas that wait before each copy."""
    arguments = ("--block-size", str(BLOCK), "--max-model-len", "2048")
    connector = {"copy_delay_s": COPY_DELAY_S}
    socket = model_dir / "d.sock"
    with started(hybrid_model, socket, engine_args=arguments, connector=connector) as replicas:
        yield replicas


def ask_in_vain(replicas: Replicas, name: str, ids: list[int]) -> threading.Thread:
    """Send a request to a replica that is going to die under it."""

    def ask() -> None:
        with pytest.raises((httpx.HTTPError, ValueError)):
            replicas.ask(name, ids, num_tokens=64)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def lease_of(replicas: Replicas, kind: str) -> Callable[[], bool]:
    """Return whether a lease of that kind is live right now."""

    def is_live() -> bool:
        pool = replicas.pool()
        num_writing = pool["num_write_leases"]
        return bool(num_writing if kind == "store" else pool["num_leases"] - num_writing)

    return is_live


def slots_in_use(pool: dict[str, Any]) -> int:
    return pool["num_slots"]["reserved"] + pool["num_slots"]["quarantined"]


def serves_and_hits(replicas: Replicas, writer: str, reader: str) -> None:
    """Check the whole path from one replica to the other."""
    ids = prompt(2 * BLOCK + 30, next(SEEDS))
    cold, _ = replicas.ask(writer, ids)
    replicas.settle()
    moved, name = replicas.ask(reader, ids)
    assert replicas.report(name).writers == {writer: 2 * BLOCK}
    assert moved.token_ids == cold.token_ids
    assert moved.logprobs == pytest.approx(cold.logprobs, abs=LOGPROB_TOLERANCE)
    replicas.settle()


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_replica_killed_while_it_copies(slow: Replicas, kind: str) -> None:
    ids = prompt(3 * BLOCK + 20, next(SEEDS))
    if kind == "load":
        slow.ask("b", ids)
        slow.settle()
    thread = ask_in_vain(slow, "a", ids)
    eventually(lease_of(slow, kind), f"a {kind} is in flight")
    slow.system.kill_replica("a")
    thread.join(60)
    assert not thread.is_alive()
    slow.settle()
    pool = slow.pool()
    assert slots_in_use(pool) == 0
    assert pool["num_sessions"] == 1
    # The other engine serves on, whether the pool has the prefix (load) or not (store).
    _, name = slow.ask("b", ids)
    assert slow.report(name).prompt_tokens == len(ids)
    slow.settle()
    slow.system.restart_replica("a")
    slow.joined("a")
    serves_and_hits(slow, "b", "a")


def test_a_daemon_killed_and_started_anew(slow: Replicas) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = slow.ask("a", ids)
    slow.settle()
    slow.system.kill_pool()
    # Engines serve without it, and each request costs no more than one refused connection.
    alone, _ = slow.ask("b", ids)
    assert alone.token_ids == cold.token_ids
    # An engine that starts while there is no daemon serves, and joins when there is one.
    slow.system.kill_replica("b")
    slow.system.restart_replica("b")
    again, _ = slow.ask("b", ids)
    assert again.token_ids == cold.token_ids
    slow.system.restart_pool()
    slow.joined("a", "b")
    serves_and_hits(slow, "a", "b")
    serves_and_hits(slow, "b", "a")


def test_a_daemon_killed_while_copies_run(slow: Replicas) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = slow.ask("a", ids)
    slow.settle()
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(slow.ask("b", ids)[0]))
    thread.start()
    eventually(lease_of(slow, "load"), "a load is in flight")
    slow.system.kill_pool()
    thread.join(60)
    # The load reads memory that the replica still maps: it completes, or is computed again.
    assert [answer.token_ids for answer in answers] == [cold.token_ids]
    slow.system.restart_pool()
    slow.joined("a", "b")
    serves_and_hits(slow, "a", "b")
