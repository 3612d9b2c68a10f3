"""A run's figures as tables for a terminal of about 120 columns."""

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar, cast

from rich.box import SIMPLE_HEAD
from rich.table import Table

from millpond.bench.analysis import Analysis, Summary
from millpond.bench.comparing import Difference
from millpond.bench.effects import Effect
from millpond.bench.headlines import format_ms
from millpond.bench.observations import WHOLE
from millpond.bench.statistics import Interval
from millpond.bench.tokens import TELLERS, Told

_OUTLIERS_SHOWN_MAX: Final = 8
_PERCENT: Final = 100
_FIRST: Final = ("ttft_ms", "total_ttft_ms", "span_ms")
_LATER: Final = ("tpot_ms", "itl_ms", "e2el_ms")
_CHANGED: Final = "What the cache changed: time without / time with"
_TIMES: Final = "Times, intervals over requests and periods"
_AFTER: Final = "After the first token"
_METRIC_NAMES: Final = {"total_ttft_ms": "sum of TTFT", "span_ms": "begin to end"}


def run_tables(analysis: Analysis) -> list[Table]:
    """Return the tables of one run, those without a row left out; the rest is in the record."""
    tables = [
        effect_table(_of(analysis.effects, _FIRST), title=_CHANGED),
        _noise_table(_of(analysis.noise_floor, _FIRST)),
        _quantile_table(_of(analysis.summaries, _FIRST), title=_TIMES),
        _token_table(analysis),
        effect_table(_of(analysis.effects, _LATER), title=f"{_AFTER}: time without / time with"),
        _quantile_table(_of(analysis.summaries, _LATER), title=f"{_AFTER}: times"),
        _cache_table(analysis),
        _drift_table(analysis),
        _outlier_table(analysis),
    ]
    return [table for table in tables if table.row_count]


_Row = TypeVar("_Row", Effect, Summary)


def _of(rows: Sequence[_Row], metrics: Sequence[str]) -> list[_Row]:
    return [each for each in rows if each.metric in metrics]


def effect_table(effects: Sequence[Effect], *, title: str) -> Table:
    """Return what each cache changed; every prompt is compared with itself."""
    table = _table(title, "what", "cache")
    for name in ("without", "with", "ratio", "95 %", "pairs", "noise", "verdict"):
        table.add_column(name, justify="right", no_wrap=True)
    for effect in effects:
        table.add_row(
            _row_name(effect.group, effect.part, effect.metric),
            effect.other,
            format_ms(effect.base_median_ms),
            format_ms(effect.other_median_ms),
            f"{effect.ratio.value:.2f}",
            _interval(effect.ratio.interval),
            " ".join(f"{pair.ratio.value:.2f}" for pair in effect.pairs),
            _interval(effect.noise),
            effect.verdict,
        )
    return table


def _noise_table(effects: Sequence[Effect]) -> Table:
    table = _table("A/A rounds: the same ratio where nothing was changed", "what")
    for name in ("outer", "inner", "ratio", "95 %", "pairs"):
        table.add_column(name, justify="right", no_wrap=True)
    for effect in effects:
        table.add_row(
            _row_name(effect.group, effect.part, effect.metric),
            format_ms(effect.base_median_ms),
            format_ms(effect.other_median_ms),
            f"{effect.ratio.value:.2f}",
            _interval(effect.ratio.interval),
            " ".join(f"{pair.ratio.value:.2f}" for pair in effect.pairs),
        )
    return table


