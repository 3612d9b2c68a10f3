"""The service regression's judgement: what counts as the same, and what comes of a case."""

import os
from collections.abc import Callable
from dataclasses import replace
from http.client import IncompleteRead
from math import nan, nextafter
from unittest.mock import MagicMock

import httpx
import pytest

from millpond.cli import run
from millpond.cli.exits import AnswerIsNo, Exit, NotAllChecked
from millpond.cli.gate_service import ServiceChecked
from millpond.gate import service_launched as launched
from millpond.gate.service import (
    ANYWHERE,
    CASES,
    LAUNCHED_ONLY,
    CaseVerdict,
    ServiceReport,
    choose_cases,
    run_cases,
)
from millpond.gate.service_cases import Case, cases_for
from millpond.gate.service_pair import (
    TOLERANCE,
    CannotCheck,
    Mismatch,
    Pair,
    PairOptions,
    Place,
    Rounding,
)
from millpond.launch.engine_client import Completion
from millpond.model.errors import ConfigError, DaemonGone, InvariantBroken, SetupError


def answer(tokens: list[int], odds: list[float]) -> Completion:
    return Completion("r", tuple(tokens), tuple(odds), 0.1, 0.2)


@pytest.fixture
def pair() -> Pair:
    options = PairOptions(socket="none", block_tokens=256, tolerance=0.1, seed=1, is_own=True)
    places = {"a": Place("http://x", "m", 1000), "b": Place("http://y", "m")}
    return Pair(places, options, lambda _: None)


# ---------------------------------------------------------------- the same


def test_equal_answers_are_counted(pair: Pair) -> None:
    mine, theirs = answer([1, 2, 3], [-1.0, -2.0, -3.0]), answer([1, 2, 3], [-1.09, -2.0, -2.91])
    assert pair.compare(mine, theirs, "x") == 3
    assert not pair.is_changed(mine, theirs)


@pytest.mark.parametrize(
    ("tokens", "odds", "words"),
    [
        ([1, 2, 4], [-1.0, -2.0, -3.0], r"tokens \[1, 2, 4\], \[1, 2, 3\] without the pool"),
        ([1, 2, 3], [-1.0, -2.0, -3.11], "differs by 0.1100"),
        ([1, 2, 3], [-1.0, nan, -3.0], "differs by nan"),
    ],
)
def test_other_answers_are_a_mismatch(
    pair: Pair, tokens: list[int], odds: list[float], words: str
) -> None:
    with pytest.raises(Mismatch, match=f"a case: .*{words}"):
        pair.compare(answer(tokens, odds), answer([1, 2, 3], [-1.0, -2.0, -3.0]), "a case")


def test_a_change_is_more_than_twice_the_tolerance(pair: Pair) -> None:
    first = answer([1], [-1.0])
    assert not pair.is_changed(answer([1], [-1.19]), first)
    assert pair.is_changed(answer([1], [-1.21]), first)
    assert pair.is_changed(answer([2], [-1.0]), first)
    assert pair.is_changed(answer([1, 1], [-1.0, nan]), answer([1, 1], [-1.0, -1.0]))
    pair.options = replace(pair.options, tolerance=0.0)
    assert not pair.is_changed(answer([1], [-1.49]), first), "wrong data has to show"
    assert pair.is_changed(answer([1], [-1.51]), first)


def test_after_a_close_call_the_rest_is_compared_with_what_follows_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[list[int], int]] = []
    replies = {2: answer([1, 2, 3], [-1.0, -2.0, -3.0]), 4: answer([8], [-0.5])}

    def reference(ids: list[int], *, replica: str, num_tokens: int) -> Completion:
        asked.append((ids, num_tokens))
        return replies[len(ids)]

    monkeypatch.setattr(pair, "reference", reference)

    def compare(tokens: list[int], odds: list[float]) -> int:
        return pair.compare_in_batch([70, 71], answer(tokens, odds), "x", replica="b")

    assert compare([1, 2, 3], [-1.0, -2.05, -3.0]) == 3
    assert pair.num_close_calls == 0
    assert compare([1, 9, 8], [-1.0, -2.05, -0.55]) == 3
    assert pair.num_close_calls == 1
    assert asked == [([70, 71], 3), ([70, 71], 3), ([70, 71, 1, 9], 1)]
    for tokens, odds in (
        ([1, 2, 3], [-1.2, -2.0, -3.0]),  # other odds
        ([1, 9, 8], [-1.0, -2.2, -0.5]),  # not a close call
        ([1, 9, 8], [-1.0, -2.05, -0.7]),  # something else after it
    ):
        with pytest.raises(Mismatch):
            compare(tokens, odds)


