"""Scenario files: those that are shipped are right, and a wrong one says where and what to do."""

from pathlib import Path

import pytest

from millpond.bench.scenario import (
    Mixed,
    Moved,
    Replay,
    Sessions,
    find_scenario,
    load_scenario,
    scenario_files,
)
from millpond.bench.workloads import requests_of
from millpond.model.errors import ConfigError

HEAD = 'name = "x"\ndescription = "y"\n'
MOVED = '[[workload]]\nkind = "moved"\nlengths = [1000]\nprompts = 2\n'
MIXED = '[[workload]]\nkind = "mixed"\nmoved_shares = [0, 0.5]\ntokens = 9\nprompts = 1\n'
SESSIONS = (
    '[[workload]]\nkind = "sessions"\nplacement = "fixed"\ninitial_tokens = [10]\nsessions = 1\n'
    "turns = 2\ngrowth_tokens = 5\noutput_tokens = 4\n"
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_each_design_has_its_scenario_and_one_for_two_cores() -> None:
    files = scenario_files()
    names = {"study", "moved", "sessions", "mixed", "replay"}
    of_attention_alone = {"moved-attention-cpu"}
    assert set(files) == names | {f"{name}-cpu" for name in names} | of_attention_alone
    for name, path in files.items():
        scenario = load_scenario(path)
        assert scenario.name == name
        assert scenario.description


@pytest.mark.parametrize("name", ["study", "study-cpu"])
def test_a_study_has_192_measured_requests_a_period(name: str) -> None:
    scenario = load_scenario(find_scenario(name))
    assert scenario.design.rounds == 1
    numbers = [len(requests_of(each, seed="1", num_replicas=2)) for each in scenario.workload]
    assert sum(numbers) == 192


@pytest.mark.parametrize("name", [name for name in scenario_files() if "replay" not in name])
def test_no_prompt_is_a_multiple_of_the_small_models_block(name: str) -> None:
    """One that is loses its last state, on the replica that computed it as well."""
    if name.endswith("-cpu"):
        scenario = load_scenario(find_scenario(name))
        for workload in scenario.workload:
            for request in requests_of(workload, seed="1", num_replicas=2):
                assert request.num_tokens % 256


def test_a_file_becomes_typed_values(tmp_path: Path) -> None:
    text = HEAD + "[design]\nrounds = 3\n" + MOVED + SESSIONS
    scenario = load_scenario(written(tmp_path, text))
    moved, sessions = scenario.workload
    assert isinstance(moved, Moved)
    assert isinstance(sessions, Sessions)
    assert moved.lengths == (1000,)
    assert (scenario.design.rounds, scenario.design.aa_rounds) == (3, 1)


def test_kinds_are_the_four_workloads(tmp_path: Path) -> None:
    replay = '[[workload]]\nkind = "replay"\nformat = "mooncake"\nrequests = 2\n'
    found = load_scenario(written(tmp_path, HEAD + MIXED + replay)).workload
    assert [type(each) for each in found] == [Mixed, Replay]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + MOVED.replace("[1000]", '["a"]'), ["workload[0].lengths[0] = 'a'", "int"]),
        (HEAD + MOVED.replace("[1000]", "[]"), ["workload[0].lengths = []", ">= 1"]),
        (HEAD + MOVED.replace("= 2", "= 0"), ["workload[0].prompts = 0", ">= 1"]),
        (HEAD + MOVED + "lenghts = [1]\n", ["workload[0].lenghts = [1]", "did you mean lengths?"]),
        (HEAD + MOVED.replace("prompts = 2\n", ""), ["workload[0].prompts is missing", "add it"]),
        (HEAD + MOVED.replace('"moved"', '"mvoed"'), ["workload[0].kind = 'mvoed'"]),
        (HEAD + SESSIONS.replace("fixed", "here"), ["workload[0].placement = 'here'"]),
        (HEAD + "[design]\nrounds = -1\n" + MOVED, ["design.rounds = -1", ">= 0"]),
        (HEAD, ["workload is missing"]),
        (HEAD + MOVED + MOVED, ["workload.name = 'moved'", "name of its own"]),
        (HEAD + MOVED.replace("[1000]", "[9, 8, 9]"), ["workload.lengths has 9 twice"]),
        (HEAD + MIXED.replace("0.5]", "1e-7, 1.0000001e-7]"), ["moved_shares has 1e-07 twice"]),
        (HEAD + "[design\n", ["is not TOML"]),
    ],
)
def test_a_mistake_is_named_with_file_key_value_and_remedy(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_scenario(path)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


def test_an_unknown_scenario_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"moved-cpu.*study"):
        find_scenario("nonsense")
