"""The bootstrap's draws: how often each request is in each resample.

A resample is told by counts and not by a list of its values. So one sort serves all resamples
and all quantiles, periods of any lengths are drawn together, and a request with several values,
the times between its tokens, is drawn as a whole (a cluster bootstrap).

    values in their order       3.1   4.0   4.2   5.9
    of request                    1     0     1     2
    drawn, by request                [2, 0, 1]
    drawn, in their order         0     2     0     1     -> 4.0, 4.0, 5.9
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Counts = npt.NDArray[np.integer]

RESAMPLES: Final = 2000
_COUNTED_AT_ONCE: Final = 2**16
"""Values of resamples at once: what a core's own cache holds."""


@dataclass(frozen=True, slots=True)
class Clusters:
    """The values of one period, of which ``num_each[i]`` belong to request i, in this order."""

    values: Values
    num_each: Counts

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.num_each)


def one_each(values: Values) -> Clusters:
    """Return clusters of one value."""
    return Clusters(values, np.ones(len(values), np.int64))


def resampled_quantiles(
    measures: Sequence[Sequence[Clusters]],
    quantiles: Sequence[float],
    *,
    by_period: bool,
    seed: int,
) -> list[Values]:
    """Return the quantiles of each resample for each measure, a row for each quantile.

    ``by_period`` draws periods first and then as many requests of each as it has (Davison and
    Hinkley, Bootstrap Methods and their Application, 1997, section 3.8); else requests are
    drawn as if all were of one period. Every period has a request, every request a value. The
    measures have equally long periods, and the same draws.
    """
    generator = np.random.default_rng(seed)
    lengths = list(map(len, measures[0]))
    sizes = lengths if by_period else [sum(lengths)]
    ordered = [_ordered(each) for each in measures]
    num_rows = max(1, _COUNTED_AT_ONCE // max(len(values) for values, _ in ordered))
    found: list[list[Values]] = [[] for _ in measures]
    for rows in _batches(RESAMPLES, num_rows):
        counts = _counts(sizes, rows, generator)
        for mine, (values, owners) in zip(found, ordered, strict=True):
            mine.append(_quantiles(values, np.take(counts, owners, axis=1), quantiles))
    return [np.concatenate(each, axis=1) for each in found]


def _ordered(periods: Sequence[Clusters]) -> tuple[Values, Counts]:
    """Return all values, rising, and to which request each of them belongs."""
    values = np.concatenate([each.values for each in periods])
    num_each = np.concatenate([each.num_each for each in periods])
    order = np.argsort(values, kind="stable")
    return values[order], np.repeat(np.arange(len(num_each)), num_each)[order]


def _batches(num: int, size: int) -> list[int]:
    whole, rest = divmod(num, size)
    return [size] * whole + ([rest] if rest else [])


def _counts(sizes: Sequence[int], num_rows: int, generator: np.random.Generator) -> Counts:
    """Return how often each resample, a row, has drawn each request."""
    num_requests = sum(sizes)
    times = generator.multinomial(len(sizes), [1 / len(sizes)] * len(sizes), num_rows)
    begins = num_requests * np.arange(num_rows)
    places: list[Counts] = []
    for size, drawn in zip(sizes, times.T, strict=True):
        rows = np.repeat(begins, drawn * size)
        places.append(rows + generator.integers(size, size=len(rows)))
        begins += size
    counts = np.bincount(np.concatenate(places), minlength=num_rows * num_requests)
    return counts.astype(np.int32).reshape(num_rows, num_requests)


def _quantiles(ordered: Values, counts: Counts, quantiles: Sequence[float]) -> Values:
    """Return the quantiles of rows that have ``ordered[i]`` ``counts[row, i]`` times.

    They are those of ``numpy.quantile``: between two values, in proportion.
    """
    num_rows, num_values = counts.shape
    # One rising line through all rows, for one search in it.
    reached = np.cumsum(counts, dtype=counts.dtype)
    ends = reached[num_values - 1 :: num_values]
    begins = np.append(np.zeros(1, counts.dtype), ends[:-1])
    ranks = np.outer(quantiles, ends - begins - 1)
    below = np.floor(ranks)
    wanted = begins + np.stack([below, np.ceil(ranks)]).astype(counts.dtype)
    found = np.searchsorted(reached, wanted, side="right")
    low, high = ordered[found - num_values * np.arange(num_rows)]
    return low + (ranks - below) * (high - low)
