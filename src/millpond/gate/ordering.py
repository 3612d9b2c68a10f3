"""Runs the byte tests of one path: every edge with its controls, and a verdict on each."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from millpond.gate import early, portions
from millpond.gate.device import GateDevice, Size
from millpond.gate.errors import CannotTest
from millpond.gate.lifetime import outlive, outlive_own
from millpond.gate.own import OwnPath
from millpond.gate.paths import Path
from millpond.gate.reuse import REUSES, reuse
from millpond.gate.scenarios import SCENARIOS, plain_control
from millpond.gate.subject import Subject, Timing
from millpond.gate.verdicts import Attempt, Control, Edge, Finding, Trial, Verdict, judge
from millpond.model.errors import MillpondError
from millpond.transfer.copies import Direction

Show = Callable[[str], None]

FAILURES = (
    MillpondError,
    CannotTest,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    OSError,
    ImportError,
    AssertionError,
)
"""What somebody's path may raise: no verdict then, and the other paths go on."""


_OF_LANES = {
    early.NAME: early.compute_behind_load,
    portions.NAME: portions.compute_behind_portions,
}
"""What our own lanes do besides, by the name of the scenario."""


@dataclass(frozen=True, slots=True)
class Test:
    """One edge in one direction; ``scenario`` names one of several for the same edge."""

    __test__ = False  # not one of pytest's

    edge: Edge
    direction: Direction
    scenario: str = ""


def plan_tests(path: Path) -> list[Test]:
    """Return the tests that apply to a path, in the order of the edges."""
    tests = [Test(edge, direction) for edge, (direction, _) in SCENARIOS.items()]
    if isinstance(path, OwnPath):
        tests += [Test(Edge.E4, Direction.LOAD, name) for name in _OF_LANES]
        tests += [Test(Edge.E5, way.direction, name) for name, way in REUSES.items()]
    tests += [Test(Edge.E6, direction) for direction in Direction]
    return [test for test in tests if test.direction in path.directions]


def check_path(
    device: GateDevice, path: Path, size: Size, timing: Timing, show: Show
) -> list[Finding]:
    """Test every edge of a path; what it raises becomes a finding."""
    try:
        tests = plan_tests(path)
        subject = Subject(device, path, size, timing)
    except FAILURES as error:
        return [untested(None, path.name, error)]
    with contextlib.suppress(*FAILURES):  # each test says so itself
        subject.warm_up()
    findings = [_checked(subject, test, show) for test in tests]
    try:
        subject.close()
    except FAILURES as error:
        findings.append(untested(None, path.name, error))
    return findings


def check_edge(subject: Subject, test: Test) -> Finding:
    """Run one test with its controls."""
    positive = _attempt(subject, test, Control.SYNCHRONIZED)
    negative = _attempt(subject, test, Control.EDGE_REMOVED)
    plain = None
    if negative.is_right and test.edge in SCENARIOS:
        plain = plain_control(subject, test.edge)
    main = _attempt(subject, test, Control.NONE)
    trial = Trial(main, negative, positive, plain)
    verdict, reason = judge(trial)
    return Finding(
        test.edge,
        subject.path.name,
        test.direction,
        verdict,
        f"{test.scenario}: {reason}" if test.scenario and reason else reason or test.scenario,
        sum(attempt.comparison.num_bytes for attempt in trial.attempts),
        main.wrong if verdict is Verdict.NOT_ORDERED else None,
    )


def untested(test: Test | None, path: str, error: BaseException) -> Finding:
    """Return the finding for a test that could not be made, None: for a path that could not."""
    text = str(error) or type(error).__name__
    if not isinstance(error, CannotTest | MillpondError):
        text = f"it raised {type(error).__name__}: {text}"
    return Finding(
        None if test is None else test.edge,
        path,
        None if test is None else test.direction,
        Verdict.UNTESTED,
        text,
        cause=type(error) if isinstance(error, CannotTest) else CannotTest,
    )


def _checked(subject: Subject, test: Test, show: Show) -> Finding:
    show(f"{subject.path.name}: {test.edge} {test.scenario or test.direction.value}")
    try:
        return check_edge(subject, test)
    except FAILURES as error:
        return untested(test, subject.path.name, error)


def _attempt(subject: Subject, test: Test, control: Control) -> Attempt:
    path = subject.path
    if not isinstance(path, OwnPath):
        if test.edge is Edge.E6:
            return outlive(subject, test.direction, control)
        return SCENARIOS[test.edge][1](subject, control)
    if test.edge is Edge.E6:
        return outlive_own(subject, path, test.direction, control)
    _make_quiet(subject, path)
    # What is given up when "done" is said too early is the matter of E6 alone: elsewhere the
    # copies must find their tables, or a positive control would be wrong, too.
    path.watch.is_kept = True
    try:
        if test.edge is Edge.E5:
            return reuse(subject, path, REUSES[test.scenario], control)
        if test.scenario:
            return _OF_LANES[test.scenario](subject, path, control)
        return SCENARIOS[test.edge][1](subject, control)
    finally:
        _make_quiet(subject, path)
        path.watch.forget()


def _make_quiet(subject: Subject, path: OwnPath) -> None:
    """Let all end: where "done" is said too early, a store may not even be on its stream."""
    path.engine.wait_idle(subject.timing.done_s)
    subject.device.synchronize()