@pytest.mark.parametrize(
    ("num_tokens", "num_close", "is_right"),
    [(8, 2, True), (8, 3, False), (60, 3, True), (60, 4, False)],
)
def test_too_many_close_calls_are_a_mismatch(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_close: int, is_right: bool
) -> None:
    tokens = [9 if i < num_close else 1 for i in range(num_tokens)]

    def reference(_: list[int], *, replica: str, num_tokens: int) -> Completion:
        assert replica == "b"
        return answer([1] * num_tokens, [-1.0] * num_tokens)

    monkeypatch.setattr(pair, "reference", reference)
    mine = answer(tokens, [-1.05] * num_tokens)
    if is_right:
        assert pair.compare_in_batch([70], mine, "x", replica="b") == num_tokens
        assert pair.num_close_calls == num_close
    else:
        with pytest.raises(Mismatch, match=f"more than {num_close - 1} of {num_tokens} tokens"):
            pair.compare_in_batch([70], mine, "x", replica="b")


@pytest.mark.parametrize(
    ("found", "odds", "tokens", "is_right"),
    [
        (Rounding(0.0, 0), -1.19, [1] * 8, True),  # twice the tolerance of 0.1
        (Rounding(0.0, 0), -1.21, [1] * 8, False),
        (Rounding(0.12, 0), -1.23, [1] * 8, True),
        (Rounding(0.12, 0), -1.25, [1] * 8, False),
        (Rounding(0.3, 0), -1.29, [1] * 8, True),  # three times the tolerance, and no more
        (Rounding(0.3, 0), -1.31, [1] * 8, False),
        (Rounding(0.12, 0), nan, [1] * 8, False),
        (Rounding(0.0, 2), -1.0, [9] * 4 + [1] * 16, True),
        (Rounding(0.0, 2), -1.0, [9] * 5 + [1] * 15, False),
        (Rounding(0.0, 4), -1.0, [9] * 4 + [1] * 16, True),  # a fifth, and no more
        (Rounding(0.0, 4), -1.0, [9] * 5 + [1] * 15, False),
    ],
)
def test_what_a_batch_does_without_the_pool_is_no_mismatch(
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
    found: Rounding,
    odds: float,
    tokens: list[int],
    is_right: bool,
) -> None:
    def reference(_: list[int], *, replica: str, num_tokens: int) -> Completion:
        assert replica == "b"
        return answer([1] * num_tokens, [-1.0] * num_tokens)

    monkeypatch.setattr(pair, "reference", reference)
    mine = answer(tokens, [odds] * len(tokens))
    if is_right:
        assert pair.compare_in_batch([70], mine, "x", replica="b", rounding=found) == len(tokens)
    else:
        with pytest.raises(Mismatch):
            pair.compare_in_batch([70], mine, "x", replica="b", rounding=found)


