"""Which way a page goes, by its size: picked from a measurement, or fixed."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from millpond.model.limits import KIB, MIB
from millpond.transfer.copies import Direction


class Route(enum.StrEnum):
    """How the bytes of a page get over the link.

    ``BATCH``: the copy engines, many pages in one call. ``LOOP``: the same, a call a page.
    ``STAGED``: packed by a kernel in a buffer on the GPU, the copy engines move the buffer.
    ``KERNEL``: a kernel reads and writes registered host memory itself.
    """

    BATCH = "batch"
    LOOP = "loop"
    STAGED = "staged"
    KERNEL = "kernel"


MEASURED_PAGES: Final = (16 * KIB, 64 * KIB, 256 * KIB, MIB)
"""Sizes for which the routes are timed; larger pages go as the largest of these."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The route for each measured page size and direction; pages between go as the next larger."""

    by_page: Mapping[Direction, Mapping[int, Route]]

    def of(self, direction: Direction, page_bytes: int) -> Route:
        """Return the route of a page."""
        table = self.by_page[direction]
        for size in sorted(table):
            if page_bytes <= size:
                return table[size]
        return table[max(table)]

    @staticmethod
    def only(route: Route) -> "Routes":
        """Return routes that are all the same."""
        return Routes({direction: {MIB: route} for direction in Direction})


def fallback(*, has_batch: bool) -> Routes:
    """Return the routes for a GPU on which nothing was measured."""
    large = Route.BATCH if has_batch else Route.LOOP
    table = {32 * KIB: Route.STAGED, MIB: large}
    return Routes(dict.fromkeys(Direction, table))


STAGED_LEAD_MIN: Final = 1.15
"""How much faster than the copy engines alone the buffer must be: it costs GPU memory, and
both directions at once gain less by it."""
KERNEL_LEAD_MIN: Final = 1.15
"""How much faster than the others the kernel must be: it takes a good part of the speed of
whatever else the GPU computes meanwhile, and the copy engines take none."""


def pick(gb_s: Mapping[Direction, Mapping[int, Mapping[Route, float]]]) -> Routes:
    """Return the routes that ``gb_s`` (by direction, page size and route) speaks for.

    A request waits for a load and nobody for a store, so only loads may use the kernel.
    """
    return Routes(
        {
            direction: {page: _best(direction, by_route) for page, by_route in by_page.items()}
            for direction, by_page in gb_s.items()
        }
    )


def _best(direction: Direction, gb_s: Mapping[Route, float]) -> Route:
    best = Route.BATCH if Route.BATCH in gb_s else Route.LOOP
    if gb_s.get(Route.STAGED, 0.0) > STAGED_LEAD_MIN * gb_s[best]:
        best = Route.STAGED
    kernel = gb_s.get(Route.KERNEL, 0.0)
    if direction is Direction.LOAD and kernel > KERNEL_LEAD_MIN * gb_s[best]:
        return Route.KERNEL
    return best
