"""A dead replica or daemon takes nobody down, leaks nothing, and hits return by themselves.

Copies are held back at their first byte, so that a kill lands in the middle of them for certain.
"""

import itertools
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.engines import (
    BLOCK,
    REQUEST_TIMEOUT_S,
    SETTLE_S,
    Gates,
    Replicas,
    assert_same,
    lease_of,
    prompt,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)

SEEDS = itertools.count(700_000)
JOIN_S = 90.0


def ask_in_vain(replicas: Replicas, name: str, ids: list[int]) -> threading.Thread:
    """Send a request to a replica that is going to die under it."""

    def ask() -> None:
        with pytest.raises((httpx.HTTPError, ValueError)):
            replicas.ask(name, ids, num_tokens=64)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(JOIN_S)
    assert not thread.is_alive()


def slots_in_use(pool: dict[str, Any]) -> int:
    return pool["num_slots"]["reserved"] + pool["num_slots"]["quarantined"]


def serves_and_hits(replicas: Replicas, writer: str, reader: str) -> None:
    """Check the whole path from one replica to the other."""
    ids = prompt(2 * BLOCK + 30, next(SEEDS))
    cold, _ = replicas.ask(writer, ids)
    replicas.settle()
    moved, name = replicas.ask(reader, ids)
    assert replicas.report(name).writers == {writer: 2 * BLOCK}
    assert_same(moved, cold)
    replicas.settle()


def served_by(replicas: Replicas) -> str:
    """Return which replica answers a short completion through the router."""
    system = replicas.system
    body = {"model": system.options.model, "prompt": prompt(20, next(SEEDS)), "max_tokens": 2}
    url = f"{system.front.api_url}/completions"
    answer = httpx.post(url, json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    assert answer.is_success, answer.text
    return answer.headers["x-millpond-replica"]


def test_a_replica_killed_while_it_stores_and_loads(gated: Replicas, gates: Gates) -> None:
    stored, loaded = (prompt(3 * BLOCK + 20, next(SEEDS)) for _ in range(2))
    gated.ask("b", loaded)
    gated.settle()
    with gates("hold-store", "hold-load"):
        threads = [ask_in_vain(gated, "a", ids) for ids in (stored, loaded)]
        for kind in ("store", "load"):
            eventually(lease_of(gated, kind), f"a {kind} is in flight", timeout_s=SETTLE_S)
        gated.system.kill_replica("a")
        for thread in threads:
            joined(thread)
    gated.settle()
    pool = gated.pool()
    assert slots_in_use(pool) == 0
    assert pool["num_sessions"] == 1
    # The other engine serves on, whether the pool has the prefix or not.
    for ids in (stored, loaded):
        _, name = gated.ask("b", ids)
        assert gated.report(name).prompt_tokens == len(ids)
    assert {served_by(gated) for _ in range(4)} == {"b"}, "the router's requests go on"
    gated.settle()
    gated.system.restart_replica("a")
    gated.joined("a")
    eventually(lambda: served_by(gated) == "a", "a gets requests again", timeout_s=SETTLE_S)
    serves_and_hits(gated, "b", "a")


def test_a_daemon_killed_and_started_anew(gated: Replicas) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = gated.ask("a", ids)
    gated.settle()
    gated.system.kill_pool()
    # Engines serve without it, and each request costs no more than one refused connection.
    alone, _ = gated.ask("b", ids)
    assert_same(alone, cold)
    # An engine that starts while there is no daemon serves, and joins when there is one.
    gated.system.kill_replica("b")
    gated.system.restart_replica("b")
    again, _ = gated.ask("b", ids)
    assert_same(again, cold)
    gated.system.restart_pool()
    gated.joined("a", "b")
    serves_and_hits(gated, "a", "b")
    serves_and_hits(gated, "b", "a")


def while_a_load_is_held(
    replicas: Replicas, gates: Gates, disturb: Callable[[], None]
) -> threading.Thread:
    """Let a load be disturbed and go on; the answer is compared in the returned thread."""
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = replicas.ask("a", ids)
    replicas.settle()
    thread = threading.Thread(target=lambda: assert_same(replicas.ask("b", ids)[0], cold))
    with gates("hold-load"):
        thread.start()
        eventually(lease_of(replicas, "load"), "a load is in flight", timeout_s=SETTLE_S)
        disturb()
    return thread


def test_a_daemon_killed_while_copies_run(gated: Replicas, gates: Gates) -> None:
    # The load reads memory that the replica still maps: it completes, or is computed again.
    joined(while_a_load_is_held(gated, gates, gated.system.kill_pool))
    gated.system.restart_pool()
    gated.joined("a", "b")
    serves_and_hits(gated, "a", "b")


def test_a_daemon_that_freezes_costs_hits_and_no_request(gated: Replicas) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = gated.ask("a", ids)
    gated.settle()
    with gated.admin() as admin:
        service: Any = admin.status()["service"]
    os.kill(service["pid"], signal.SIGSTOP)
    try:
        alone, _ = gated.ask("b", ids)
    finally:
        os.kill(service["pid"], signal.SIGCONT)
    assert_same(alone, cold)
    gated.joined("a", "b")
    serves_and_hits(gated, "a", "b")
    serves_and_hits(gated, "b", "a")