def test_the_rounding_of_a_batch_is_the_largest_of_its_answers(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_at_once = {
        70: answer([1] * 9 + [9], [-1.0] * 8 + [-1.25, -1.0]),
        71: answer([9, 9] + [1] * 8, [-1.1] * 10),
        72: answer([1] * 10, [-1.31] * 10),
        73: answer([1] * 10, [nan] * 10),
        74: answer([9, 9, 9] + [1] * 7, [-1.0] * 10),
    }

    def reference(ids: list[int], *, replica: str, num_tokens: int) -> Completion:
        if replica == "a":
            return all_at_once[ids[0]]
        return answer([1] * num_tokens, [-1.0] * num_tokens)

    monkeypatch.setattr(pair, "reference", reference)

    def rounding(*prompts: int) -> Rounding:
        asked = [[first] for first in prompts]
        return pair.rounding_in_batch(asked, replica="a", alone_at="b", num_tokens=10)

    found = rounding(70, 71)
    assert found.difference == pytest.approx(0.25)
    assert found.num_close == 2, "of one answer: there are three in all"
    for too_far in (72, 73, 74):
        with pytest.raises(CannotCheck, match="without the pool"):
            rounding(70, too_far)


def test_without_rounding_an_answer_of_a_batch_is_the_same_to_the_last_bit(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.options = replace(pair.options, tolerance=0.0)
    theirs = answer([1, 2], [-1.0, -2.0])

    def reference(_: list[int], *, replica: str, num_tokens: int) -> Completion:
        assert (replica, num_tokens) == ("b", 2)
        return theirs

    monkeypatch.setattr(pair, "reference", reference)

    def compare(tokens: list[int], odds: list[float]) -> int:
        large = Rounding(9.0, 9)  # would make everything equal
        return pair.compare_in_batch([70], answer(tokens, odds), "x", replica="b", rounding=large)

    assert compare([1, 2], [-1.0, -2.0]) == 2
    for tokens, odds in (([1, 2], [-1.0, nextafter(-2.0, 0)]), ([1, 3], [-1.0, -2.0])):
        with pytest.raises(Mismatch):
            compare(tokens, odds)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("", ""),
        ("beside others", "a prompt of 85 tokens is answered otherwise beside others"),
        ("prompt", "with half of its answer in the prompt"),
        ("replica", "at the other replica"),
        ("error", "a request failed: late"),
    ],
)
def test_sums_are_exact_if_no_way_to_ask_changes_a_bit(
    pair: Pair, other: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def say(num_known: int, num_tokens: int, *, is_other: bool) -> Completion:
        odds = [-float(i) for i in range(num_known, num_known + num_tokens)]
        odds[-1] = nextafter(odds[-1], 0) if is_other else odds[-1]
        return answer(list(range(num_known, num_known + num_tokens)), odds)

    def reference(ids: list[int], *, replica: str = "a", num_tokens: int) -> Completion:
        if other == "error":
            raise httpx.ReadTimeout("late")
        is_other = other == "replica" and replica == "b"
        is_other |= other == "prompt" and len(ids) not in launched._TRIED_TOKENS
        return say(len(ids), num_tokens, is_other=is_other)

    def references(prompts: list[list[int]], *, replica: str, num_tokens: int) -> list[Completion]:
        assert replica == "a"
        return [say(len(ids), num_tokens, is_other=other == "beside others") for ids in prompts]

    monkeypatch.setattr(pair, "reference", reference)
    monkeypatch.setattr(pair, "references", references)
    found = launched.inexact_sums(pair)
    assert why in found if why else not found
    # The prompts of the cases are those that they would have been.
    assert pair.prompt(9) == Pair(pair.places, pair.options, lambda _: None).prompt(9)


def test_prompts_follow_the_seed_and_fit(pair: Pair) -> None:
    other = Pair(pair.places, pair.options, lambda _: None)
    first = pair.prompt(300)
    assert other.prompt(300) == first != pair.prompt(300)
    with pytest.raises(CannotCheck, match="take 1000 tokens"):
        pair.prompt(800)


@pytest.mark.parametrize(("num_tokens", "expected"), [(255, 0), (256, 0), (257, 256), (513, 512)])
def test_whole_blocks_and_never_the_last_token(pair: Pair, num_tokens: int, expected: int) -> None:
    assert pair.full_blocks(num_tokens) == expected


# ---------------------------------------------------------------- cases


def report() -> ServiceReport:
    return ServiceReport("a test", "", [], 256, TOLERANCE, 1)


def raising(error: Exception) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize(
    ("work", "verdict", "why"),
    [
        (lambda: 5, CaseVerdict.PASSED, "what it shows"),
        (lambda: 0, CaseVerdict.NOT_CHECKED, "no token was compared"),
        (raising(Mismatch("other tokens")), CaseVerdict.FAILED, "other tokens"),
        (raising(CannotCheck("too quick")), CaseVerdict.NOT_CHECKED, "too quick"),
        (raising(httpx.ReadTimeout("late")), CaseVerdict.FAILED, "ReadTimeout: late"),
        (raising(DaemonGone("gone")), CaseVerdict.FAILED, "DaemonGone: gone"),
        (raising(ValueError("no tokens")), CaseVerdict.FAILED, "no tokens"),
        (raising(ConnectionResetError("reset")), CaseVerdict.FAILED, "ConnectionResetError: reset"),
        (raising(IncompleteRead(b"")), CaseVerdict.FAILED, "IncompleteRead"),
        (raising(InvariantBroken("a hole")), CaseVerdict.FAILED, "the pool is broken: a hole"),
        (raising(KeyError("odd")), CaseVerdict.NOT_CHECKED, "the check itself failed: KeyError"),
    ],
)
def test_what_comes_of_a_case(work: Callable[[], int], verdict: CaseVerdict, why: str) -> None:
    made = report()
    steps: list[str] = []
    case = Case("cold", "what it shows", work)
    run_cases(
        made, ["cold"], [case], on_step=steps.append, before_each=lambda: steps.append("before")
    )
    (result,) = made.cases
    assert (result.name, result.verdict) == ("cold", verdict)
    assert why in result.why
    assert steps == ["cold", "before"]


@pytest.mark.parametrize("error", [CannotCheck("late"), SetupError("late"), TimeoutError("late")])
def test_a_case_whose_replicas_are_not_ready_is_not_checked(error: Exception) -> None:
    made = report()
    case = Case("cold", "", lambda: 1)
    run_cases(made, ["cold"], [case], on_step=lambda _: None, before_each=raising(error))
    assert made.cases[0].verdict is CaseVerdict.NOT_CHECKED
    assert "late" in made.cases[0].why


@pytest.mark.parametrize(
    ("verdicts", "error"),
    [
        (["passed"], None),
        (["passed", "not checked"], NotAllChecked),
        (["not checked", "failed", "passed"], AnswerIsNo),
    ],
)
def test_only_a_full_pass_ends_without_an_error(
    verdicts: list[str], error: type[Exception] | None
) -> None:
    works = {"passed": lambda: 1, "not checked": lambda: 0, "failed": raising(Mismatch("bad"))}
    made = report()
    names = CASES[: len(verdicts)]
    cases = [Case(name, "", works[v]) for name, v in zip(names, verdicts, strict=True)]
    run_cases(made, names, cases, on_step=lambda _: None, before_each=lambda: None)
    found = ServiceChecked(made).error()
    assert found is None if error is None else type(found) is error


def test_sums_that_are_not_exact_are_said() -> None:
    made = report()
    assert "exact" not in ServiceChecked(made).summary()
    made.why_inexact = "a prompt of 85 tokens is answered otherwise beside others"
    assert made.why_inexact in ServiceChecked(made).summary()
    assert made.as_json()["why_inexact"] == made.why_inexact


def test_what_needs_processes_is_listed_as_not_checked(pair: Pair) -> None:
    assert {case.name for case in cases_for(pair)} == set(ANYWHERE)
    made = report()
    run_cases(made, LAUNCHED_ONLY, [], on_step=lambda _: None, before_each=lambda: None)
    assert [case.name for case in made.cases] == list(LAUNCHED_ONLY)
    assert {case.verdict for case in made.cases} == {CaseVerdict.NOT_CHECKED}
    assert "--launch" in made.cases[0].why
    assert isinstance(ServiceChecked(made).error(), NotAllChecked)


def test_cases_are_chosen_by_name() -> None:
    assert choose_cases((), ()) == CASES
    assert choose_cases(("moved-hit", "cold"), ()) == ("cold", "moved-hit")
    assert choose_cases((), ("cold",)) == CASES[1:]
    with pytest.raises(ConfigError, match="no case 'warm'"):
        choose_cases((), ("warm",))
    with pytest.raises(ConfigError, match="leave no case"):
        choose_cases(("cold",), ("cold",))


# ---------------------------------------------------------------- a request in a thread


class Odd(Exception):
    """What nobody expects."""


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (Mismatch("other tokens"), Mismatch),
        (DaemonGone("gone"), DaemonGone),
        (ConnectionResetError("reset"), ConnectionResetError),
        (CannotCheck("late"), CannotCheck),
        (KeyError("odd"), KeyError),
    ],
)
def test_what_a_request_in_a_thread_raises_is_raised(
    raised: Exception, seen: type[Exception]
) -> None:
    with pytest.raises(seen):
        launched._Asking(raising(raised)).join()  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_request_that_ends_in_anything_else_fails_the_case() -> None:
    with pytest.raises(Mismatch, match="nobody expects"):
        launched._Asking(raising(Odd())).join()  # pyright: ignore[reportArgumentType]


