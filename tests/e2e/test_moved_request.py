"""A request that moves loads its prefix and answers as if it had not: on real engines."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.engines import (
    BLOCK,
    SKIP_POOL,
    WINDOW,
    Replicas,
    arena_of,
    assert_same,
    differ,
    full_blocks,
    prompt,
)

pytestmark = pytest.mark.timeout(600)

SEEDS = itertools.count(1000)


@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_outputs_do_not_depend_on_the_pool(
    replicas: Replicas, num_blocks: int, offset: int
) -> None:
    ids = prompt(num_blocks * BLOCK + offset, next(SEEDS))
    cold, cold_name = replicas.ask(replicas.a, ids)
    replicas.settle()
    moved, moved_name = replicas.ask(replicas.b, ids)
    replicas.settle()
    replicas.reset(replicas.b)
    replicas.switch(enabled=False)
    try:
        off, off_name = replicas.ask(replicas.b, ids)
    finally:
        replicas.switch(enabled=True)
    assert_same(moved, cold, tolerance=replicas.tolerance)
    assert_same(moved, off, tolerance=replicas.tolerance)
    assert replicas.report(cold_name).loaded_tokens == 0
    assert replicas.report(off_name).loaded_tokens == 0
    report = replicas.report(moved_name)
    assert report.prompt_tokens == len(ids)
    assert report.loaded_tokens == full_blocks(len(ids))
    assert report.writers == ({replicas.a: report.loaded_tokens} if report.loaded_tokens else {})
    assert report.computed_tokens + report.loaded_tokens + report.local_tokens == len(ids)


def test_a_partial_prefix_is_loaded_and_the_rest_computed(replicas: Replicas) -> None:
    seed = next(SEEDS)
    ids = prompt(2 * BLOCK + 40, seed)
    replicas.ask(replicas.a, ids)
    replicas.settle()
    longer = ids[: 2 * BLOCK] + prompt(BLOCK + 90, seed + 500_000)
    moved, name = replicas.ask(replicas.b, longer)
    report = replicas.report(name)
    assert report.loaded_tokens == 2 * BLOCK
    replicas.settle()
    replicas.reset(replicas.a)
    again, again_name = replicas.ask(replicas.a, longer)
    assert_same(again, moved)
    # The third block was added by b, on top of what a had written.
    assert replicas.report(again_name).writers == {replicas.a: 2 * BLOCK, replicas.b: BLOCK}


def test_a_local_prefix_is_extended_from_the_pool(replicas: Replicas) -> None:
    ids = prompt(3 * BLOCK + 17, next(SEEDS))
    short = ids[: BLOCK + 30]
    replicas.ask(replicas.b, short)
    cold, _ = replicas.ask(replicas.a, ids)
    replicas.settle()
    moved, name = replicas.ask(replicas.b, ids)
    assert_same(moved, cold)
    report = replicas.report(name)
    assert report.local_tokens == BLOCK
    assert report.loaded_tokens == 2 * BLOCK


def test_the_next_turn_resumes_after_the_answer(replicas: Replicas) -> None:
    ids = prompt(BLOCK + 60, next(SEEDS))
    answer, _ = replicas.ask(replicas.a, ids, num_tokens=BLOCK)
    replicas.settle()
    turn = [*ids, *answer.token_ids, *prompt(70, next(SEEDS))]
    moved, name = replicas.ask(replicas.b, turn)
    assert replicas.report(name).loaded_tokens == 2 * BLOCK
    second, _ = replicas.ask(replicas.a, turn)
    assert_same(moved, second)


def test_concurrent_requests_for_one_prefix(replicas: Replicas) -> None:
    ids = prompt(2 * BLOCK + 9, next(SEEDS))
    replicas.ask(replicas.a, ids)
    replicas.settle()
    with ThreadPoolExecutor() as threads:
        answers = list(threads.map(lambda _: replicas.ask(replicas.b, ids), range(6)))
    for answer, _ in answers:
        replicas.assert_right(replicas.b, ids, answer)
    loaded = [replicas.report(name).loaded_tokens for _, name in answers]
    assert max(loaded) == 2 * BLOCK
    replicas.settle()


def test_a_request_can_leave_the_pool_alone(replicas: Replicas) -> None:
    ids = prompt(2 * BLOCK + 5, next(SEEDS))
    before = replicas.pool()["num_blocks"]
    off, _ = replicas.ask(replicas.a, ids, fields=SKIP_POOL)
    replicas.settle()
    assert replicas.pool()["num_blocks"] == before
    on, name = replicas.ask(replicas.b, ids)
    assert replicas.report(name).loaded_tokens == 0
    assert_same(on, off)
    replicas.settle()
    _, name = replicas.ask(replicas.a, prompt(2 * BLOCK + 5, next(SEEDS)), fields=SKIP_POOL)
    assert replicas.report(name).loaded_tokens == 0


def test_a_flushed_pool_has_nothing_and_fills_again(replicas: Replicas) -> None:
    ids = prompt(BLOCK + 50, next(SEEDS))
    replicas.ask(replicas.a, ids)
    replicas.settle()
    replicas.flush()
    pool = replicas.pool()
    assert pool["num_blocks"] == 0
    assert pool["num_slots"]["committed"] == pool["num_slots"]["quarantined"] == 0
    _, name = replicas.ask(replicas.b, ids)
    assert replicas.report(name).loaded_tokens == 0
    replicas.settle()
    assert replicas.pool()["num_blocks"] == 1


def test_a_full_pool_skips_and_evicts_without_an_error(replicas: Replicas) -> None:
    for _ in range(8):
        ids = prompt(14 * BLOCK + 3, next(SEEDS))
        replicas.ask(replicas.a, ids, num_tokens=1)
    replicas.settle()
    pool = replicas.pool()
    assert pool["num_evictions"] > 0
    _, name = replicas.ask(replicas.b, ids, num_tokens=1)
    assert replicas.report(name).loaded_tokens == 14 * BLOCK
    replicas.settle()


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("hybrid", 0),
        ("hybrid", 1),
        ("sliding", 0),
        ("sliding", 1),
        pytest.param("attention", 0, marks=pytest.mark.engines),
    ],
    ids=["hybrid-attention", "hybrid-state", "sliding-attention", "sliding-window", "attention"],
)
def test_one_corrupted_page_changes_the_output(
    request: pytest.FixtureRequest, kind: str, part: int
) -> None:
    """The control of all tests above: wrong bytes in one slot are seen in the answer."""
    replicas: Replicas = request.getfixturevalue(kind)
    replicas.settle()
    replicas.flush()
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = replicas.ask(replicas.a, ids)
    replicas.settle()
    with replicas.admin() as admin:
        (first, second) = admin.blocks(10)
    assert (first["block"], second["block"]) == (0, 1)
    slot = next(slot for slot in second["slots"] if slot["part"] == part)
    with arena_of(replicas) as arena:
        start, size = slot["offset"], slot["slot_bytes"]
        assert any(arena[start : start + size])
        arena[start : start + size] = bytes(size)
    moved, name = replicas.ask(replicas.b, ids)
    assert replicas.report(name).loaded_tokens == 2 * BLOCK
    assert differ(moved, cold)
    replicas.flush()


def test_only_the_windows_blocks_are_loaded(sliding: Replicas) -> None:
    """Of a long prefix all attention pages are read, of the windows as far as they reach."""
    num_blocks = 6
    ids = prompt(num_blocks * BLOCK + 20, next(SEEDS))
    sliding.ask(sliding.a, ids)
    sliding.settle()
    with sliding.admin() as admin:
        blocks = admin.blocks(1000)
    sizes = {slot["part"]: slot["slot_bytes"] for b in blocks for slot in b["slots"]}
    before = sliding.bytes_read(sliding.b)
    _, name = sliding.ask(sliding.b, ids)
    assert sliding.report(name).loaded_tokens == num_blocks * BLOCK
    expected = num_blocks * sizes[0] + WINDOW // BLOCK * sizes[1]
    assert sliding.bytes_read(sliding.b) - before == expected


def test_a_window_without_its_pages_is_no_hit(sliding: Replicas) -> None:
    """A prefix is usable as far back as the windows before its end are there."""
    sliding.settle()
    sliding.flush()
    ids = prompt(5 * BLOCK + 20, next(SEEDS))
    # Asked for without the pool first: of the early windows there is nothing left to store.
    sliding.ask(sliding.a, ids[: 4 * BLOCK + 20], fields=SKIP_POOL)
    _, name = sliding.ask(sliding.a, ids)
    assert sliding.report(name).local_tokens == 4 * BLOCK
    sliding.settle()
    with sliding.admin() as admin:
        by_block = {b["block"]: {s["part"] for s in b["slots"]} for b in admin.blocks(10)}
    assert by_block == {0: {0}, 1: {0}, 2: {0, 1}, 3: {0, 1}, 4: {0, 1}}
    short = ids[: 3 * BLOCK + 20]
    computed, name = sliding.ask(sliding.b, short)
    assert sliding.report(name).loaded_tokens == 0, "resuming after 3 needs the windows of 1 and 2"
    again, _ = sliding.ask(sliding.a, short, fields=SKIP_POOL)
    assert_same(computed, again)
    sliding.settle()
    sliding.reset(sliding.b)
    _, name = sliding.ask(sliding.b, ids)
    assert sliding.report(name).loaded_tokens == 5 * BLOCK
