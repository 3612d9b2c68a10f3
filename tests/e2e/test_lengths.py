"""Every length of prompt around every block boundary; run by `make test-engines`."""

import itertools

import pytest

from tests.e2e.engines import BLOCK, Replicas, full_blocks, prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(3600)]

SEEDS = itertools.count(2_000_000)
LENGTHS = range(BLOCK - 2, 3 * BLOCK + 3)


def test_a_prompt_of_any_length_moves(replicas: Replicas) -> None:
    for length in LENGTHS:
        ids = prompt(length, next(SEEDS))
        cold, _ = replicas.ask(replicas.a, ids, num_tokens=3)
        replicas.settle()
        moved, name = replicas.ask(replicas.b, ids, num_tokens=3)
        assert replicas.report(name).loaded_tokens == full_blocks(length), length
        assert moved.token_ids == cold.token_ids, length
        assert moved.logprobs == pytest.approx(cold.logprobs, abs=replicas.tolerance), length
