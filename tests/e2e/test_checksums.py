"""Real engines with checksums: a byte that changed in the arena costs time, not the answer.

The control, the same without checksums, is ``test_one_corrupted_page_changes_the_output``.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import BLOCK, SETTLE_S, Replicas, arena_of, assert_same, prompt
from tests.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

SEEDS = itertools.count(860_000)


def checks(replicas: Replicas) -> dict[str, int]:
    return replicas.pool()["checks"]


def daemon_log(replicas: Replicas) -> str:
    return Path(replicas.system.run_dir, "pool.log").read_text(errors="replace")


def second_block(replicas: Replicas) -> dict[str, Any]:
    """Return the second of the only two blocks in the pool."""
    with replicas.admin() as admin:
        (first, second) = admin.blocks(10)
    assert (first["block"], second["block"]) == (0, 1)
    return second


def test_what_is_sound_is_compared_and_served(guarded: Replicas) -> None:
    before = checks(guarded)
    ids = prompt(3 * BLOCK + 20, next(SEEDS))
    cold, _ = guarded.ask("a", ids)
    guarded.settle()
    moved, name = guarded.ask("b", ids)
    assert guarded.report(name).loaded_tokens == 3 * BLOCK
    assert_same(moved, cold)
    guarded.settle()
    after = checks(guarded)
    assert after["num_slots_checked"] - before["num_slots_checked"] == 3 + 1  # pages, one state
    assert after["num_slots_damaged"] == before["num_slots_damaged"]


@pytest.mark.parametrize("part", [0, 1], ids=["attention", "state"])
def test_a_flipped_byte_is_a_miss_and_the_answer_right(guarded: Replicas, part: int) -> None:
    guarded.settle()
    guarded.flush()
    before = checks(guarded)
    ids = prompt(2 * BLOCK + 20, next(SEEDS))
    cold, _ = guarded.ask("a", ids)
    guarded.settle()
    block = second_block(guarded)
    slot = next(slot for slot in block["slots"] if slot["part"] == part)
    with arena_of(guarded) as arena:
        arena[slot["offset"] + slot["slot_bytes"] // 2] ^= 1
    moved, name = guarded.ask("b", ids)
    assert_same(moved, cold)
    report = guarded.report(name)
    assert (report.loaded_tokens, report.computed_tokens) == (0, len(ids))
    guarded.settle()
    after = checks(guarded)
    assert after["num_slots_damaged"] - before["num_slots_damaged"] == 1
    assert guarded.pool()["num_slots"]["quarantined"] == after["num_slots_damaged"]
    lines = [line for line in daemon_log(guarded).splitlines() if f"block={block['key']}" in line]
    (line,) = lines
    assert "damaged block" in line
    assert "writer=a reader=b rank=0" in line
    assert "event=load_failed" in guarded.log("b")
    # What b computed has been stored again, elsewhere, and serves a.
    eventually(
        lambda: bool(second_block(guarded)["is_ready"]), "the block is back", timeout_s=SETTLE_S
    )
    again = next(s for s in second_block(guarded)["slots"] if s["part"] == part)
    assert (again["writer"], again["offset"] == slot["offset"]) == ("b", False)
    guarded.reset("a")
    back, name = guarded.ask("a", ids)
    assert guarded.report(name).loaded_tokens == 2 * BLOCK
    assert_same(back, cold)
    assert checks(guarded)["num_slots_damaged"] == after["num_slots_damaged"]
