"""All checks of the gate as one result: what was asked for, what came of it, and one page."""

import enum
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5c6b7a; --paper: #ffffff;
        --line: #d5dde5; --good: #12806a; --bad: #b3261e; --doubt: #8a6100; --right: #dcebe5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa7b4; --paper: #10161d; --line: #2c3845;
          --good: #2fb893; --bad: #ff8a80; --doubt: #e0b040; --right: #1d3a33; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 60rem; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
.passed { color: var(--good); } .failed { color: var(--bad); font-weight: 600; }
.not-checked { color: var(--doubt); } small, dd { color: var(--soft); } dd { margin: 0 0 .4rem; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.k0 { fill: var(--right); } .k1 { fill: #d9534f; } .k2 { fill: #c77dff; } .k3 { fill: #f0a030; }
.k4 { fill: #4f83c4; } .k5 { fill: #7a3b2e; } .k6 { fill: #808890; }
"""


class Result(enum.StrEnum):
    """What a check came to."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Rows:
    """A table of a check's page."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its result in a line, its JSON data, and what its part of the page shows.

    ``pictures`` are inline SVG. ``data`` is None where the check could not begin.
    """

    name: str
    result: Result
    text: str
    data: dict[str, object] | None = None
    tables: Sequence[Rows] = ()
    pictures: Sequence[str] = ()

    def as_json(self) -> dict[str, object]:
        """Return the check as plain values."""
        return {
            "name": self.name,
            "result": self.result.value,
            "summary": self.text,
            "data": self.data,
        }


def overall(checks: Sequence[Check]) -> Result:
    """Return the worst result of all; nothing checked is not a pass."""
    results = {check.result for check in checks}
    if Result.FAILED in results:
        return Result.FAILED
    return Result.PASSED if results == {Result.PASSED} else Result.NOT_CHECKED


def summary_html(checks: Sequence[Check], facts: Sequence[tuple[str, str]]) -> str:
    """Return the page. ``facts`` says what ran where, as pairs of name and value."""
    first = Rows(("check", "result", ""), [(c.name, c.result.value, c.text) for c in checks])
    details = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millpond: is what is moved right?</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Is what is moved right?</h1>
<p>All together: {_result(overall(checks).value)}.</p>
{_table(first)}
{"".join(_section(check) for check in checks if check.tables or check.pictures)}
<h2>What ran where</h2>
<dl>{details}</dl>
</body>
</html>
"""


def _section(check: Check) -> str:
    tables = "".join(_table(table) for table in check.tables)
    return f"<h2>{_text(check.name)}</h2>{tables}{''.join(check.pictures)}"


def _table(table: Rows) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in table.head)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_result(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _result(cell: str) -> str:
    if cell not in set(Result):
        return _text(cell)
    return f'<span class="{cell.replace(" ", "-")}">{_text(cell)}</span>'


def _text(text: str) -> str:
    return html.escape(text)
