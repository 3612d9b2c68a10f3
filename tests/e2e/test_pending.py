"""A prefix that another replica is computing right now: waited for, for a bounded time.

Replica b waits, replica a does not. "Computing right now" is made to last: the writer's copies
are held back, so that its blocks stay reserved.
"""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from millpond.launch.engine_client import Completion
from tests.e2e.engines import (
    BLOCK,
    PENDING_WAIT_S,
    SETTLE_S,
    Gates,
    Replicas,
    assert_same,
    lease_of,
    prompt,
)
from tests.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SEEDS = itertools.count(880_000)
NUM_BLOCKS = 9
"""More than one step of the engine computes, so that two stores are in flight."""
SLACK_S = 20.0
"""For computing the prompt, on a busy machine."""


def long_prompt() -> list[int]:
    return prompt(NUM_BLOCKS * BLOCK + 20, next(SEEDS))


def num_asked(replicas: Replicas) -> int:
    """Return how often a prefix has been asked for; one who waits asks again and again."""
    return sum(replicas.pool()["pins"].values())


@contextmanager
def waiting(replicas: Replicas, ids: list[int]) -> Iterator[Future[tuple[Completion, str]]]:
    """Ask b for what a is storing, and go on once b waits for it."""
    before = num_asked(replicas)
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(replicas.ask, "b", ids)
        eventually(
            lambda: num_asked(replicas) >= before + 3,
            "b waits",
            timeout_s=SETTLE_S,
        )
        assert not asked.done()
        yield asked


def test_a_request_waits_for_what_another_replica_is_computing(
    gated: Replicas, gates: Gates
) -> None:
    ids = long_prompt()
    with gates("hold-store"):
        cold, _ = gated.ask("a", ids)
        with waiting(gated, ids) as asked:
            # Others are served while it waits.
            gated.ask("b", prompt(20, next(SEEDS)))
            assert not asked.done()
            (gates.folder / "hold-store").unlink()
            moved, name = asked.result()
    report = gated.report(name)
    assert report.writers == {"a": NUM_BLOCKS * BLOCK}
    assert report.computed_tokens == 20
    assert_same(moved, cold)
    gated.settle()


def test_a_replica_that_is_not_to_wait_computes(gated: Replicas, gates: Gates) -> None:
    ids = long_prompt()
    with gates("hold-store"):
        cold, _ = gated.ask("b", ids)
        before = num_asked(gated)
        own, name = gated.ask("a", ids)
        assert num_asked(gated) == before + 1
        assert lease_of(gated, "store")(), "b is at it still"
    assert gated.report(name).computed_tokens == len(ids)
    assert_same(own, cold)
    gated.settle()


def test_waiting_has_an_end(gated: Replicas, gates: Gates) -> None:
    ids = long_prompt()
    with gates("hold-store"):
        cold, _ = gated.ask("a", ids)
        start_s = time.monotonic()
        own, name = gated.ask("b", ids)
        waited_s = time.monotonic() - start_s
        assert lease_of(gated, "store")(), "a is at it still"
    assert PENDING_WAIT_S <= waited_s < PENDING_WAIT_S + SLACK_S
    assert gated.report(name).computed_tokens == len(ids)
    assert_same(own, cold)
    gated.settle()


def test_a_request_given_up_while_it_waits(gated: Replicas, gates: Gates) -> None:
    ids = long_prompt()
    place = gated.system.replica("b")
    body = {"model": place.model, "prompt": ids, "max_tokens": 5}
    with gates("hold-store"):
        gated.ask("a", ids)
        before = num_asked(gated)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{place.url}/v1/completions", json=body, timeout=2.0, trust_env=False)
        assert num_asked(gated) > before + 3
        # Nobody asks for it any more.
        gated.ask("b", prompt(20, next(SEEDS)))
        eventually(
            lambda: gated.metric("b", "vllm:num_requests_waiting") == 0,
            "b has given it up",
            timeout_s=SETTLE_S,
        )
    gated.settle()


def test_a_writer_that_dies_is_not_waited_for(gated: Replicas, gates: Gates) -> None:
    ids = long_prompt()
    with gates("hold-store"):
        cold, _ = gated.ask("a", ids)
        with waiting(gated, ids) as asked:
            start_s = time.monotonic()
            gated.system.kill_replica("a")
            own, name = asked.result()
            assert time.monotonic() - start_s < PENDING_WAIT_S
    assert gated.report(name).computed_tokens == len(ids)
    assert_same(own, cold)
    gated.settle()
    gated.system.restart_replica("a")
    gated.joined("a")
