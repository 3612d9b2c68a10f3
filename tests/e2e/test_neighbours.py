"""Who must never be given whose blocks, on real engines: other models, salts and adapters."""

import itertools
import re

import pytest

from tests.e2e.engines import BLOCK, Replicas, assert_same, differ, prompt

pytestmark = pytest.mark.timeout(600)

SEEDS = itertools.count(30_000)


def loads(replicas: Replicas, replica: str, ids: list[int], **how: object) -> dict[str, int]:
    """Ask, and return how many tokens were loaded from the blocks of each writer."""
    _, name = replicas.ask(replica, ids, num_tokens=2, **how)  # pyright: ignore[reportArgumentType]
    replicas.settle()
    report = replicas.report(name)
    assert report.local_tokens == 0, "what is local says nothing about the pool"
    return report.writers


def test_two_models_of_different_shape_use_one_pool_and_share_nothing(
    hybrid: Replicas, sliding: Replicas
) -> None:
    ids = prompt(2 * BLOCK + 30, next(SEEDS))
    assert loads(hybrid, hybrid.a, ids) == {}
    num_blocks = hybrid.pool()["num_blocks"]
    assert loads(sliding, sliding.a, ids) == {}
    assert sliding.pool()["num_blocks"] == num_blocks + 2
    assert loads(hybrid, hybrid.b, ids) == {hybrid.a: 2 * BLOCK}
    assert loads(sliding, sliding.b, ids) == {sliding.a: 2 * BLOCK}


@pytest.mark.engines
def test_one_model_in_another_type_and_block_size_is_not_shared_and_the_log_says_why(
    attention: Replicas,
) -> None:
    ids = prompt(2 * BLOCK + 30, next(SEEDS))
    assert loads(attention, "a", ids) == {}
    assert loads(attention, "c", ids) == {}
    attention.reset("c")
    assert loads(attention, "c", ids) == {"c": 2 * BLOCK}
    assert loads(attention, "b", ids) == {"a": 2 * BLOCK}
    # Whoever joined later was told.
    told = attention.log("a") + attention.log("c")
    lines = re.findall(r"event=not_shared replica=[ac] .*", told)
    fields = {match for line in lines for match in re.findall(r"field=(\w+)", line)}
    assert {"dtype", "engine_block_tokens", "layout"} <= fields
    dtypes = next(line for line in lines if "field=dtype" in line)
    assert "'bfloat16'" in dtypes
    assert "'float32'" in dtypes
    assert "event=not_shared replica=b" not in attention.log("a"), "a and b do share"


@pytest.mark.engines
def test_a_salted_prefix_is_hit_with_its_salt_alone(attention: Replicas) -> None:
    ids = prompt(2 * BLOCK + 30, next(SEEDS))
    mine = {"cache_salt": "mine"}
    assert loads(attention, "a", ids, fields=mine) == {}
    assert loads(attention, "b", ids) == {}
    attention.reset("b")
    assert loads(attention, "b", ids, fields={"cache_salt": "yours"}) == {}
    attention.reset("b")
    assert loads(attention, "b", ids, fields=mine) == {"a": 2 * BLOCK}


@pytest.mark.engines
def test_an_adapter_is_given_neither_the_base_models_blocks_nor_another_adapters(
    attention: Replicas,
) -> None:
    ids = prompt(2 * BLOCK + 30, next(SEEDS))
    base, _ = attention.ask("a", ids)
    attention.settle()
    assert loads(attention, "b", ids, model="x") == {}
    adapted, _ = attention.ask("b", ids, model="x")
    assert differ(adapted, base), "or nothing would be seen of a wrong hit"
    attention.settle()
    moved, name = attention.ask("a", ids, model="x")
    assert attention.report(name).writers == {"b": 2 * BLOCK}
    assert_same(moved, adapted)
    assert loads(attention, "a", ids, model="y") == {}
    assert loads(attention, "b", ids) == {"a": 2 * BLOCK}
