"""What engines report of finished requests: the latest of them, and totals by replica."""

from collections import Counter, OrderedDict, deque
from typing import Final

from millpond.model.limits import NAME_LENGTH_MAX, REPLICAS_SHOWN_MAX, REPORTS_KEPT_MAX
from millpond.model.requests import client_request_ids
from millpond.service.protocol import Report

_NAMES_MAX: Final = REPLICAS_SHOWN_MAX
"""Replica names that totals are kept for, and writers for each; the least recent goes first."""
_TOKENS_MAX: Final = 2**40
"""Of one request; sums of them stay numbers that a frame can carry."""
REPORTS_REPLIED_MAX: Final = 1000


class Reports:
    """Bounded memory of reports: the last REPORTS_KEPT_MAX, found by what a client said."""

    def __init__(self) -> None:
        self._kept: deque[tuple[str, Report, frozenset[str]]] = deque()
        self._by_name: dict[str, deque[tuple[str, Report]]] = {}
        self._totals: OrderedDict[str, Counter[str]] = OrderedDict()
        self._written: dict[str, OrderedDict[str, int]] = {}

    def add(self, replica: str, report: Report) -> None:
        """Keep a report; ``ValueError`` for one that does not add up."""
        _check(report)
        names = client_request_ids(report.request_id)
        if len(self._kept) == REPORTS_KEPT_MAX:
            self._forget_oldest()
        self._kept.append((replica, report, names))
        for name in names:
            self._by_name.setdefault(name, deque()).append((replica, report))
        self._count(replica, report)

    def named(self, request_id: str) -> tuple[tuple[str, Report], ...]:
        """Return (replica, report) of what a client named so, oldest first."""
        return tuple(self._by_name.get(request_id, ()))[-REPORTS_REPLIED_MAX:]

    def latest(self, num_reports: int) -> tuple[tuple[str, Report], ...]:
        """Return (replica, report) of the latest reports, oldest first."""
        num_reports = max(0, min(num_reports, REPORTS_REPLIED_MAX, len(self._kept)))
        start = len(self._kept) - num_reports
        return tuple((self._kept[i][0], self._kept[i][1]) for i in range(start, len(self._kept)))

    def statistics(self) -> dict[str, object]:
        """Return the totals of each replica since the daemon started, by its name."""
        return {
            replica: {**totals, "loaded_tokens_by_writer": dict(self._written[replica])}
            for replica, totals in self._totals.items()
        }

    def _forget_oldest(self) -> None:
        _, _, names = self._kept.popleft()
        for name in names:
            reports = self._by_name[name]
            reports.popleft()
            if not reports:
                del self._by_name[name]

    def _count(self, replica: str, report: Report) -> None:
        totals = self._totals.setdefault(replica, Counter())
        self._totals.move_to_end(replica)
        totals["num_requests"] += 1
        for field in ("prompt_tokens", "computed_tokens", "local_tokens", "loaded_tokens"):
            totals[field] += getattr(report, field)
        written = self._written.setdefault(replica, OrderedDict())
        for writer, tokens in report.writers.items():
            written[writer] = written.get(writer, 0) + tokens
            written.move_to_end(writer)
        while len(written) > _NAMES_MAX:
            written.popitem(last=False)
        if len(self._totals) > _NAMES_MAX:
            forgotten, _ = self._totals.popitem(last=False)
            del self._written[forgotten]


def _check(report: Report) -> None:
    if not 1 <= len(report.request_id) <= NAME_LENGTH_MAX:
        raise ValueError(f"request id of {len(report.request_id)} characters")
    sources = (report.computed_tokens, report.local_tokens, report.loaded_tokens)
    if min(sources) < 0 or sum(sources) != report.prompt_tokens:
        raise ValueError(f"{sources} do not sum to {report.prompt_tokens} prompt tokens")
    if report.prompt_tokens > _TOKENS_MAX:
        raise ValueError(f"{report.prompt_tokens} prompt tokens, at most {_TOKENS_MAX}")
    written = report.writers.values()
    if any(tokens < 0 for tokens in written) or sum(written) != report.loaded_tokens:
        raise ValueError(f"writers do not sum to {report.loaded_tokens} loaded tokens")
    if any(not 1 <= len(name) <= NAME_LENGTH_MAX for name in report.writers):
        raise ValueError("a writer's name is too long")
