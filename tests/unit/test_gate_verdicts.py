"""Each way to lose an order gets its verdict, on the emulated device; controls that fail, too."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from millpond.gate import reuse as module
from millpond.gate.device import Hold, Size
from millpond.gate.emulated import EmulatedDevice
from millpond.gate.ordering import check_edge, check_path, plan_tests
from millpond.gate.own import OwnPath
from millpond.gate.paths import Promise
from millpond.gate.patterns import Comparison, Epoch, Rows, compare, pattern
from millpond.gate.reuse import REUSES, reuse
from millpond.gate.subject import Subject, Timing, poll
from millpond.gate.verdicts import Attempt, Control, Edge, Finding, Trial, Verdict, judge
from millpond.transfer.copies import Direction
from tests.gate_paths import Habits, ToyPath

SIZE = Size(num_pages=12, page_bytes=8192)
TIMING = Timing(delay_s=0.3, control_s=2.0)

ORDERED, BLOCKED = Verdict.ORDERED, Verdict.HOST_BLOCK
LOST, UNTESTED = Verdict.NOT_ORDERED, Verdict.UNTESTED


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.close()


def found(
    device: EmulatedDevice, habits: Habits, timing: Timing = TIMING, edges: str = "E1 E2 E3 E4 E6"
) -> dict[tuple[Edge, str], Finding]:
    path = ToyPath(device, habits)
    subject = Subject(device, path, SIZE, timing)
    try:
        tests = [test for test in plan_tests(path) if test.edge in edges.split()]
        return {(test.edge, test.direction.value): check_edge(subject, test) for test in tests}
    finally:
        subject.close()


SIDE = Habits(on_side_stream=True)
HOST = replace(SIDE, promise=Promise.HOST, current_waits_for_it=False)


@pytest.mark.parametrize(
    ("habits", "expected"),
    [
        (Habits(), "ordered ordered ordered ordered"),
        (SIDE, "ordered ordered ordered ordered"),
        (HOST, "ordered ordered ordered ordered"),
        # A side stream that does not wait: too early both ways, and never to be delayed.
        (replace(SIDE, waits_for_current=False), "NOT untested NOT untested"),
        (replace(HOST, waits_for_current=False), "NOT untested NOT untested"),
        # Waits, and lets nobody wait for it.
        (replace(SIDE, current_waits_for_it=False, takes_s=0.1), "ordered NOT ordered NOT"),
        (replace(HOST, done_at_once=True), "ordered NOT ordered NOT"),
        (Habits(blocks_host=True), "blocked blocked blocked blocked"),
        (replace(HOST, blocks_host=True), "blocked blocked blocked blocked"),
        (Habits(moves=lambda pairs: pairs[:-1]), "untested untested untested untested"),
    ],
    ids=[
        "on the current stream",
        "side stream, both wait",
        "side stream and a completion",
        "does not wait",
        "does not wait, a completion",
        "nobody waits for it",
        "done when enqueued",
        "blocks the host",
        "blocks the host, a completion",
        "forgets a page",
    ],
)
def test_each_habit_gets_its_verdicts(
    device: EmulatedDevice, habits: Habits, expected: str
) -> None:
    words = {"ordered": ORDERED, "NOT": LOST, "blocked": BLOCKED, "untested": UNTESTED}
    findings = found(device, habits, edges="E1 E2 E3 E4").values()
    assert [each.verdict for each in findings] == [words[word] for word in expected.split()]


def test_a_path_that_waits_for_the_whole_device_is_ordered_by_a_host_block(
    device: EmulatedDevice,
) -> None:
    # With the edge removed it is right as well; the gate's own control shows that it can see.
    habits = replace(SIDE, directions=[Direction.STORE], blocks_for_device=True)
    seen = found(device, habits, replace(TIMING, control_s=1.0), edges="E1")
    assert seen[Edge.E1, "store"].verdict is BLOCKED


@pytest.mark.parametrize("edge", ["E1", "E2", "E3", "E4", "E6"])
def test_a_host_that_comes_after_the_delay_proves_nothing(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, edge: str
) -> None:
    def stalls(limit_s: float) -> Hold:
        hold = type(device).hold(device, limit_s)
        if limit_s < TIMING.control_s:  # the host goes on only when the delay is over
            hold.release()
            assert poll(hold.is_open, 10.0)
        return hold

    monkeypatch.setattr(device, "hold", stalls)
    for finding in found(device, Habits(), edges=edge).values():
        assert finding.verdict is UNTESTED
        assert "held up until the delay was over" in finding.reason


@pytest.mark.parametrize("scenario", REUSES)
def test_a_slot_that_changes_hands_after_the_delay_proves_nothing(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, scenario: str
) -> None:
    route, size = device.routes[0]
    path = OwnPath("own", lambda: device.copier(route))
    subject = Subject(device, path, size, TIMING)
    path.watch.is_kept = True
    try:
        in_time = reuse(subject, path, REUSES[scenario], Control.NONE)
        write = module._write_second

        def write_late(subject: Subject, scene: object) -> list[int]:
            (hold,) = holds
            hold.release()
            assert poll(hold.is_open, 10.0)
            return write(subject, scene)  # pyright: ignore[reportArgumentType]

        holds: list[Hold] = []

        def keep(limit_s: float) -> Hold:
            holds.append(type(device).hold(device, limit_s))
            return holds[-1]

        monkeypatch.setattr(device, "hold", keep)
        monkeypatch.setattr(module, "_write_second", write_late)
        late = reuse(subject, path, REUSES[scenario], Control.NONE)
    finally:
        path.watch.forget()
        subject.close()
    assert (in_time.late, late.late) == (False, True)


def test_a_path_that_never_says_done_is_not_ordered_and_does_not_hang(
    device: EmulatedDevice,
) -> None:
    habits = replace(HOST, directions=[Direction.STORE], done_never=True)
    timing = Timing(delay_s=0.1, control_s=0.2, done_s=0.2)
    finding = found(device, habits, timing, edges="E1")[Edge.E1, "store"]
    assert not finding.is_good
    assert "not done within" in finding.reason


def test_what_a_path_writes_elsewhere_is_seen(device: EmulatedDevice) -> None:
    habits = Habits(directions=[Direction.STORE], spoils=lambda _, host: host[0].fill_(9))
    finding = found(device, habits, edges="E1")[Edge.E1, "store"]
    assert not finding.is_good
    assert "overwritten" in finding.reason


def test_a_path_that_takes_two_pages_for_each_other_cannot_be_tested(
    device: EmulatedDevice,
) -> None:
    def swap(pairs: "list[tuple[int, int]]") -> "list[tuple[int, int]]":
        (a, row_a), (b, row_b), *rest = pairs
        return [(a, row_b), (b, row_a), *rest]

    habits = Habits(directions=[Direction.STORE], moves=swap)  # pyright: ignore[reportArgumentType]
    finding = found(device, habits, edges="E1")[Edge.E1, "store"]
    assert finding.verdict is UNTESTED
    assert "swapped" in finding.reason


def test_what_a_path_raises_is_a_reason_and_the_next_test_goes_on(device: EmulatedDevice) -> None:
    class Raises(ToyPath):
        def copy(self, direction: Direction, pairs: object) -> object:
            if direction is Direction.STORE:
                raise RuntimeError("no such luck")
            return super().copy(direction, pairs)  # pyright: ignore[reportArgumentType]

        def close(self) -> None:
            super().close()
            raise RuntimeError("cannot close")

    path = Raises(device, Habits())
    findings = check_path(device, path, SIZE, TIMING, lambda _: None)  # pyright: ignore[reportArgumentType]
    assert "cannot close" in findings[-1].reason
    by_direction = {each.direction: each for each in findings}
    assert by_direction[Direction.STORE].verdict is UNTESTED
    assert "RuntimeError: no such luck" in by_direction[Direction.STORE].reason
    assert by_direction[Direction.LOAD].verdict is ORDERED


def test_what_a_path_still_reads_after_its_call_is_taken_away(device: EmulatedDevice) -> None:
    # The list of pairs is the caller's, who clears it; this path looks at it later.
    late = found(device, Habits(moves=lambda pairs: pairs), edges="E1 E6")
    at_once = found(device, Habits(), edges="E6")
    for direction in Direction:
        assert late[Edge.E6, direction.value].verdict is LOST
        assert at_once[Edge.E6, direction.value].verdict is ORDERED
    assert late[Edge.E1, "store"].verdict is ORDERED


# ---------------------------------------------------------------- the judge alone


def attempt(*, right: bool, num_bytes: int | None = None, **changes: object) -> Attempt:
    page = pattern([1], 64, Epoch.NEW if right else Epoch.OLD)
    comparison = compare(page, Rows((1,), Epoch.NEW))
    made = Attempt(comparison, comparison.num_bytes if num_bytes is None else num_bytes)
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


RIGHT, WRONG = attempt(right=True), attempt(right=False)


@pytest.mark.parametrize(
    ("trial", "verdict", "word"),
    [
        (Trial(RIGHT, WRONG, RIGHT), ORDERED, ""),
        (Trial(replace(RIGHT, blocked=True), WRONG, RIGHT), BLOCKED, "delay"),
        (Trial(WRONG, WRONG, RIGHT), LOST, "stale"),
        (Trial(replace(WRONG, blocked=True), WRONG, RIGHT), LOST, "stale"),
        (Trial(replace(RIGHT, fault="late"), WRONG, RIGHT), LOST, "late"),
        (Trial(replace(RIGHT, undelayed=True), WRONG, RIGHT), UNTESTED, "delay does not reach"),
        (Trial(replace(RIGHT, late=True, blocked=True), WRONG, RIGHT), UNTESTED, "held up"),
        (Trial(replace(WRONG, late=True), WRONG, RIGHT), LOST, "stale"),
        (Trial(RIGHT, RIGHT, RIGHT), UNTESTED, "cannot see"),
        (Trial(WRONG, RIGHT, RIGHT), UNTESTED, "cannot see"),
        (Trial(RIGHT, WRONG, WRONG), UNTESTED, "full synchronize"),
        (Trial(RIGHT, RIGHT, RIGHT, plain=WRONG), ORDERED, ""),
        (Trial(RIGHT, RIGHT, RIGHT, plain=RIGHT), UNTESTED, "cannot see"),
        (Trial(attempt(right=True, num_bytes=128), WRONG, RIGHT), UNTESTED, "64 bytes compared"),
        (Trial(RIGHT, WRONG, attempt(right=True, num_bytes=8)), UNTESTED, "of 8 transferred"),
    ],
)
def test_controls_decide_what_a_trial_proves(trial: Trial, verdict: Verdict, word: str) -> None:
    seen, reason = judge(trial)
    assert seen is verdict
    assert word in reason


def test_nothing_compared_proves_nothing() -> None:
    nothing = Attempt(Comparison((), np.zeros((0, 8), np.uint8)), 0)
    assert not nothing.is_right
    assert judge(Trial(nothing, WRONG, RIGHT))[0] is UNTESTED
