"""Engines with the connector interface of vLLM 0.26 and 0.27, beside the one under test."""

import itertools

import pytest

from tests.e2e.engines import (
    BLOCK,
    SKIP_POOL,
    Replicas,
    assert_same,
    differ,
    full_blocks,
    prompt,
)

pytestmark = pytest.mark.timeout(600)

SEEDS = itertools.count(60_000)


@pytest.mark.parametrize(
    "length",
    [
        2 * BLOCK + 30,
        pytest.param(2 * BLOCK - 1, marks=pytest.mark.engines),
        pytest.param(2 * BLOCK, marks=pytest.mark.engines),
    ],
)
def test_a_request_moves_between_older_engines(older: Replicas, length: int) -> None:
    ids = prompt(length, next(SEEDS))
    cold, _ = older.ask("a", ids)
    older.settle()
    moved, name = older.ask("b", ids)
    assert older.report(name).writers == {"a": full_blocks(length)}
    assert_same(moved, cold)
    older.settle()


def diverging(replicas: Replicas, name: str, length: int) -> list[int]:
    """Return a prompt of which one engine has the attention pages of two blocks and no state."""
    ids = prompt(3 * BLOCK + 100, next(SEEDS))
    # States are kept at the end of the third block alone.
    replicas.ask(name, ids, fields=SKIP_POOL)
    return ids[: 2 * BLOCK + 50] + prompt(length, next(SEEDS))


@pytest.mark.engines
def test_local_hits_of_026_give_wrong_tokens_unless_they_are_reconciled(
    as_026: Replicas,
) -> None:
    """``a`` is left as 0.26 is, ``b`` is mended as the connector mends it there."""
    wrong: list[bool] = []
    for length in (30, 60, 90):
        ids = diverging(as_026, "a", length)
        unmended, _ = as_026.ask("a", ids, fields=SKIP_POOL)
        cold, _ = as_026.ask("b", ids, fields=SKIP_POOL)
        wrong.append(differ(unmended, cold))

        ids = diverging(as_026, "b", length)
        mended, _ = as_026.ask("b", ids, fields=SKIP_POOL)
        as_026.reset("b")
        cold, _ = as_026.ask("b", ids, fields=SKIP_POOL)
        assert_same(mended, cold)
    assert any(wrong), "or there is nothing to mend"
    assert "event=engine_mended what='local prefix hits of hybrid models'" in as_026.log("b")
