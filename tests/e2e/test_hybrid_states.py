"""A hybrid's recurrent states on real engines: kept, resumed from, and gone before their pages.

Run by `make test-engines`.
"""

import itertools

import pytest

from tests.e2e.engines import BLOCK, SKIP_POOL, Replicas, assert_same, prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SEEDS = itertools.count(70_000)
PAGES, STATE = 0, 1


@pytest.fixture(params=["hybrid", "older"])
def pair(request: pytest.FixtureRequest) -> Replicas:
    """The engine under test, and 0.27.1."""
    found: Replicas = request.getfixturevalue(request.param)
    return found


def parts_by_block(replicas: Replicas) -> list[tuple[int, set[int]]]:
    """Return the position of each block of the pool in its prefix, and which parts it has."""
    with replicas.admin() as admin:
        blocks = admin.blocks(1000)
    return sorted((b["block"], {slot["part"] for slot in b["slots"]}) for b in blocks)


def assert_resumes(replicas: Replicas, ids: list[int], num_blocks: int) -> None:
    """Check that b loads so many blocks of a prompt, and answers as it does without the pool."""
    replicas.settle()
    replicas.reset("b")
    moved, name = replicas.ask("b", ids)
    assert replicas.report(name).loaded_tokens == num_blocks * BLOCK
    replicas.settle()
    replicas.reset("b")
    cold, _ = replicas.ask("b", ids, fields=SKIP_POOL)
    assert_same(moved, cold)


def test_a_request_resumes_from_each_state_that_was_kept(pair: Replicas) -> None:
    pair.settle()
    pair.flush()
    ids = prompt(4 * BLOCK + 30, next(SEEDS))
    for num_blocks in (1, 2, 3, 4):
        pair.ask("a", ids[: num_blocks * BLOCK + 30], num_tokens=1)
        pair.settle()
    assert parts_by_block(pair) == [(block, {PAGES, STATE}) for block in range(4)]
    for num_blocks in (4, 1, 3, 2):
        fork = [*ids[: num_blocks * BLOCK], *prompt(40, next(SEEDS))]
        assert_resumes(pair, fork, num_blocks)


def test_pages_without_a_state_are_nothing_to_resume_from(pair: Replicas) -> None:
    """A prompt in one step: the engine stops at its last boundary alone."""
    pair.settle()
    pair.flush()
    ids = prompt(4 * BLOCK + 30, next(SEEDS))
    pair.ask("a", ids, num_tokens=1)
    pair.settle()
    assert parts_by_block(pair) == [
        (0, {PAGES}),
        (1, {PAGES}),
        (2, {PAGES}),
        (3, {PAGES, STATE}),
    ]
    assert_resumes(pair, [*ids[: 3 * BLOCK], *prompt(40, next(SEEDS))], 0)
    assert_resumes(pair, [*ids[: 4 * BLOCK], *prompt(40, next(SEEDS))], 4)


def test_a_prompt_of_whole_blocks_resumes_one_block_before_its_end(pair: Replicas) -> None:
    ids = prompt(3 * BLOCK, next(SEEDS))
    pair.ask("a", ids, num_tokens=1)
    assert_resumes(pair, ids, 2)


def test_states_leave_before_pages_and_their_prompts_are_computed(pair: Replicas) -> None:
    """More conversations than the budget has room for: half of 64 MiB, at 0.8 MB a state."""
    pair.settle()
    pair.flush()
    before = pair.pool()["evictions"]
    prompts = [prompt(BLOCK + 5, next(SEEDS)) for _ in range(50)]
    for ids in prompts:
        pair.ask("a", ids, num_tokens=1)
    pair.settle()
    after = pair.pool()["evictions"]
    assert after["budget"] > before["budget"]
    assert after["victim"] == before["victim"], "no page had to go"
    parts = [parts for _, parts in parts_by_block(pair)]
    assert len(parts) == 50
    assert all(PAGES in each for each in parts)
    num_states = sum(STATE in each for each in parts)
    assert 30 < num_states < 50
    assert_resumes(pair, prompts[0], 0)
    assert_resumes(pair, prompts[-1], 1)
