"""One engine on two ranks: each copies its own half, and both halves make a block."""

import itertools

import pytest

from tests.e2e.engines import (
    BLOCK,
    Gates,
    Replicas,
    arena_of,
    assert_same,
    differ,
    prompt,
)

# Two engines of two ranks on two cores take minutes: `make test-engines`.
pytestmark = [pytest.mark.timeout(600), pytest.mark.engines]

SEEDS = itertools.count(50_000)


def test_what_two_ranks_stored_they_load(parallel: Replicas) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = parallel.ask("a", ids)
    parallel.settle()
    parallel.reset("a")
    loaded, name = parallel.ask("a", ids)
    assert parallel.report(name).writers == {"a": 2 * BLOCK}
    assert_same(loaded, cold)
    parallel.settle()


@pytest.mark.parametrize("late", [0, 1])
def test_a_block_is_a_hit_only_when_every_rank_has_committed(
    parallel: Replicas, gates: Gates, late: int
) -> None:
    parallel.flush()
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    with gates(f"hold-store-{late}"):
        cold, _ = parallel.ask("a", ids)
        # Long enough for the other rank: a copy takes milliseconds, this many steps of a model.
        parallel.ask("a", prompt(BLOCK - 10, next(SEEDS)), num_tokens=8)
        with parallel.admin() as admin:
            blocks = admin.blocks(10)
        assert [block["is_ready"] for block in blocks] == [False, False]
        states = {slot["state"] for block in blocks for slot in slots(block)}
        assert states == {"reserved"}
    parallel.settle()
    with parallel.admin() as admin:
        assert [block["is_ready"] for block in admin.blocks(10)] == [True, True]
    parallel.reset("a")
    loaded, name = parallel.ask("a", ids)
    assert parallel.report(name).loaded_tokens == 2 * BLOCK
    assert_same(loaded, cold)
    parallel.settle()


def slots(block: dict[str, object]) -> list[dict[str, object]]:
    found = block["slots"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("kind", ["load", "store"])
def test_one_rank_that_fails_makes_all_ranks_compute(
    parallel: Replicas, gates: Gates, kind: str
) -> None:
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    with gates("fail-store-1" if kind == "store" else "hold-nothing"):
        cold, _ = parallel.ask("a", ids)
        parallel.settle()
    parallel.reset("a")
    with gates("fail-load-0" if kind == "load" else "hold-nothing"):
        again, name = parallel.ask("a", ids)
        assert parallel.report(name).loaded_tokens == 0
    assert_same(again, cold)
    parallel.settle()


def test_a_corrupted_half_changes_the_output(parallel: Replicas) -> None:
    """The control: what either rank has loaded is seen in the answer."""
    for rank in (0, 1):
        parallel.settle()
        parallel.flush()
        ids = prompt(2 * BLOCK + 20, next(SEEDS))
        cold, _ = parallel.ask("a", ids)
        parallel.settle()
        parallel.reset("a")
        with parallel.admin() as admin:
            (_, second) = admin.blocks(10)
        with arena_of(parallel) as arena:
            for slot in slots(second):
                half = int(str(slot["slot_bytes"])) // 2
                start = int(str(slot["offset"])) + rank * half
                assert any(arena[start : start + half])
                arena[start : start + half] = bytes(half)
        moved, name = parallel.ask("a", ids)
        assert parallel.report(name).loaded_tokens == 2 * BLOCK
        assert differ(moved, cold)
        parallel.settle()
    parallel.flush()
