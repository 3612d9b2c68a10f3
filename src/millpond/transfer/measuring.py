"""What the link and each route give on this machine: a fifth of a second, at the start.

Uses pinned memory and GPU memory of its own; the arena belongs to others already.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from millpond.model.limits import MIB
from millpond.transfer import cudart
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.link import LinkSpeed, pcie_link
from millpond.transfer.routes import MEASURED_PAGES, Route, Routes, pick

logger = logging.getLogger("vllm.millpond")

SAMPLE_BYTES: Final = 64 * MIB
_SLOT_BYTES: Final = 4 * MIB
_NUM_COPIES: Final = 4
"""Of the sample, one behind the other: what it costs to notice their end is then small."""


@dataclass(frozen=True, slots=True)
class Measured:
    """GB/s of the link and, by direction and page size, of each route."""

    link: LinkSpeed
    gb_s: dict[Direction, dict[int, dict[Route, float]]]
    seconds: float

    @property
    def routes(self) -> Routes:
        """The routes that the figures speak for."""
        return pick(self.gb_s)


class Sample:
    """Pinned memory and GPU memory, as large, and copies between the two."""

    def __init__(self, device: torch.device) -> None:
        """``RuntimeError`` where there is no memory for them."""
        self.host = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.device = torch.empty(SAMPLE_BYTES, dtype=torch.uint8, device=device)
        # guards: memory that the engine has just given back must not be written while its
        # kernels still use it (E6): torch has ordered the reuse on this stream alone.
        torch.cuda.current_stream(device).record_event().synchronize()

    def copies(self, direction: Direction, page_bytes: int) -> Copies:
        """Return copies of all pages: scattered on the GPU, side by side in scattered slots."""
        chance = np.random.default_rng(page_bytes)
        slot_bytes = max(_SLOT_BYTES, page_bytes)
        in_slot = np.arange(0, slot_bytes, page_bytes)
        slots = chance.permutation(np.arange(0, SAMPLE_BYTES, slot_bytes))
        host = (slots[:, None] + in_slot[None, :]).ravel() + self.host.data_ptr()
        pages = chance.permutation(np.arange(0, SAMPLE_BYTES, page_bytes)) + self.device.data_ptr()
        source, target = (pages, host) if direction is Direction.STORE else (host, pages)
        lengths = np.full(len(host), page_bytes, np.uint64)
        return Copies(source.astype(np.uint64), target.astype(np.uint64), lengths)


def measure(
    device: torch.device,
    copy: Callable[[Direction, Route, Copies, int], None],
    sample: Sample,
) -> Measured:
    """Time the link and the routes; ``copy`` moves bytes some times, until they have landed."""
    started_s = time.monotonic()

    def gb_s(direction: Direction, route: Route, page_bytes: int) -> float:
        copies = sample.copies(direction, page_bytes)
        copy(direction, route, copies, 1)  # compiles, loads and allocates
        start_s = time.perf_counter()
        copy(direction, route, copies, _NUM_COPIES)
        return _NUM_COPIES * SAMPLE_BYTES / (time.perf_counter() - start_s) / 1e9

    large = Route.BATCH if cudart.has_batch_copy() else Route.LOOP
    speeds = {way: gb_s(way, large, SAMPLE_BYTES) for way in Direction}
    generation, width = pcie_link(cudart.pci_bus_id(device.index or 0))
    link = LinkSpeed(speeds[Direction.LOAD], speeds[Direction.STORE], generation, width)
    by_route: dict[Direction, dict[int, dict[Route, float]]] = {}
    for direction in Direction:
        by_route[direction] = {}
        for page_bytes in MEASURED_PAGES:
            by_route[direction][page_bytes] = {
                route: gb_s(direction, route, page_bytes)
                for route in (large, Route.STAGED, Route.KERNEL)
                if route is not Route.KERNEL or direction is Direction.LOAD
            }
    return Measured(link, by_route, time.monotonic() - started_s)


def log_measured(measured: Measured) -> None:
    """Say what was found; a slow link is a warning with its remedy."""
    link = measured.link
    allowed = link.allowed_gb_s
    logger.info(
        "event=link_measured h2d_gb_s=%.1f d2h_gb_s=%.1f allowed_gb_s=%s seconds=%.2f routes=%s",
        link.h2d_gb_s,
        link.d2h_gb_s,
        "unknown" if allowed is None else f"{allowed:.1f}",
        measured.seconds,
        {
            way.value: {page: route.value for page, route in table.items()}
            for way, table in measured.routes.by_page.items()
        },
    )
    if link.is_slow:
        logger.warning(
            "event=link_slow h2d_gb_s=%.1f d2h_gb_s=%.1f generation=%s width=%s allowed_gb_s=%.1f "
            "remedy=%r",
            link.h2d_gb_s,
            link.d2h_gb_s,
            link.generation,
            link.width,
            allowed,
            "less than 80 % of what the link allows, measured four times: look for other traffic "
            "(another replica on this GPU), a NUMA node away from the GPU, or power saving",
        )
