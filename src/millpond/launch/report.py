"""The demonstration's report as one HTML file: no script, no font, nothing to fetch."""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from millpond.launch.conversation import Conversation, Turn
from millpond.launch.demo import DemoRow

_BAR_HEIGHT: Final = 46
_GROUP_MARGIN: Final = 52

# Widths are in percent and texts in pixels, so that a phone gets narrow bars, not small letters.
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5c6b7a; --paper: #ffffff;
        --line: #d5dde5; --off: #b9c4cf; --local: #6c9bd2; --on: #12806a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa7b4; --paper: #10161d; --line: #2c3845;
          --off: #4a5866; --local: #4f83c4; --on: #2fb893; --bad: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 46rem; margin: 0 auto; padding: 1.2rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2rem 0 .4rem; }
p.verdict { font-size: 1.1rem; } .bad { color: var(--bad); font-weight: 600; }
svg { width: 100%; display: block; }
svg text { fill: var(--ink); font: 14px system-ui, sans-serif; }
svg text.group { font-weight: 600; font-size: 16px; }
rect.off { fill: var(--off); } rect.local { fill: var(--local); } rect.on { fill: var(--on); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
small, dd { color: var(--soft); } dt { margin-top: .4rem; } dd { margin: 0; }
"""


_Bar = tuple[str, float, str]
"""Label, seconds and class of colour."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All that the demonstration has found."""

    rows: Sequence[DemoRow]
    conversation: Conversation

    def faults(self) -> list[str]:
        """Return what is wrong, for people; empty if nothing is."""
        of_rows = [fault for row in self.rows for fault in row.faults()]
        return of_rows + self.conversation.faults()


def demo_html(result: DemoResult, facts: Sequence[tuple[str, str]]) -> str:
    """Return the page. ``facts`` says what ran where, as pairs of name and value."""
    rows = result.rows
    details = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Millpond: a moved request</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>A request that moves to another replica</h1>
{_verdict(rows, result.faults())}
<p>Time to the first token of the same prompt. Replica A computes it cold, then finds it in its
own cache; replica B has never seen it and gets it with the pool off, then with the pool on.</p>
{_plot([(f"{row.prompt_tokens:,} tokens", _bars(row)) for row in rows])}
<div class="wide">{_table(rows)}</div>
<p><small>Median of {rows[0].num_rounds} round(s) with fresh prompts, after a warm-up. Outputs
are identical when all four answers have the same tokens and log-probabilities within the
tolerances below.</small></p>
{_conversation(result.conversation)}
<dl>{details}</dl>
</body>
</html>
"""


def _verdict(rows: Sequence[DemoRow], faults: Sequence[str]) -> str:
    if faults:
        return "".join(f'<p class="verdict bad">{_text(fault)}</p>' for fault in faults)
    row = max(rows, key=lambda each: each.prompt_tokens)
    return (
        f'<p class="verdict">At {row.prompt_tokens:,} tokens a moved request answers '
        f"<strong>{row.cold_ttft_s / row.moved_on_ttft_s:.0f} times</strong> sooner with the "
        f"pool, in {row.moved_on_ttft_s / row.local_ttft_s:.2f} times the time of a local hit, "
        "with the same output.</p>"
    )


def _bars(row: DemoRow) -> list[_Bar]:
    return [
        ("A cold", row.cold_ttft_s, "off"),
        ("A again (local hit)", row.local_ttft_s, "local"),
        ("B moved, pool off", row.moved_off_ttft_s, "off"),
        ("B moved, pool on", row.moved_on_ttft_s, "on"),
    ]


def _plot(groups: Sequence[tuple[str, Sequence[_Bar]]]) -> str:
    parts: list[str] = []
    top = 0
    for title, bars in groups:
        parts.append(f'<text class="group" x="0" y="{top + 20}">{_text(title)}</text>')
        longest = max(seconds for _, seconds, _ in bars)
        for j, (label, seconds, colour) in enumerate(bars):
            y = top + 32 + j * _BAR_HEIGHT
            width = max(0.4, 100 * seconds / longest)
            parts.append(f'<text x="0" y="{y + 15}">{label}: {_seconds(seconds)}</text>')
            parts.append(
                f'<rect x="0" y="{y + 21}" width="{width:.2f}%" height="14" rx="2" '
                f'class="{colour}"/>'
            )
        top += len(bars) * _BAR_HEIGHT + _GROUP_MARGIN
    return (
        f'<svg height="{top}" role="img" aria-label="Time to first token, as bars">'
        f"{''.join(parts)}</svg>"
    )


def _table(rows: Sequence[DemoRow]) -> str:
    names = ("tokens", "A cold", "A again", "B off", "B on", "cold / on", "on / local", "loaded")
    head = "".join(f"<th>{name}</th>" for name in (*names, "identical"))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td>{cell}</td>"
            for cell in (
                f"{row.prompt_tokens:,}",
                *(_seconds(seconds) for _, seconds, _ in _bars(row)),
                f"{row.cold_ttft_s / row.moved_on_ttft_s:.1f}",
                f"{row.moved_on_ttft_s / row.local_ttft_s:.2f}",
                f"{row.loaded_bytes / 1e6:.1f} MB",
                "yes" if row.identical else '<span class="bad">no</span>',
            )
        )
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _conversation(conversation: Conversation) -> str:
    names = ("pool", "turn", "tokens", "TTFT", "by", "prefix at", "moved", "computed", "local")
    head = "".join(f"<th>{name}</th>" for name in (*names, "from pool"))
    body = "".join(
        _turn_row(pool, turn)
        for pool, turns in (("off", conversation.off), ("on", conversation.on))
        for turn in turns
    )
    sums = [("Pool off", conversation.off_ttft_s, "off"), ("Pool on", conversation.on_ttft_s, "on")]
    return f"""<h2>A conversation through the router</h2>
<p>The router sends each turn to the replica that did not serve the one before. What its client
waits for first tokens, all turns together, and where each prompt's tokens came from: computed,
from the replica's own cache, or from the pool, by who had written them.</p>
{_plot([(f"{len(conversation.on)} turns", sums)])}
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>
<p><small>The same words with the pool off and on. Which replica served, which held the prefix and
where the tokens came from is what the router's access log says; their sums are compared with what
the pool was told and what the engines count themselves, and the answers with each other.</small>
</p>"""


def _turn_row(pool: str, turn: Turn) -> str:
    cells = (
        *(pool, f"{turn.number}", f"{turn.prompt_tokens:,}", _seconds(turn.ttft_s)),
        *(turn.replica, turn.prefix_holder or "–", "yes" if turn.is_moved else "no"),
        *(f"{turn.computed_tokens:,}", f"{turn.local_tokens:,}"),
        ", ".join(f"{name}: {count:,}" for name, count in turn.written_by.items()) or "–",
    )
    return "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in cells) + "</tr>"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _text(text: str) -> str:
    return html.escape(text)
