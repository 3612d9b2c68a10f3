"""What the gate finds out: one finding for each edge of each path, and how controls decide.

A test that cannot fail says nothing. So each comes with a negative control (the same with the
edge removed, which must fail) and a positive one (the same behind a full synchronize, which
must pass); where one of them does not behave, the test could not see, whatever it saw.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from millpond.gate.errors import CannotTest
from millpond.gate.patterns import Comparison
from millpond.transfer.copies import Direction


class Edge(enum.StrEnum):
    """Orders that must be kept, and pieces of geometry; docs/ORDERING.md has each."""

    E1 = "E1"
    E2 = "E2"
    E3 = "E3"
    E4 = "E4"
    E5 = "E5"
    E6 = "E6"
    G1 = "G1"
    G2 = "G2"
    G3 = "G3"


GUARDS = {
    Edge.E1: "a store reads a page only after the kernel that writes it",
    Edge.E2: "a store is done only when its last byte is in host memory",
    Edge.E3: "a load writes a page only after its earlier uses",
    Edge.E4: "a load is done only when its last byte is in the page",
    Edge.E5: "a slot is reused only after the copies from and to it",
    Edge.E6: "memory outlives the copies that use it",
    Edge.G1: "a page is read with its own stride",
    Edge.G2: "a page of several pieces, or with padding, is read as such",
    Edge.G3: "all pages of a block are copied",
}

GEOMETRY = (Edge.G1, Edge.G2, Edge.G3)


class Verdict(enum.StrEnum):
    """What is known of an edge."""

    ORDERED = "ordered"
    HOST_BLOCK = "ordered by a host block"
    NOT_ORDERED = "NOT ordered"
    UNTESTED = "could not test"


class Control(enum.StrEnum):
    """How a scenario is run: as it is, with the edge removed, or behind a full synchronize."""

    NONE = "as it is"
    EDGE_REMOVED = "edge removed"
    SYNCHRONIZED = "synchronized"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a scenario.

    ``num_bytes`` were to be transferred; ``comparison`` has the bytes at the moment that the
    edge is about, ``canaries`` those that nobody may touch. ``blocked``: the call came back
    only after the delay was over. ``late``: the delay was over before the host had come to what
    was to happen during it. ``undelayed``: what was to be delayed was not. ``fault`` is
    what else went wrong, such as a time-out.
    """

    comparison: Comparison
    num_bytes: int
    canaries: Comparison | None = None
    blocked: bool = False
    late: bool = False
    undelayed: bool = False
    fault: str | None = None

    @property
    def is_right(self) -> bool:
        """Whether all bytes are right and nothing else went wrong."""
        return self.fault is None and self.wrong is None

    @property
    def wrong(self) -> Comparison | None:
        """The bytes that are not right, or None."""
        if not self.comparison.is_right:
            return self.comparison
        canaries = self.canaries
        return None if canaries is None or canaries.is_right else canaries

    def describe(self) -> str:
        """Say in a few words what is wrong."""
        wrong = self.wrong
        return self.fault or ("" if wrong is None else wrong.describe())


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on one edge of one path, and what it rests on.

    ``edge`` is None where the whole path could not be tested, ``cause`` the kind of reason.
    """

    edge: Edge | None
    path: str
    direction: Direction | None
    verdict: Verdict
    reason: str = ""
    num_bytes: int = 0
    """Bytes that were compared, those of the controls included."""
    wrong: Comparison | None = field(default=None, repr=False)
    cause: type[CannotTest] = CannotTest

    @property
    def is_good(self) -> bool:
        """Whether the edge was tested and holds."""
        return self.verdict in (Verdict.ORDERED, Verdict.HOST_BLOCK)

    def words(self) -> str:
        """Return the verdict in words; geometry is not ordered, but right or wrong."""
        if self.edge in GEOMETRY and self.verdict is not Verdict.UNTESTED:
            return "right" if self.is_good else "WRONG"
        return self.verdict.value

    def as_json(self) -> dict[str, object]:
        """Return the finding as plain values."""
        counts = {} if self.wrong is None else self.wrong.counts()
        return {
            "edge": None if self.edge is None else self.edge.value,
            "path": self.path,
            "direction": None if self.direction is None else self.direction.value,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "bytes_compared": self.num_bytes,
            "wrong_words": {kind.name.lower(): count for kind, count in counts.items()},
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """A scenario with its controls.

    ``plain`` is a control that the gate makes by itself, a copy without the edge, for paths
    that block the host even where the edge was removed.
    """

    main: Attempt
    negative: Attempt
    positive: Attempt
    plain: Attempt | None = None

    @property
    def attempts(self) -> Sequence[Attempt]:
        """All attempts that were made."""
        made = (self.main, self.negative, self.positive, self.plain)
        return [attempt for attempt in made if attempt is not None]


def judge(trial: Trial) -> tuple[Verdict, str]:
    """Return the verdict on a trial, and why."""
    doubt = _doubt(trial)
    if doubt is not None:
        return Verdict.UNTESTED, doubt
    main = trial.main
    if not main.is_right:
        return Verdict.NOT_ORDERED, main.describe()
    if main.late:
        return Verdict.UNTESTED, "the host was held up until the delay was over: raise --delay"
    if main.undelayed:
        return Verdict.UNTESTED, "the delay does not reach its copies: they do not wait for it"
    if main.blocked:
        return Verdict.HOST_BLOCK, "the call came back when the delay was over"
    return Verdict.ORDERED, ""


def _doubt(trial: Trial) -> str | None:
    """Return why this trial proves nothing, or None."""
    for attempt in trial.attempts:
        num_bytes = attempt.comparison.num_bytes
        if num_bytes == 0 or num_bytes != attempt.num_bytes:
            return f"{num_bytes} bytes compared of {attempt.num_bytes} transferred"
    if not trial.positive.is_right:
        return f"wrong behind a full synchronize, too: {trial.positive.describe()}"
    negative = trial.negative
    if negative.is_right and trial.plain is not None:
        negative = trial.plain
    if negative.is_right:
        return "right with the edge removed, too: the test cannot see here"
    return None
