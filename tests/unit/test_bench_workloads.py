"""Workloads: who is asked what and after what, decided by the seed alone."""

import itertools
import json
import tarfile
from pathlib import Path

import pytest

from millpond.bench.scenario import Mixed, Moved, Replay, Sessions
from millpond.bench.workloads import Request, requests_of, token_ids
from millpond.model.errors import ConfigError
from tests.meta.checks import ROOT

MOVED = Moved(lengths=(100, 200), prompts=3)
SESSIONS = Sessions(
    placement="alternate",
    initial_tokens=(50,),
    sessions=2,
    turns=4,
    growth_tokens=10,
    output_tokens=5,
    think_s=0.5,
)
MIXED = Mixed(moved_shares=(0.0, 0.3, 1.0), tokens=100, prompts=10)
SAMPLE = ROOT / "benchmarks/samples/turns.jsonl"


def of(workload: Moved | Sessions | Mixed | Replay, seed: str = "1") -> list[Request]:
    return requests_of(workload, seed=seed, num_replicas=2)


@pytest.mark.parametrize("workload", [MOVED, SESSIONS, MIXED], ids=lambda each: each.name)
def test_a_seed_decides_all_prompts(workload: Moved | Sessions | Mixed) -> None:
    first, again, other = of(workload), of(workload), of(workload, "2")
    assert first == again
    assert [token_ids(each.pieces) for each in first] == [token_ids(each.pieces) for each in again]
    assert [each.key for each in first] == [each.key for each in other]
    assert all(
        token_ids(mine.pieces)[0:8] != token_ids(its.pieces)[0:8]
        for mine, its in zip(first, other, strict=True)
    )


@pytest.mark.parametrize("workload", [MOVED, SESSIONS, MIXED], ids=lambda each: each.name)
def test_keys_are_unique_and_each_follows_one_before_it(
    workload: Moved | Sessions | Mixed,
) -> None:
    seen: set[str] = set()
    for request in of(workload):
        assert request.key not in seen
        assert request.after is None or request.after in seen
        seen.add(request.key)


def test_prompts_have_their_lengths_and_no_token_that_ends_a_text() -> None:
    for request in of(MOVED):
        ids = token_ids(request.pieces)
        assert len(ids) == request.num_tokens in MOVED.lengths
        assert all(256 <= token < 2000 for token in ids)


def test_a_moved_prompt_is_asked_of_one_replica_and_then_of_the_other() -> None:
    requests = of(MOVED)
    colds = [each for each in requests if each.role == "cold"]
    moved = {each.after: each for each in requests if each.role == "moved"}
    assert len(colds) == len(moved) == 6
    for cold in colds:
        again = moved[cold.key]
        assert again.pieces == cold.pieces
        assert {cold.replica, again.replica} == {0, 1}
        assert again.wait_s == MOVED.gap_s
    assert {each.replica for each in colds} == {0, 1}, "homes change in turn"


def test_one_after_the_other_unless_several_are_wanted_at_once() -> None:
    one = of(MOVED)
    assert sum(each.after is None for each in one) == 1
    three = of(Moved(lengths=(100, 200), prompts=3, concurrency=3))
    assert sum(each.after is None for each in three) == 3


def test_a_session_grows_and_changes_the_replica_with_each_turn() -> None:
    turns = [each for each in of(SESSIONS) if each.unit == "sessions 50/0"]
    assert [each.num_tokens for each in turns] == [50, 60, 70, 80]
    assert [each.replica for each in turns] == [0, 1, 0, 1]
    assert [each.role for each in turns] == ["cold", "moved", "moved", "moved"]
    assert [each.wait_s for each in turns] == [0.0, 0.5, 0.5, 0.5]
    for before, after in itertools.pairwise(turns):
        ids = token_ids(before.pieces)
        assert token_ids(after.pieces)[: len(ids)] == ids
        assert after.after == before.key


def test_a_fixed_session_stays_where_it_began() -> None:
    fixed = Sessions(
        placement="fixed",
        initial_tokens=(50,),
        sessions=2,
        turns=3,
        growth_tokens=10,
        output_tokens=5,
    )
    turns = of(fixed)
    assert [each.replica for each in turns] == [0, 0, 0, 1, 1, 1]
    assert [each.role for each in turns] == ["cold", "local", "local"] * 2


