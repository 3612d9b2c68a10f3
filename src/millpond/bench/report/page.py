"""The page: what a reader wants first, then plots, tables, and all that the figures depend on."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
from rich.table import Table

from millpond.bench.analysis import Analysis
from millpond.bench.headlines import headlines
from millpond.bench.records import Period, Record
from millpond.bench.report.plots import (
    Figure,
    distributions,
    over_time,
    payoffs,
    turn_by_turn,
)
from millpond.bench.report.run import Run
from millpond.bench.report.style import STYLE
from millpond.bench.tables import run_tables


def report_html(record: Record, analysis: Analysis) -> str:
    """Return the page: no script, nothing to fetch, and well-formed XML as well."""
    run = Run(record, analysis)
    scenario = record.scenario
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>Millpond benchmark: {_text(scenario.name)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>Benchmark {_text(scenario.name)}</h1>
<p class="soft">{_text(scenario.description)}</p>
</header>
<ul class="first">{"".join(map(_sentence, headlines(scenario, analysis)))}</ul>
{"".join(_sections(run))}
<h2>Tables</h2>
{"".join(map(_table, [*run_tables(analysis), _period_table(record.periods)]))}
{_conditions(record)}
</body>
</html>
"""


def _sentence(line: str) -> str:
    css = ' class="bad"' if "FAILED" in line else ""
    return f"<li{css}>{_text(line)}</li>"


def _sections(run: Run) -> Iterator[str]:
    if not run.record.periods:
        return
    yield _section(
        "Does sharing pay?",
        payoffs(run),
        "How much of the time to first token of both requests of a prompt the cache takes off, by "
        "the share of second requests that move to another replica. Bars are intervals of 95 %; "
        "a point is beyond noise when its bar is outside of the grey.",
    )
    yield _section(
        "Sessions, turn by turn",
        turn_by_turn(run),
        "Median time to first token of each turn, with intervals of 95 % over requests and "
        "periods.",
    )
    yield _section(
        "Time to first token, by period",
        over_time(run),
        "Every request is a dot where it was sent, every line the median of its period. Nothing "
        "is left out. Periods are in the order in which they ran; those of one cache have one "
        f"scale of time{_interrupted(run.record.periods)}.",
    )
    yield _section(
        "Time to first token, distribution",
        distributions(run),
        "The share of requests that had their first token by then: the further left, the faster.",
    )


def _interrupted(periods: Sequence[Period]) -> str:
    return "" if all(period.is_complete for period in periods) else "; * was interrupted"


def _section(title: str, figures: Sequence[Figure], what: str) -> str:
    if not figures:
        return ""
    shown = "".join(map(_figure, figures))
    return (
        f'<section><h2>{_text(title)}</h2><p class="soft">{_text(what)}</p>'
        f'<div class="charts">{shown}</div></section>\n'
    )


def _figure(figure: Figure) -> str:
    figures = "; ".join(f"{name} {value}" for _, name, value in figure.legend)
    legend = "".join(
        f'<span class="key"><svg width="14" height="10" aria-hidden="true">'
        f'<circle cx="6" cy="5" r="5" class="{colour}"/></svg>'
        f"{_text(name)} <b>{_text(value)}</b></span>"
        for colour, name, value in figure.legend
    )
    notes = "".join(f'<span class="soft">{_text(note)}</span>' for note in figure.notes)
    return (
        f"<figure><figcaption><h3>{_text(figure.title)}</h3>{legend}{notes}</figcaption>"
        f"{figure.chart.svg(f'{figure.chart.label}. {figures}')}</figure>"
    )


# ---------------------------------------------------------------- tables


def _table(table: Table) -> str:
    """Return a table of the terminal's report as HTML."""
    columns = [map(str, column.cells) for column in table.columns]
    classes = ["number" if column.justify == "right" else "" for column in table.columns]
    head = "".join(
        f'<th class="{css}">{_text(str(column.header))}</th>'
        for css, column in zip(classes, table.columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="{css}">{_text(cell)}</td>' for css, cell in zip(classes, row, strict=True)
        )
        + "</tr>"
        for row in zip(*columns, strict=True)
    )
    caption = f'<p class="soft">{_text(str(table.caption))}</p>' if table.caption else ""
    return (
        f'<h3>{_text(str(table.title))}</h3><div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{caption}\n"
    )


def _period_table(periods: Sequence[Period]) -> Table:
    table = Table("period", "cache", "compared", "began", title="Periods")
    for name in ("took", "requests", "failed", ""):
        table.add_column(name, justify="right")
    for period in periods:
        plan = period.plan
        num_failed = sum(sample.error is not None for sample in period.samples)
        table.add_row(
            str(plan.number),
            plan.cache,
            f"A/A {plan.base}" if plan.is_aa else ", ".join((plan.base, *plan.others)),
            period.started_at,
            f"{period.duration_s:.0f} s",
            f"{len(period.samples):,}",
            f"{num_failed:,}" if num_failed else "",
            "" if period.is_complete else "interrupted",
        )
    return table


# ---------------------------------------------------------------- conditions


def _conditions(record: Record) -> str:
    facts = record.facts
    machine = _mapping(facts.get("machine"))
    rows = [
        ("version", facts.get("version")),
        ("commit", facts.get("commit")),
        *((name, value) for name, value in machine.items()),
        *((name, value) for name, value in _mapping(facts.get("packages")).items()),
    ]
    scenario = record.scenario
    asked = [
        ("seed", scenario.seed),
        ("design", _inline(scenario.design)),
        *((workload.name, _inline(workload)) for workload in scenario.workload),
    ]
    return f"""<h2>How to run it again</h2>
<pre>{_text(str(facts.get("command", "the record does not say")))}</pre>
<p class="soft">at commit {_text(_value("commit", facts.get("commit")))}; a plus says that files
were changed. Every sample is in the record, from which <code>millpond bench report</code> makes
this page.</p>
<h2>Where it ran</h2>
{_facts(rows)}
<h2>Options</h2>
{_facts(record.options.items())}
<h2>Scenario</h2>
{_facts(asked)}
"""


def _inline(table: msgspec.Struct) -> str:
    """Return a table of a scenario on one line."""
    values = cast("dict[str, object]", msgspec.to_builtins(table))
    return ", ".join(f"{_name(key)} {_value(key, value)}" for key, value in values.items())


def _facts(rows: Iterable[tuple[str, object]]) -> str:
    shown = "".join(
        f"<dt>{_text(_name(name))}</dt><dd>{_text(_value(name, value))}</dd>"
        for name, value in rows
    )
    return f"<dl>{shown}</dl>"


def _name(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _value(name: str, value: object) -> str:
    if value is None or value == []:
        return "–"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**30:,.1f} GiB"
    if isinstance(value, list):
        return " ".join(map(str, cast("list[object]", value)))
    return str(value)


def _mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}


def _text(text: str) -> str:
    return html.escape(text)