def test_a_daemon_killed_under_no_answer_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, system = MagicMock(), MagicMock()
    pair.compare.return_value = 8
    # Neither asks nor fails: there is nothing to compare.
    monkeypatch.setattr(launched, "_Asking", MagicMock())
    monkeypatch.setattr(launched, "wait_for_lease", lambda *_: True)
    monkeypatch.setattr(launched, "moved", lambda *_: 8)
    with pytest.raises(Mismatch, match="has no answer"):
        launched.Launched(system, pair)._restart()


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], Exit.USAGE, "--launch"),
        (["--launch", "--url", "http://127.0.0.1:1"], Exit.USAGE, "--launch"),
        (["--url", "http://127.0.0.1:1"], Exit.USAGE, "twice"),
        (["--launch", "--only", "warm", "--tolerance", "nan"], Exit.USAGE, "--tolerance nan"),
        (["--launch", "--only", "warm", "--tolerance", "inf"], Exit.USAGE, "--tolerance inf"),
        (["--launch", "--only", "warm"], Exit.USAGE, "no case 'warm'"),
        (
            ["--url", "http://127.0.0.1:1"] * 2,
            Exit.AWAY,
            "no replica answers at http://127.0.0.1:1",
        ),
    ],
)
def test_what_cannot_begin_is_named(
    options: list[str], code: Exit, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["gate", "service", *options], dict(os.environ)) == code
    assert words in capsys.readouterr().err
