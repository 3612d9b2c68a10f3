"""What the demo reports, and when it says no."""

import html
import json
import re
from pathlib import Path

import pytest

from millpond.cli.context import Context
from millpond.cli.demo import own_environ, publish
from millpond.cli.exits import AnswerIsNo
from millpond.launch.conversation import Conversation, Turn, are_identical
from millpond.launch.demo import OTHER_STEPS_TOLERANCE, DemoRow
from millpond.launch.engine_client import Completion
from millpond.launch.report import DemoResult


def row(**changes: object) -> DemoRow:
    fields: dict[str, object] = {
        "prompt_tokens": 4096,
        "cold_ttft_s": 2.0,
        "local_ttft_s": 0.1,
        "moved_off_ttft_s": 2.1,
        "moved_on_ttft_s": 0.12,
        "loaded_bytes": 8_000_000,
        "identical": True,
        "loaded_tokens": 3840,
        "written_by": {"a": 3840},
        "same_steps_logprob_difference": 0.0,
        "other_steps_logprob_difference": 0.0,
        "num_rounds": 1,
    }
    return DemoRow(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def turn(number: int, replica: str, **changes: object) -> Turn:
    fields: dict[str, object] = {
        "number": number,
        "prompt_tokens": 4000 + 500 * number,
        "ttft_s": 0.5,
        "replica": replica,
        "prefix_holder": None if number == 1 else "ab"[replica == "a"],
        "is_moved": number > 1,
        "attribution": "pool",
        "computed_tokens": 4000 + 500 * number,
        "local_tokens": 0,
        "pool_own_tokens": 0,
        "pool_other_tokens": 0,
        "written_by": {},
    }
    return Turn(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def conversation(**changes: object) -> Conversation:
    counts = {"a": {"computed": 5660, "local": 0, "loaded": 3840}}
    fields: dict[str, object] = {
        "off": (turn(1, "a"), turn(2, "b", ttft_s=1.25)),
        "on": (
            turn(1, "a"),
            turn(
                2,
                "b",
                ttft_s=0.25,
                computed_tokens=1160,
                pool_other_tokens=3840,
                written_by={"a": 3840},
            ),
        ),
        "identical": True,
        "logprob_difference": 0.0,
        "counts": {"router": counts, "pool": counts, "engines": counts},
    }
    return Conversation(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def context() -> Context:
    return Context(environ={}, argv=("demo",))


def test_the_demo_writes_its_rows_where_readers_look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(context(), DemoResult([row()], conversation()), tmp_path, 2**28, as_json=True)
    document = json.loads((tmp_path / "demo.json").read_text())
    assert document == json.loads(capsys.readouterr().out)
    assert document["rows"] == document["data"]["rows"]
    assert document["rows"][0]["moved_on_ttft_s"] == 0.12
    found = document["data"]["conversation"]
    assert (found["off_ttft_s"], found["on_ttft_s"]) == (1.75, 0.75)
    assert found["on"][1]["written_by"] == {"a": 3840}
    page = (tmp_path / "demo.html").read_text()
    assert "17 times" in page
    for words in ("1.75 s", "750 ms", "a: 3,840", "<td>b</td><td>a</td><td>yes</td>"):
        assert words in page
    for outside in ("http://", "https://", "<script", "<link", "src="):
        assert outside not in page, "the page has to stand alone"


def test_the_table_of_a_conversation_says_who_served_and_who_had_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(context(), DemoResult([row()], conversation()), tmp_path, 2**28, as_json=False)
    printed = capsys.readouterr().out
    assert "first tokens, all turns: 1.750 s with the pool off, 0.750 s on" in printed
    last = printed[: printed.index("first tokens, all")].rstrip().splitlines()[-1].split()
    assert last == ["on", "2", "5,000", "0.250", "b", "a", "yes", "1,160", "0", "3,840", "a"]


ZEROS: dict[str, object] = {"pool_other_tokens": 0, "written_by": {}}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (DemoResult([row(), row(identical=False)], conversation()), "differ"),
        (DemoResult([row(), row(loaded_tokens=0)], conversation()), "not served by the pool"),
        (DemoResult([row(), row()], conversation(identical=False)), "conversation: the outputs"),
        *(
            (DemoResult([row(), row()], conversation(**{pool: turns})), f"pool {pool}, {words}")
            for pool, turns, words in (
                ("on", (turn(1, "a"), turn(2, "b", **ZEROS)), "turn 2: it was not served by what"),
                ("off", (turn(1, "a", pool_own_tokens=5),), "turn 1: it was served by a pool"),
                ("off", (turn(1, "a"), turn(2, "a", is_moved=False)), "turn 2: it did not move"),
                ("off", (turn(1, "a", attribution="guessed"),), "turn 1: nobody has told"),
            )
        ),
        *(
            (
                DemoResult(
                    [row(), row()],
                    conversation(counts={**conversation().counts, who: {"a": {"computed": 1}}}),
                ),
                f"router counts the tokens .*, {who} ",
            )
            for who in ("pool", "engines")
        ),
    ],
)
def test_the_demo_says_no_after_writing_everything(
    result: DemoResult, words: str, tmp_path: Path
) -> None:
    with pytest.raises(AnswerIsNo, match=words):
        publish(context(), result, tmp_path, 2**28, as_json=False)
    page = html.unescape((tmp_path / "demo.html").read_text())
    assert re.search(words, page)
    assert 'class="verdict bad"' in page
    assert len(json.loads((tmp_path / "demo.json").read_text())["rows"]) == 2


def test_conversations_are_identical_by_tokens_and_their_odds() -> None:
    def answers(last_token: int, last_odds: float) -> list[Completion]:
        return [
            Completion("1", (5, 6), (-0.1, -0.2), 0.1, 0.2),
            Completion("2", (7, last_token), (-0.3, last_odds), 0.1, 0.2),
        ]

    honest = answers(8, -0.4)
    assert are_identical(honest, answers(8, -0.5))
    assert not are_identical(honest, answers(9, -0.4))
    assert not are_identical(honest, answers(8, -0.4 - 2 * OTHER_STEPS_TOLERANCE))


def test_another_routers_settings_are_not_for_the_demos() -> None:
    environ = {"MILLPOND_ROUTER_API_KEY_FILE": "/k", "MILLPOND_CONFIG": "/f", "HOME": "/h"}
    given = own_environ(Context(environ=environ, argv=("demo",)))
    assert not any(name.startswith("MILLPOND_ROUTER") for name in given)
    assert (given["MILLPOND_CONFIG"], given["HOME"]) == ("/dev/null", "/h")
