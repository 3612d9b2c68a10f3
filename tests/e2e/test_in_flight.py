"""What may happen to a request while its copies are in flight: end, preemption, failure."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.engines import (
    BLOCK,
    ROUNDING,
    SETTLE_S,
    SKIP_POOL,
    Gates,
    Replicas,
    assert_same,
    lease_of,
    prompt,
)
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)

SEEDS = itertools.count(800_000)


def give_up(replicas: Replicas, name: str, ids: list[int], kind: str) -> None:
    """Ask, and hang up once a copy of that kind is in flight."""
    place = replicas.system.replica(name)
    body = {"model": place.model, "prompt": ids, "max_tokens": 2000, "stream": True}
    is_in_flight = lease_of(replicas, kind)
    # Nothing is answered while a load is held back: that is when to hang up.
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.stream(
            "POST", f"{place.url}/v1/completions", json=body, timeout=2.0, trust_env=False
        ) as answer,
    ):
        for _ in answer.iter_lines():
            if is_in_flight():
                break
    assert is_in_flight()


def is_idle(replicas: Replicas, name: str) -> bool:
    """Return whether the engine has no request and holds no memory for one."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(replicas.metric(name, f"vllm:{metric}") == 0 for metric in names)


def becomes_idle(replicas: Replicas, name: str) -> None:
    """Wait until neither pool nor engine holds anything for anybody."""
    replicas.settle()

    def idle() -> bool:
        # An idle engine gives back what has ended with its next step.
        replicas.ask(name, prompt(5, next(SEEDS)), num_tokens=1)
        return is_idle(replicas, name)

    eventually(idle, f"nothing is left in {name}", timeout_s=SETTLE_S)


def test_a_request_given_up_while_its_load_is_in_flight(gated: Replicas, gates: Gates) -> None:
    ids = prompt(3 * BLOCK + 20, next(SEEDS))
    cold, _ = gated.ask("b", ids)
    gated.settle()
    with gates("hold-load"):
        give_up(gated, "a", ids, "load")
        # The engine serves others meanwhile, without the blocks that are being written.
        gated.ask("a", prompt(BLOCK, next(SEEDS)), fields=SKIP_POOL)
    becomes_idle(gated, "a")
    moved, name = gated.ask("a", ids)
    assert gated.report(name).loaded_tokens == 3 * BLOCK
    assert_same(moved, cold)


def test_a_request_given_up_while_its_stores_are_in_flight(gated: Replicas, gates: Gates) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    with gates("hold-store"):
        give_up(gated, "a", ids, "store")
    becomes_idle(gated, "a")
    cold, name = gated.ask("b", ids)
    assert gated.report(name).writers == {"a": 2 * BLOCK}
    again, _ = gated.ask("a", ids, fields=SKIP_POOL)
    assert_same(cold, again)


def test_a_load_that_fails_is_computed_again(gated: Replicas, gates: Gates) -> None:
    """The failed load writes nothing: whoever used its blocks would say something else."""
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = gated.ask("b", ids)
    gated.settle()
    with gates("fail-load"):
        again, name = gated.ask("a", ids)
        report = gated.report(name)
        assert (report.loaded_tokens, report.computed_tokens) == (0, len(ids))
        assert_same(again, cold)
    assert "event=load_failed" in gated.log("a")
    becomes_idle(gated, "a")
    gated.reset("a")
    moved, name = gated.ask("a", ids)
    assert gated.report(name).loaded_tokens == 2 * BLOCK
    assert_same(moved, cold)


def test_loads_that_fail_beside_others_that_do_not(gated: Replicas, gates: Gates) -> None:
    prompts = [prompt(2 * BLOCK + 20, next(SEEDS)) for _ in range(4)]
    for ids in prompts:
        gated.ask("b", ids)
    gated.settle()
    before = gates.num_failing("load")
    with gates("hold-load"), ThreadPoolExecutor() as threads:
        with gates("fail-load"):
            first = [threads.submit(gated.ask, "a", ids) for ids in prompts[:2]]
            eventually(
                lambda: gates.num_failing("load") == before + 2,
                "both loads are to fail",
                timeout_s=SETTLE_S,
            )
        rest = [threads.submit(gated.ask, "a", ids) for ids in prompts[2:]]
        eventually(lambda: num_loads(gated) == 4, "all load", timeout_s=SETTLE_S)
        (gates.folder / "hold-load").unlink()
        answers = [asked.result() for asked in [*first, *rest]]
    for ids, (answer, _) in zip(prompts, answers, strict=True):
        gated.assert_right("b", ids, answer)
    loaded = [gated.report(name).loaded_tokens for _, name in answers]
    assert loaded == [0, 0, 2 * BLOCK, 2 * BLOCK]
    becomes_idle(gated, "a")


def num_loads(replicas: Replicas) -> int:
    pool = replicas.pool()
    return pool["num_leases"] - pool["num_write_leases"]


def test_a_store_that_fails_is_a_later_miss(gated: Replicas, gates: Gates) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    with gates("fail-store"):
        cold, _ = gated.ask("a", ids)
        gated.settle()
    moved, name = gated.ask("b", ids)
    assert gated.report(name).loaded_tokens == 0
    assert_same(moved, cold)
    becomes_idle(gated, "a")


def test_requests_for_a_prefix_whose_load_is_in_flight(gated: Replicas, gates: Gates) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    gated.ask("b", ids)
    gated.settle()
    with gates("hold-load"), ThreadPoolExecutor() as threads:
        asked = [threads.submit(gated.ask, "a", ids) for _ in range(3)]
        eventually(lambda: num_loads(gated) > 0, "a load is in flight", timeout_s=SETTLE_S)
        (gates.folder / "hold-load").unlink()
        answers = [one.result()[0] for one in asked]
    for answer in answers:
        gated.assert_right("b", ids, answer)
    becomes_idle(gated, "a")


@contextmanager
def stuttering(gates: Gates) -> Iterator[None]:
    """Hold copies back for a moment, let them go for a moment, again and again."""
    stop = threading.Event()

    def stutter() -> None:
        while not stop.is_set():
            with gates("hold-store", "hold-load"):
                stop.wait(0.3)
            stop.wait(0.1)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_requests_preempted_with_copies_in_flight(gated: Replicas, gates: Gates) -> None:
    """Eight requests of which the engine's memory holds about five, some with a prefix to load."""
    # Each answer crosses the end of a block, for which another one is needed.
    prompts = [prompt(3 * BLOCK - 10 - 5 * i, next(SEEDS)) for i in range(8)]
    for ids in prompts[:3]:
        gated.ask("b", ids, num_tokens=1)
    gated.settle()
    before = gated.metric("a", "vllm:num_preemptions_total")
    with stuttering(gates), ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(gated.ask, "a", ids, num_tokens=60) for ids in prompts]
        answers = [one.result() for one in asked]
    assert gated.metric("a", "vllm:num_preemptions_total") > before
    assert any(gated.report(name).loaded_tokens for _, name in answers)
    for ids, (answer, _) in zip(prompts, answers, strict=True):
        gated.assert_right("b", ids, answer)
    # The control: an answer to a prompt of which 16 tokens differ.
    other = [*prompts[0][:BLOCK], *prompts[1][:16], *prompts[0][BLOCK + 16 :]]
    assert gated.mean_error("b", other, answers[0][0]) > 5 * ROUNDING
    becomes_idle(gated, "a")
