"""`millpond inspect` on blocks as a daemon describes them."""

import json
from typing import Self

import pytest

from millpond.cli import run
from millpond.cli.context import Context
from millpond.cli.exits import Exit
from millpond.cli.keys import Blocks
from millpond.model.errors import InvariantBroken
from millpond.model.limits import BLOCKS_SHOWN_MAX
from millpond.service.protocol import Report


def block(key: str, parent: str, number: int, **changes: object) -> dict[str, object]:
    slot = {
        "part": 0,
        "offset": 4096 * number,
        "slot_bytes": 4096,
        "state": "committed",
        "num_holds": 0,
        "writer": "a",
    }
    return {
        "namespace": 0,
        "key": key,
        "parent": parent,
        "block": number,
        "is_ready": True,
        "slots": [slot | changes],
    }


STATE = {"part": 1, "offset": 0, "slot_bytes": 64, "state": "reserved", "num_holds": 1}
FORKED = [
    block("aa01", "", 0),
    block("aa02", "aa01", 1, writer="b", num_holds=2),
    block("bb03", "aa02", 2),
    block("cc03", "aa02", 2, state="reserved") | {"is_ready": False},
]
OTHER = block("aa01", "", 0) | {"namespace": 1}


class Admin:
    """Answers as a daemon with these blocks."""

    def __init__(self, blocks: list[dict[str, object]], num_hidden: int = 0) -> None:
        self._blocks = blocks
        self._num_hidden = num_hidden
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def status(self) -> dict[str, object]:
        return {"pool": {"num_blocks": len(self._blocks) + self._num_hidden}}

    def blocks(self, num_max: int) -> tuple[dict[str, object], ...]:
        assert num_max == BLOCKS_SHOWN_MAX
        return tuple(self._blocks)

    def requests_named(self, request_id: str) -> tuple[tuple[str, Report], ...]:
        report = Report(
            request_id=request_id,
            prompt_tokens=10,
            computed_tokens=1,
            local_tokens=2,
            loaded_tokens=7,
            writers={"a": 7},
        )
        return (("b", report),) if request_id == "mine" else ()


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    found = Admin([*FORKED, OTHER])
    monkeypatch.setattr(Context, "connect", lambda *_: found)
    return found


def test_a_chain_leads_from_block_0_to_the_key_and_nowhere_else() -> None:
    blocks = Blocks(FORKED)
    (last,) = blocks.named("cc")
    assert [each.key for each in blocks.chain(last)] == ["aa01", "aa02", "cc03"]
    assert [each.key for each in blocks.ends()] == ["bb03", "cc03"]


def test_chains_of_two_namespaces_are_kept_apart() -> None:
    blocks = Blocks([*FORKED, OTHER])
    assert [each.namespace for each in blocks.named("aa01")] == [0, 1]
    assert [each.namespace for each in blocks.chain(blocks.named("aa01")[1])] == [1]
    assert [each.namespace for each in blocks.ends()] == [0, 0, 1]


def test_totals_are_by_namespace_and_part() -> None:
    described = [dict(each) for each in FORKED]
    described[0]["slots"] = [*FORKED[0]["slots"], STATE | {"writer": "a"}]  # type: ignore[misc]
    (total,) = Blocks(described).summary()
    pages, states = total.pop("parts")  # type: ignore[misc]
    assert total == {
        "namespace": 0,
        "num_blocks": 4,
        "num_ready": 3,
        "num_prefixes": 2,
        "longest_prefix": 3,
    }
    assert pages["num_by_state"] == {"committed": 3, "reserved": 1}
    assert pages["num_by_writer"] == {"a": 3, "b": 1}
    assert (pages["num_slots"], pages["num_held"], pages["slot_bytes"]) == (4, 1, 4096)
    assert (states["part"], states["num_slots"], states["num_held"]) == (1, 1, 1)


def test_without_a_key_totals_and_the_longest_prefixes_are_shown(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect"], {}) == Exit.OK
    text = capsys.readouterr().out
    assert "invariants hold" in text
    assert "are not counted here" not in text
    assert text.index("bb03") < text.index("aa01"), "longest first"
    assert run(["inspect", "--limit", "1"], {}) == Exit.OK
    text = capsys.readouterr().out
    assert "bb03" in text
    assert "cc03" not in text


def test_a_key_is_shown_with_the_parts_of_its_prefix(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", "--key", "CC"], {}) == Exit.OK
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[1:2].isdigit()]
    assert rows == [
        ["0", "aa01", "yes", "0", "committed", "a", "0", "0"],
        ["1", "aa02", "yes", "0", "committed", "b", "2", "4,096"],
        ["2", "cc03", "no", "0", "reserved", "a", "0", "8,192"],
    ]


def test_json_has_the_chain_and_the_request(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", "--key", "bb", "--request", "mine", "--json"], {}) == Exit.OK
    data = json.loads(capsys.readouterr().out)["data"]
    assert [each["key"] for each in data["chain"]] == ["aa01", "aa02", "bb03"]
    assert data["chain"][1]["slots"][0]["num_holds"] == 2
    assert data["requests"][0]["writers"] == {"a": 7}
    assert data["invariants"] == "hold"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--key", "aa"], "3 keys begin with aa"),
        (["--key", "dd"], "no key begins with dd among the pool's 5 blocks"),
        (["--request", "other"], "'other'"),
    ],
)
def test_what_is_not_there_ends_with_1(
    admin: Admin, argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", *argv], {}) == Exit.NO
    assert words in capsys.readouterr().err


def test_blocks_that_one_answer_does_not_show_are_admitted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Context, "connect", lambda *_: Admin(FORKED, num_hidden=9000))
    assert run(["inspect"], {}) == Exit.OK
    assert "Of 9,004 blocks, one answer shows 4: 9,000 are not counted here" in " ".join(
        capsys.readouterr().out.split()
    )
    assert run(["inspect", "--key", "dd"], {}) == Exit.NO
    assert "the 4 blocks that one answer shows; the pool holds 9,004" in capsys.readouterr().err


def test_a_broken_invariant_ends_with_5(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    admin.error = InvariantBroken("slot 3 is free and committed")
    assert run(["inspect"], {}) == Exit.BROKEN
    assert "slot 3" in capsys.readouterr().err
