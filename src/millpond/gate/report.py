"""The gate's report as one HTML file: verdicts, and a picture of the bytes that were wrong."""

import html
from collections.abc import Sequence
from typing import Final

import numpy as np

from millpond.gate.order import OrderReport
from millpond.gate.patterns import WORD_BYTES, Comparison, Wrong
from millpond.gate.verdicts import GUARDS, Finding, Verdict

_COLUMNS_MAX: Final = 64
_ROWS_MAX: Final = 96
_CELL: Final = 9

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
td.number { text-align: right; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.doubt { color: var(--doubt); } small, dd { color: var(--soft); } dd { margin: 0 0 .4rem; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.k0 { fill: var(--right); } .k1 { fill: #d9534f; } .k2 { fill: #c77dff; } .k3 { fill: #f0a030; }
.k4 { fill: #4f83c4; } .k5 { fill: #7a3b2e; } .k6 { fill: #808890; }
"""


def order_html(report: OrderReport, facts: Sequence[tuple[str, str]]) -> str:
    """Return the page. ``facts`` says what ran where, as pairs of name and value."""
    details = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    pictures = "".join(_section(finding) for finding in report.findings if finding.wrong)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millpond: are copies ordered?</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Are copies ordered?</h1>
<p>On <strong>{_text(report.device)}</strong>. {_summary(report)}</p>
{_findings(report.findings)}
{_mutants(report)}
{pictures}
<p><small>Each verdict comes with a run in which the order was removed, which had to fail, and
one behind a full synchronize, which had to pass. Every byte was compared.</small></p>
<dl>{details}</dl>
</body>
</html>
"""


def _summary(report: OrderReport) -> str:
    faults, untested = report.faults(), report.untested()
    text = f"{report.num_bytes:,} bytes compared in {report.seconds:.1f} s."
    if faults:
        return f'<span class="bad">{len(faults)} found wrong.</span> {text}'
    if untested:
        return f'<span class="doubt">{len(untested)} could not be tested.</span> {text}'
    return f'<span class="good">All that was asked for was checked, and is right.</span> {text}'


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return ""
    rows = "".join(
        f"<tr><td>{_text(each.path)}</td><td>{_edge(each)}</td>"
        f"<td>{_text(each.direction.value if each.direction else '')}</td>"
        f'<td class="{_class(each)}">{_text(each.words())}</td>'
        f'<td class="number">{each.num_bytes:,}</td><td>{_text(each.reason)}</td></tr>'
        for each in findings
    )
    names = ("path", "edge", "direction", "verdict", "bytes compared", "")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _edge(finding: Finding) -> str:
    if finding.edge is None:
        return "all"
    return f'<span title="{_text(GUARDS[finding.edge])}">{finding.edge.value}</span>'


def _class(finding: Finding) -> str:
    if finding.is_good:
        return "good"
    return "bad" if finding.verdict is Verdict.NOT_ORDERED else "doubt"


def _mutants(report: OrderReport) -> str:
    if not report.mutants:
        return ""
    rows = "".join(
        f"<tr><td>{each.mutant.edge.value}</td><td>{_text(each.mutant.name)}</td>"
        f'<td class="{"good" if each.is_caught else "bad"}">'
        f"{'caught' if each.is_caught else 'NOT caught'}</td><td>{_text(each.reason)}</td></tr>"
        for each in report.mutants
    )
    return (
        "<h2>Our own code, broken on purpose</h2>"
        f'<div class="wide"><table><tbody>{rows}</tbody></table></div>'
    )


def _section(finding: Finding) -> str:
    wrong = finding.wrong
    if wrong is None:
        return ""
    title = f"{finding.path}: {finding.edge.value if finding.edge else ''}"
    return f"<h2>{_text(title)}</h2><p>{_text(finding.reason)}</p>{picture(wrong)}{_legend(wrong)}"


def picture(comparison: Comparison) -> str:
    """Draw which bytes were wrong as inline SVG: a row a block, offsets from left to right."""
    cells = _condensed(comparison.kinds)
    shown = cells[:_ROWS_MAX]
    left, top = 64, 22
    width, height = left + cells.shape[1] * _CELL + 8, top + len(shown) * _CELL + 22
    page_bytes = comparison.kinds.shape[1] * WORD_BYTES
    parts = [
        f'<text x="0" y="14">block</text><text x="{left}" y="14">offset 0</text>',
        f'<text x="{width - 8}" y="14" text-anchor="end">{page_bytes:,} bytes</text>',
    ]
    for row, kinds in enumerate(shown):
        y = top + row * _CELL
        if row % 8 == 0:
            parts.append(f'<text x="0" y="{y + 9}">{comparison.blocks[row]}</text>')
        for column, kind in enumerate(kinds.tolist()):
            x = left + column * _CELL
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_CELL - 1}" height="{_CELL - 1}" class="k{kind}"/>'
            )
    if len(cells) > len(shown):
        parts.append(
            f'<text x="{left}" y="{height - 6}">and {len(cells) - len(shown)} more blocks</text>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" '
        f'aria-label="Wrong bytes by block and offset">{"".join(parts)}</svg>'
    )


def _condensed(
    kinds: "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]",
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return at most ``_COLUMNS_MAX`` cells a row: a wrong word in a cell makes it wrong."""
    step = -(-kinds.shape[1] // _COLUMNS_MAX)
    starts = np.arange(0, kinds.shape[1], step)
    return np.maximum.reduceat(kinds, starts, axis=1)


def _legend(comparison: Comparison) -> str:
    names = {
        Wrong.STALE: "stale: the right place, bytes of another time",
        Wrong.SHIFTED: "shifted: another offset of the same block",
        Wrong.SWAPPED: "swapped: bytes of another block",
        Wrong.TORN: "torn: a word half of one time and half of another",
        Wrong.OVERWRITTEN: "overwritten: nobody may write there",
        Wrong.UNKNOWN: "unknown: nothing that was written",
    }
    items = "".join(
        f'<dt><svg width="12" height="12" style="display:inline"><rect width="12" height="12" '
        f'class="k{kind.value}"/></svg> {_text(names[kind])}</dt><dd>{count:,} words</dd>'
        for kind, count in comparison.counts().items()
    )
    return f"<dl>{items}</dl>"


def _text(text: str) -> str:
    return html.escape(text)