def difference_table(differences: Sequence[Difference]) -> Table:
    """Return how two runs differ."""
    table = _table("Time of A / time of B, by prompt", "what", "cache")
    for name in ("A", "B", "ratio", "95 %", "noise", "B is"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in differences:
        table.add_row(
            _row_name(each.group, each.part, each.metric),
            each.cache,
            format_ms(each.a_median_ms),
            format_ms(each.b_median_ms),
            f"{each.ratio.value:.2f}",
            _interval(each.ratio.interval),
            _interval(each.noise),
            each.verdict,
        )
    return table


def _quantile_table(summaries: Sequence[Summary], *, title: str) -> Table:
    table = _table(title, "what", "cache")
    for name in ("requests", "median", "95 %", "p90", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        quantiles = summary.quantiles
        interval = quantiles["median"].interval
        table.add_row(
            _row_name(summary.group, summary.part, summary.metric),
            summary.cache,
            f"{summary.num_requests:,}",
            format_ms(quantiles["median"].value),
            "" if interval is None else f"{format_ms(interval.low)} to {format_ms(interval.high)}",
            format_ms(quantiles["p90"].value),
            format_ms(quantiles["p99"].value),
        )
    return table


def _cache_table(analysis: Analysis) -> Table:
    table = _table("All requests, by cache: median / p99", "cache")
    for name in ("requests", "failed", "TTFT", "TPOT", "ITL", "E2EL", "tokens/s out"):
        table.add_column(name, justify="right", no_wrap=True)
    for cache, metrics in analysis.metrics.items():
        times = [
            f"{format_ms(metrics[f'median_{name}_ms'])} / {format_ms(metrics[f'p99_{name}_ms'])}"
            if f"median_{name}_ms" in metrics
            else ""
            for name in ("ttft", "tpot", "itl", "e2el")
        ]
        table.add_row(
            cache,
            f"{metrics['completed']:,}",
            f"{metrics['failed']:,}" if metrics["failed"] else "",
            *times,
            f"{rate:,.1f}" if (rate := metrics.get("output_throughput")) is not None else "",
        )
    return table


def _token_table(analysis: Analysis) -> Table:
    table = _table("Where prompts came from, as shares of their tokens", "what", "cache")
    columns = {
        "computed": "computed",
        "local": "local",
        "own": "pool: own",
        "other": "pool: other's",
        "found": "not computed",
        "unknown": "not told",
    }
    known = [name for name in columns if any(getattr(each, name) for each in analysis.tokens)]
    is_routed = any(each.num_routed for each in analysis.tokens)
    for name in known:
        table.add_column(columns[name], justify="right", no_wrap=True)
    if is_routed:
        table.add_column("moved by the router", justify="right", no_wrap=True)
    for tokens in analysis.tokens:
        counts = [cast("int", getattr(tokens, name)) for name in known]
        table.add_row(
            f"{tokens.group} {tokens.part}",
            tokens.cache,
            *(f"{_PERCENT * count / tokens.total:.0f} %" if count else "" for count in counts),
            *([f"{tokens.num_moved:,} of {tokens.num_routed:,}"] if is_routed else []),
        )
    table.caption = "; ".join((*_told(analysis.told), *_read(analysis)))
    return table


def _told(told: Told) -> Iterator[str]:
    tellers = [f"{TELLERS[teller]} ({num:,})" for teller, num in told.requests.items()]
    yield f"by requests, told by {', '.join(tellers)}"
    if told.num_both and not told.num_different:
        yield f"of {told.num_both:,} the pool says the same as the router"
    elif told.num_both:
        yield (
            f"of {told.num_different:,} of {told.num_both:,} the pool says otherwise than the "
            f"router: {told.computed_difference:,} tokens computed and "
            f"{told.loaded_difference:,} loaded apart"
        )


def _read(analysis: Analysis) -> Iterator[str]:
    read = [each for each in analysis.transfers if each.bytes_read]
    rates = [each.gb_per_s for each in read if each.gb_per_s is not None]
    if rates:
        total_gb = sum(each.bytes_read for each in read) / 1e9
        yield (
            f"{total_gb:,.2f} GB read from the pool in {len(read)} periods, "
            f"{min(rates):.3f} to {max(rates):.3f} GB/s over their whole time"
        )


def _drift_table(analysis: Analysis) -> Table:
    table = _table("Drift of TTFT", "of", "cache")
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column("95 %", justify="right", no_wrap=True)
    for drift in analysis.drifts:
        low, high = drift.trend.interval.low, drift.trend.interval.high
        table.add_row(
            f"within period {drift.period}, a minute",
            drift.cache,
            f"{_PERCENT * drift.trend.share_per_minute:+.1f} %",
            f"{_PERCENT * low:+.1f} to {_PERCENT * high:+.1f} %",
        )
    for shift in analysis.shifts:
        interval = shift.ratio.interval
        table.add_row(
            f"period {shift.later} over period {shift.earlier}",
            shift.cache,
            f"{_PERCENT * (shift.ratio.value - 1):+.1f} %",
            ""
            if interval is None
            else f"{_PERCENT * (interval.low - 1):+.1f} to {_PERCENT * (interval.high - 1):+.1f} %",
        )
    return table


def _outlier_table(analysis: Analysis) -> Table:
    table = _table("Outliers of TTFT, which are part of all figures", "request", "cache")
    for name in ("period", "TTFT", "median"):
        table.add_column(name, justify="right", no_wrap=True)
    worst = sorted(analysis.outliers, key=lambda outlier: -abs(outlier.score))
    for outlier in worst[:_OUTLIERS_SHOWN_MAX]:
        table.add_row(
            outlier.key,
            outlier.cache,
            str(outlier.period),
            format_ms(outlier.value_ms),
            format_ms(outlier.median_ms),
        )
    if len(worst) > _OUTLIERS_SHOWN_MAX:
        table.caption = f"{len(worst) - _OUTLIERS_SHOWN_MAX} more in the record"
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(
        *columns, title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left"
    )
    for column in table.columns:
        column.no_wrap = True
    return table


def _row_name(group: str, part: str, metric: str) -> str:
    name = _METRIC_NAMES.get(metric, metric.removesuffix("_ms").upper())
    return f"{group}, {name}" if part == WHOLE else f"{group} {part}, {name}"


def _interval(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.low:.2f} to {interval.high:.2f}"
