"""The gate's page: which bytes were wrong, by block and offset; nothing is fetched."""

import re

import numpy as np
import pytest

from millpond.gate.mutants import MUTANTS, Caught
from millpond.gate.order import OrderReport
from millpond.gate.patterns import Comparison, Epoch, Rows, Wrong, compare, pattern
from millpond.gate.report import order_html, picture
from millpond.gate.verdicts import Edge, Finding, Verdict
from millpond.transfer.copies import Direction


def report(**changes: object) -> OrderReport:
    fields: dict[str, object] = {"device": "emulated", "is_emulated": True, "delay_s": 0.3}
    return OrderReport(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def damaged(num_blocks: int, num_words: int) -> Comparison:
    """Return a comparison in which the last word of the first block is stale, and no other."""
    blocks = tuple(range(1, num_blocks + 1))
    pages = pattern(blocks, 8 * num_words, Epoch.NEW)
    pages[0, -8:] = pattern(blocks, 8 * num_words, Epoch.OLD)[0, -8:]
    return compare(pages, Rows(blocks, Epoch.NEW))


def cells(svg: str) -> list[tuple[int, int, str]]:
    found = re.findall(r'<rect x="(\d+)" y="(\d+)" [^>]*class="k(\d)"', svg)
    return [(int(x), int(y), kind) for x, y, kind in found]


@pytest.mark.parametrize(("num_blocks", "num_words"), [(1, 1), (3, 64), (4, 65), (2, 4096)])
def test_one_wrong_word_is_one_cell_at_the_end_of_its_row(num_blocks: int, num_words: int) -> None:
    drawn = cells(picture(damaged(num_blocks, num_words)))
    wrong = [(x, y) for x, y, kind in drawn if kind == str(Wrong.STALE.value)]
    assert wrong == [(max(x for x, _, _ in drawn), min(y for _, y, _ in drawn))]
    assert {kind for _, _, kind in drawn} <= {"0", "1"}
    assert len({x for x, _, _ in drawn}) <= 64


def test_a_picture_of_very_many_blocks_says_how_many_it_leaves_out() -> None:
    svg = picture(damaged(100, 8))
    assert len(cells(svg)) == 96 * 8
    assert "and 4 more blocks" in svg


def test_the_worst_of_the_words_of_a_cell_is_drawn() -> None:
    kinds = np.zeros((1, 128), np.uint8)
    kinds[0, 7] = Wrong.TORN
    drawn = cells(picture(Comparison((1,), kinds)))
    assert [kind for _, _, kind in drawn if kind != "0"] == [str(Wrong.TORN.value)]


def test_the_page_has_verdicts_pictures_and_facts_and_fetches_nothing() -> None:
    wrong = damaged(3, 64)
    lost = Finding(Edge.E1, "<path>", Direction.STORE, Verdict.NOT_ORDERED, "1 stale", 1536, wrong)
    doubt = Finding(None, "other", None, Verdict.UNTESTED, "no package")
    page = order_html(report(findings=[lost, doubt]), [("Command", "millpond gate order")])
    assert "&lt;path&gt;" in page
    assert "<path>" not in page
    for text in ("1 found wrong", "NOT ordered", "could not test", "no package", "1,536"):
        assert text in page
    assert len(re.findall("<svg viewBox", page)) == 1
    assert not re.search(r"<script|<link|src=|href=|url\(|@import", page)


@pytest.mark.parametrize(
    ("is_caught", "words"), [(True, "checked, and is right"), (False, "1 found wrong")]
)
def test_mutants_are_in_the_page(is_caught: bool, words: str) -> None:
    caught = Caught(MUTANTS[0], is_caught=is_caught, reason="as seen", num_bytes=8)
    page = order_html(report(mutants=[caught]), [])
    assert MUTANTS[0].name in page
    assert words in page


def test_what_could_not_be_tested_is_no_success() -> None:
    doubt = Finding(Edge.E3, "other", Direction.LOAD, Verdict.UNTESTED, "why not")
    assert "1 could not be tested" in order_html(report(findings=[doubt]), [])
