"""Arithmetic of the benchmarks: from samples to the figures that are stored."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

RESAMPLES = 10_000
INTERVAL = (2.5, 97.5)
"""Percentiles of the resampled medians: an interval of 95 %."""


def percentiles(times_ns: Sequence[int]) -> dict[str, float]:
    """Return p50 and p99 in microseconds."""
    cuts = statistics.quantiles(times_ns, n=100)
    return {"p50_us": round(cuts[49] / 1e3, 1), "p99_us": round(cuts[98] / 1e3, 1)}


def paired_ratio(
    name: str, numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 1
) -> dict[str, float]:
    """Return the median of the pairs' ratios, and its interval from resampling the pairs."""
    ratios = np.asarray(numerators, float) / np.asarray(denominators, float)
    if ratios.ndim != 1 or not len(ratios):
        raise ValueError(f"{name}: no pairs")
    drawn = np.random.default_rng(seed).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), INTERVAL)
    return {
        name: round(float(np.median(ratios)), 4),
        f"{name}_low": round(float(low), 4),
        f"{name}_high": round(float(high), 4),
    }


def rates(periods: Mapping[str, Sequence[float]], suffix: str) -> dict[str, float]:
    """Return each case's median rate, and its ratio to the echo's of the same round.

    ``periods[case][i]`` is a rate in round i; one of the cases is ``echo``.
    """
    figures: dict[str, float] = {}
    for case, values in periods.items():
        figures[f"{case}_per_s_{suffix}"] = round(statistics.median(values), 1)
        if case != "echo":
            ratios = [mine / echo for mine, echo in zip(values, periods["echo"], strict=True)]
            figures[f"{case}_vs_echo_ratio_{suffix}"] = round(statistics.median(ratios), 4)
    return figures


def copy_ratios(times: Mapping[tuple[str, int], Sequence[tuple[float, float]]]) -> dict[str, float]:
    """Return memcpy's time over the engine's by direction and page, and the least from 1 MiB on.

    ``times[direction, page_bytes]`` are pairs (memcpy, engine) of the same bytes in a round.
    """
    figures: dict[str, float] = {}
    large: list[float] = []
    for (direction, page_bytes), pairs in times.items():
        ratio = round(statistics.median(memcpy / engine for memcpy, engine in pairs), 3)
        figures[f"copy_{direction}_{page_bytes // 1024}_kib_vs_memcpy_ratio"] = ratio
        if page_bytes >= 2**20:
            large.append(ratio)
    return {"copy_vs_memcpy_ratio": min(large), **figures}
