"""The service regression: two real replicas give the same answers with the pool off and on.

Greedy, token by token, with log-probabilities equal within a tolerance. A model in which wrong
data changes the output is needed for that to say anything: the control is the case
``corruption``, which overwrites one page in the pool and must see another answer.
"""

import enum
import http.client
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

import httpx

from millpond.gate.service_cases import Case
from millpond.gate.service_pair import CannotCheck, Mismatch
from millpond.model.errors import (
    ConfigError,
    ExpectedError,
    InvariantBroken,
    MillpondError,
    SetupError,
)

ANYWHERE: Final = (
    "cold",
    "local-hit",
    "moved-hit",
    "partial-hit",
    "block-multiples",
    "concurrent",
    "cancel-load",
)
"""Cases that need nothing but requests."""
LAUNCHED_ONLY: Final = (
    "preemption",
    "killed-store",
    "killed-load",
    "daemon-restart",
    "corruption",
)
"""Cases that need control over the processes."""
CASES: Final = (*ANYWHERE, *LAUNCHED_ONLY)

FAILURES: Final = (
    Mismatch,
    CannotCheck,
    MillpondError,
    httpx.HTTPError,
    http.client.HTTPException,
    OSError,
    ValueError,
    RuntimeError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    AssertionError,
)
"""What a case may raise: the cases after it are still to be checked."""


class CaseVerdict(enum.StrEnum):
    """What a case came to."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case: ``why`` says what it shows, or what is wrong or missing."""

    name: str
    verdict: CaseVerdict
    why: str
    num_compared: int


@dataclass(slots=True)
class ServiceReport:
    """All cases that were asked for, checked or not."""

    mode: str
    how_off: str
    replicas: list[str]
    block_tokens: int
    tolerance: float
    seed: int
    num_close_calls: int = 0
    cases: list[CaseResult] = field(default_factory=list[CaseResult])
    why_inexact: str = ""
    """Why answers of a CPU's replicas are not compared to the last bit."""

    def as_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return asdict(self)

    def with_verdict(self, verdict: CaseVerdict) -> list[CaseResult]:
        """Return the cases that came to ``verdict``."""
        return [case for case in self.cases if case.verdict is verdict]


def choose_cases(only: Sequence[str], skip: Sequence[str]) -> tuple[str, ...]:
    """Return the names that are asked for, in order; raises ``ConfigError`` for unknown ones."""
    unknown = [name for name in (*only, *skip) if name not in CASES]
    if unknown:
        raise ConfigError(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    chosen = tuple(name for name in CASES if (not only or name in only) and name not in skip)
    if not chosen:
        raise ConfigError("--only and --skip leave no case to check")
    return chosen


def run_cases(
    report: ServiceReport,
    names: Sequence[str],
    cases: Sequence[Case],
    *,
    on_step: Callable[[str], None],
    before_each: Callable[[], None],
) -> None:
    """Check the cases of these names, in that order, and add what came of each to ``report``.

    ``before_each`` mends what the case before has left broken.
    """
    known = {case.name: case for case in cases}
    for name in names:
        if name not in known:
            why = "it needs control over the processes: use --launch"
            report.cases.append(CaseResult(name, CaseVerdict.NOT_CHECKED, why, 0))
            continue
        on_step(name)
        report.cases.append(_result(known[name], before_each))


def _result(case: Case, before: Callable[[], None]) -> CaseResult:
    try:
        before()
        num_compared = case.run()
    except FAILURES as error:
        verdict, why = _failed(error)
        return CaseResult(case.name, verdict, why, 0)
    if not num_compared:
        return CaseResult(case.name, CaseVerdict.NOT_CHECKED, "no token was compared", 0)
    return CaseResult(case.name, CaseVerdict.PASSED, case.what, num_compared)


def _failed(error: Exception) -> tuple[CaseVerdict, str]:
    """Return what comes of a case that raised, and why."""
    match error:
        case Mismatch():
            return CaseVerdict.FAILED, str(error)
        case CannotCheck():
            return CaseVerdict.NOT_CHECKED, str(error)
        case InvariantBroken():
            return CaseVerdict.FAILED, f"the pool is broken: {error}"
        case SetupError() | TimeoutError():
            why = f"a process did not stop or start as it should: {error}"
            return CaseVerdict.NOT_CHECKED, why
        case (
            httpx.HTTPError()
            | http.client.HTTPException()
            | OSError()
            | ExpectedError()
            | ValueError()
        ):
            # A request that ends in an error is what the pool must never cause.
            return CaseVerdict.FAILED, f"a request failed: {type(error).__name__}: {error}"
        case _:
            why = f"the check itself failed: {type(error).__name__}: {error}"
            return CaseVerdict.NOT_CHECKED, why