def test_the_share_of_moved_requests_is_what_was_asked_for() -> None:
    requests = of(MIXED)
    for share, num_moved in ((0.0, 0), (0.3, 3), (1.0, 10)):
        again = [
            each for each in requests if each.group == f"mixed {share:g}" and each.role != "cold"
        ]
        assert len(again) == 10
        assert sum(each.role == "moved" for each in again) == num_moved
    by_key = {each.key: each for each in requests}
    for each in requests:
        if each.after and each.role != "cold":
            assert (each.replica != by_key[each.after].replica) == (each.role == "moved")


# ---------------------------------------------------------------- traces


def replay(trace: Path, **fields: object) -> list[Request]:
    given = {"format": "mooncake", "requests": 1000, "trace": str(trace), **fields}
    return of(Replay(**given))  # pyright: ignore[reportArgumentType]


def test_a_trace_keeps_its_times_lengths_and_shared_prefixes() -> None:
    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    requests = replay(SAMPLE, time_scale=2.0)
    assert [each.num_tokens for each in requests] == [row["input_length"] for row in rows]
    assert [each.arrival_s for each in requests] == [row["timestamp"] / 2000 for row in rows]
    assert [each.replica for each in requests[:4]] == [0, 1, 0, 1]
    one = next(
        i for i, row in enumerate(rows[1:], 1) if row["hash_ids"][0] == rows[0]["hash_ids"][0]
    )
    shared = 0
    for mine, its in zip(rows[0]["hash_ids"], rows[one]["hash_ids"], strict=False):
        shared += mine == its
    mine, its = token_ids(requests[0].pieces), token_ids(requests[one].pieces)
    assert shared >= 1
    assert mine[: 512 * shared] == its[: 512 * shared]
    assert mine[512 * shared :][:8] != its[512 * shared :][:8]


def test_a_trace_can_be_made_shorter() -> None:
    full = replay(SAMPLE)
    small = replay(
        SAMPLE, requests=5, token_scale=0.125, prompt_tokens_max=300, output_tokens_max=4
    )
    assert len(small) == 5
    assert [each.num_tokens for each in small] == [
        min(300, round(each.num_tokens / 8)) for each in full[:5]
    ]
    assert {each.output_tokens for each in small} <= {1, 2, 3, 4}


def session_trace(name: str) -> dict[str, object]:
    return {
        "id": name,
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [
            {"t": 0.0, "in": 130, "out": 7, "hash_ids": [1, 2, 3], "think_time": 0.0},
            {"t": 1.0, "requests": []},
            {"t": 9.0, "in": 200, "out": 7, "hash_ids": [1, 2, 4, 5], "think_time": 3.0},
        ],
    }


@pytest.fixture(params=["folder", "archive"])
def sessions_at(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "sessions"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.json").write_text(json.dumps(session_trace(name)))
    if request.param == "folder":
        return folder
    archive = tmp_path / "sessions.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(folder, "sessions")
    return archive


def test_sessions_of_a_trace_wait_for_their_turns_and_share_nothing(sessions_at: Path) -> None:
    requests = replay(sessions_at, format="sessions", time_scale=2.0)
    by_key = {each.key: each for each in requests}
    assert sorted(by_key) == ["replay/one/0", "replay/one/1", "replay/two/0", "replay/two/1"]
    first, second = by_key["replay/one/0"], by_key["replay/one/1"]
    assert (first.after, first.arrival_s) == (None, 0.0)
    assert (second.after, second.wait_s, second.arrival_s) == (first.key, 1.5, None)
    assert (first.num_tokens, second.num_tokens) == (130, 200)
    ids = token_ids(first.pieces)
    assert token_ids(second.pieces)[:128] == ids[:128]
    assert token_ids(by_key["replay/two/0"].pieces)[:8] != ids[:8]


def test_sessions_can_stay_on_one_replica_and_end_early(sessions_at: Path) -> None:
    fixed = replay(sessions_at, format="sessions", placement="fixed")
    assert [each.replica for each in fixed] == [0, 0, 1, 1]
    assert len(replay(sessions_at, format="sessions", turns_max=1)) == 2


def test_sessions_of_one_name_are_refused(tmp_path: Path) -> None:
    """Their turns would follow each other, and be paired with each other's."""
    for file in ("one", "two"):
        (tmp_path / f"{file}.json").write_text(json.dumps(session_trace("same")))
    with pytest.raises(ConfigError, match="two sessions have the id 'same'"):
        replay(tmp_path, format="sessions")


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no requests"), ("{}\n", "KeyError"), ("nonsense\n", "format 'mooncake'")],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        replay(path)


def test_a_replay_needs_a_trace() -> None:
    with pytest.raises(ConfigError, match="--trace"):
        of(Replay(format="mooncake", requests=1))
    with pytest.raises(ConfigError, match="can't be read"):
        replay(Path("/no/such/trace"))
