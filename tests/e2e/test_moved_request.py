"""A request that moves loads its prefix and answers as if it had not: on real engines."""

import itertools
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from millpond.launch.engine_client import Completion
from millpond.model.limits import ARENA_HEADER_BYTES
from tests.e2e.conftest import BLOCK, LOGPROB_TOLERANCE, Replicas, prompt

pytestmark = pytest.mark.timeout(300)

SEEDS = itertools.count(1000)


def assert_same(one: Completion, other: Completion) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=LOGPROB_TOLERANCE)


def full_blocks(num_tokens: int) -> int:
    """Tokens that a request can load: whole blocks, and never its last token."""
    return (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_outputs_do_not_depend_on_the_pool(
    replicas: Replicas, num_blocks: int, offset: int
) -> None:
    ids = prompt(num_blocks * BLOCK + offset, next(SEEDS))
    cold, cold_name = replicas.ask("a", ids)
    replicas.settle()
    moved, moved_name = replicas.ask("b", ids)
    replicas.settle()
    replicas.reset("b")
    replicas.switch(enabled=False)
    try:
        off, off_name = replicas.ask("b", ids)
    finally:
        replicas.switch(enabled=True)
    assert_same(moved, cold)
    assert_same(moved, off)
    assert replicas.report(cold_name).loaded_tokens == 0
    assert replicas.report(off_name).loaded_tokens == 0
    report = replicas.report(moved_name)
    assert report.prompt_tokens == len(ids)
    assert report.loaded_tokens == full_blocks(len(ids))
    assert report.writers == ({"a": report.loaded_tokens} if report.loaded_tokens else {})
    assert report.computed_tokens + report.loaded_tokens + report.local_tokens == len(ids)


def test_a_partial_prefix_is_loaded_and_the_rest_computed(replicas: Replicas) -> None:
    seed = next(SEEDS)
    ids = prompt(2 * BLOCK + 40, seed)
    replicas.ask("a", ids)
    replicas.settle()
    longer = ids[: 2 * BLOCK] + prompt(BLOCK + 90, seed + 500_000)
    moved, name = replicas.ask("b", longer)
    report = replicas.report(name)
    assert report.loaded_tokens == 2 * BLOCK
    replicas.settle()
    replicas.reset("a")
    again, again_name = replicas.ask("a", longer)
    assert_same(again, moved)
    # The third block was added by b, on top of what a had written.
    assert replicas.report(again_name).writers == {"a": 2 * BLOCK, "b": BLOCK}


def test_a_local_prefix_is_extended_from_the_pool(replicas: Replicas) -> None:
    ids = prompt(3 * BLOCK + 17, next(SEEDS))
    short = ids[: BLOCK + 30]
    replicas.ask("b", short)
    cold, _ = replicas.ask("a", ids)
    replicas.settle()
    moved, name = replicas.ask("b", ids)
    assert_same(moved, cold)
    report = replicas.report(name)
    assert report.local_tokens == BLOCK
    assert report.loaded_tokens == 2 * BLOCK


def test_the_next_turn_resumes_after_the_answer(replicas: Replicas) -> None:
    ids = prompt(BLOCK + 60, next(SEEDS))
    answer, _ = replicas.ask("a", ids, num_tokens=BLOCK)
    replicas.settle()
    turn = [*ids, *answer.token_ids, *prompt(70, next(SEEDS))]
    moved, name = replicas.ask("b", turn)
    assert replicas.report(name).loaded_tokens == 2 * BLOCK
    second, _ = replicas.ask("a", turn)
    assert_same(moved, second)


def test_concurrent_requests_for_one_prefix(replicas: Replicas) -> None:
    ids = prompt(2 * BLOCK + 9, next(SEEDS))
    cold, _ = replicas.ask("a", ids)
    replicas.settle()
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda _: replicas.ask("b", ids), range(6)))
    for answer, _ in answers:
        assert_same(answer, cold)
    loaded = [replicas.report(name).loaded_tokens for _, name in answers]
    assert max(loaded) == 2 * BLOCK
    replicas.settle()


def test_a_request_can_leave_the_pool_alone(replicas: Replicas) -> None:
    ids = prompt(2 * BLOCK + 5, next(SEEDS))
    before = replicas.pool()["num_blocks"]
    off, _ = replicas.ask("a", ids, skip_pool=True)
    replicas.settle()
    assert replicas.pool()["num_blocks"] == before
    on, name = replicas.ask("b", ids)
    assert replicas.report(name).loaded_tokens == 0
    assert_same(on, off)
    replicas.settle()
    _, name = replicas.ask("a", prompt(2 * BLOCK + 5, next(SEEDS)), skip_pool=True)
    assert replicas.report(name).loaded_tokens == 0


def test_a_flushed_pool_has_nothing_and_fills_again(replicas: Replicas) -> None:
    ids = prompt(BLOCK + 50, next(SEEDS))
    replicas.ask("a", ids)
    replicas.settle()
    replicas.flush()
    pool = replicas.pool()
    assert pool["num_blocks"] == 0
    assert pool["num_slots"]["committed"] == pool["num_slots"]["quarantined"] == 0
    _, name = replicas.ask("b", ids)
    assert replicas.report(name).loaded_tokens == 0
    replicas.settle()
    assert replicas.pool()["num_blocks"] == 1


def test_a_full_pool_skips_and_evicts_without_an_error(replicas: Replicas) -> None:
    for _ in range(8):
        ids = prompt(14 * BLOCK + 3, next(SEEDS))
        replicas.ask("a", ids, num_tokens=1)
    replicas.settle()
    pool = replicas.pool()
    assert pool["num_evictions"] > 0
    _, name = replicas.ask("b", ids, num_tokens=1)
    assert replicas.report(name).loaded_tokens == 14 * BLOCK
    replicas.settle()


@contextmanager
def arena_of(replicas: Replicas) -> Iterator[memoryview]:
    """Map the daemon's arena, as a bug in some process would have it."""
    with replicas.admin() as admin:
        pid = admin.status()["service"]["pid"]
    folder = Path(f"/proc/{pid}/fd")
    path = next(p for p in folder.iterdir() if "memfd:millpond" in str(p.readlink()))
    with (
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as memory,
        memoryview(memory) as whole,
        whole[ARENA_HEADER_BYTES:] as slots,
    ):
        yield slots


@pytest.mark.parametrize("part", ["attention", "state"])
def test_one_corrupted_page_changes_the_output(hybrid: Replicas, part: str) -> None:
    """The control of all tests above: wrong bytes in one slot are seen in the answer."""
    hybrid.settle()
    hybrid.flush()
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = hybrid.ask("a", ids)
    hybrid.settle()
    with hybrid.admin() as admin:
        (first, second) = admin.blocks(10)
    assert (first["block"], second["block"]) == (0, 1)
    number = ("attention", "state").index(part)
    slot = next(slot for slot in second["slots"] if slot["part"] == number)
    with arena_of(hybrid) as arena:
        start, size = slot["offset"], slot["slot_bytes"]
        assert any(arena[start : start + size])
        arena[start : start + size] = bytes(size)
    moved, name = hybrid.ask("b", ids)
    assert hybrid.report(name).loaded_tokens == 2 * BLOCK
    same_tokens = moved.token_ids == cold.token_ids
    distance = max(abs(x - y) for x, y in zip(moved.logprobs, cold.logprobs, strict=True))
    assert not same_tokens or distance > 2 * LOGPROB_TOLERANCE
    hybrid.flush()
