"""The comparison of policies replays a trace as it says; on a small made trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import eviction
from millpond.model.names import Admission, Eviction
from millpond.model.retention import Retention
from tests.meta.checks import ROOT

SAMPLE = ROOT / "benchmarks/samples/turns.jsonl"
"""Conversations of several turns that share a system prompt, and prompts that come once."""
BLOCK = eviction.BLOCK_TOKENS


def expected_hits(*, second_touch: bool) -> float:
    """Return the hit ratio of a pool that never evicts, from the trace alone."""
    stored: set[int] = set()
    offered: set[int] = set()
    num_hit = num_asked = 0
    for line in SAMPLE.read_text().splitlines():
        row = json.loads(line)
        blocks = row["hash_ids"][: row["input_length"] // BLOCK]
        usable = blocks[: (row["input_length"] - 1) // BLOCK]
        num_hit += BLOCK * next((i for i, b in enumerate(usable) if b not in stored), len(usable))
        num_asked += row["input_length"]
        for block in blocks:
            if second_touch and block not in offered | stored:
                break
            stored.add(block)
        offered.update(blocks)
    return round(num_hit / num_asked, 4)


def ratios(
    num_blocks: int, retention: Retention, *, steps: eviction.Steps | None = None
) -> eviction.Result:
    requests = eviction.read_trace(SAMPLE)
    pool_bytes = num_blocks * eviction.PAGES_BYTES
    return eviction.replay("turns", requests, pool_bytes, retention, steps)


@pytest.mark.parametrize("policy", Eviction)
def test_pool_with_room_for_all_hits_all_that_was_there_before(policy: Eviction) -> None:
    always = ratios(1000, Retention(policy))
    second = ratios(1000, Retention(policy, Admission.SECOND_TOUCH))
    assert (always.hit_ratio, always.num_evictions) == (expected_hits(second_touch=False), 0)
    assert (second.hit_ratio, second.num_evictions) == (expected_hits(second_touch=True), 0)
    assert 0 < second.hit_ratio < always.hit_ratio < 1
    assert second.num_blocks_written < always.num_blocks_written


@pytest.mark.parametrize("policy", Eviction)
def test_smaller_pools_evict_and_hit_less(policy: Eviction) -> None:
    results = [ratios(num_blocks, Retention(policy)) for num_blocks in (4, 12, 1000)]
    assert [result.num_evictions > 0 for result in results] == [True, True, False]
    assert results[0].hit_ratio < results[1].hit_ratio < results[2].hit_ratio


def test_states_cost_hits_where_they_have_little_room() -> None:
    steps = eviction.Steps(32, 0)
    few = ratios(64, Retention(state_ratio=0.08), steps=steps)
    many = ratios(64, Retention(state_ratio=0.5), steps=steps)
    assert 0 < few.hit_ratio < many.hit_ratio <= expected_hits(second_touch=False)


@pytest.mark.parametrize(("inner_blocks", "num_states"), [(0, 12), (24, 5), (1000, 2)])
def test_within_a_prompt_states_are_stored_as_their_pages_allow(
    inner_blocks: int, num_states: int
) -> None:
    """The prompt's end, the first step's, and another for each so many blocks."""
    keys = b"".join(map(eviction.key_of, range(96)))
    run = eviction.Replay(
        1000 * eviction.PAGES_BYTES,
        Retention(),
        eviction.namespace((eviction.PAGES, eviction.STATE)),
        eviction.Steps(8, inner_blocks),
    )
    run.run([eviction.Request(1, 96 * BLOCK + 1, keys)])
    sizes: Any = run.pool.statistics()["slot_sizes"]
    assert [s["num_slots"]["committed"] for s in sizes if s["holds_states"]] == [num_states]


def test_requests_of_one_millisecond_come_one_after_the_other(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 5, "input_length": 1500, "output_length": 1, "hash_ids": [3, 4, 5]}
    path.write_text(f"{json.dumps(row)}\n" * 3)
    requests = eviction.read_trace(path)
    assert len({request.at_ns for request in requests}) == 3
    assert {len(request.keys) for request in requests} == {2 * eviction.KEY_BYTES}, "full blocks"


def test_prints_a_table_with_a_row_for_each_pool(capsys: pytest.CaptureFixture[str]) -> None:
    eviction.main([str(SAMPLE), "--tokens", "4K,1M"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "| trace | pool | lru, always | arc, always | lru, second-touch | arc, second-touch |"
    )
    assert [line.split(" | ")[1] for line in lines[2:]] == ["0.00358 M tokens", "1 M tokens"]
    assert lines[3].split(" | ")[2] == f"{100 * expected_hits(second_touch=False):.2f}"


def test_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    eviction.main([str(SAMPLE), "--hybrid", "--sizes", "4GiB", "--json"])
    rows = json.loads(capsys.readouterr().out)
    lru = [row["state_ratio"] for row in rows if row["eviction"] == "lru"]
    assert lru == list(eviction.STATE_RATIOS)
    assert [row["state_ratio"] for row in rows if row["eviction"] == "arc"] == [0.5]
    assert {row["pool_bytes"] for row in rows} == {4 * 2**30}
