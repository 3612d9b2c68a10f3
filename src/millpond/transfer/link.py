"""What the link between host and GPU gives, measured, beside what it should give."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SLOW_RATIO: Final = 0.8
"""Below this share of what generation and width allow, something is wrong with the link."""

_GB_S_PER_LANE: Final[Mapping[int, float]] = {
    # Transfers a second times the line code: 8/10 up to generation 2, then 128/130; of what is
    # left, a packet of 256 bytes has 24 of frame, header and check (PCIe base specification).
    1: 2.5 * 8 / 10 / 8 * 256 / 280,
    2: 5.0 * 8 / 10 / 8 * 256 / 280,
    3: 8.0 * 128 / 130 / 8 * 256 / 280,
    4: 16.0 * 128 / 130 / 8 * 256 / 280,
    5: 32.0 * 128 / 130 / 8 * 256 / 280,
    6: 64.0 * 242 / 256 / 8 * 256 / 280,
}
_GENERATION_BY_SPEED: Final = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """GB/s (1e9 bytes) of one long copy each way; generation and width where they are known."""

    h2d_gb_s: float
    d2h_gb_s: float
    generation: int | None = None
    width: int | None = None

    @property
    def allowed_gb_s(self) -> float | None:
        """What generation and width allow, in GB/s; None where they are not known."""
        if self.generation is None or self.width is None:
            return None
        return _GB_S_PER_LANE[self.generation] * self.width

    @property
    def slower_gb_s(self) -> float:
        """The slower way."""
        return min(self.h2d_gb_s, self.d2h_gb_s)

    @property
    def is_slow(self) -> bool:
        """Whether either way gives less than 80 % of what the link allows."""
        allowed = self.allowed_gb_s
        return allowed is not None and self.slower_gb_s < SLOW_RATIO * allowed


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What is known of one rank's way to the arena; ``problem`` is "" where there is none."""

    speed: LinkSpeed | None = None
    problem: str = ""


def pcie_link(
    bus_id: str, folder: Path = Path("/sys/bus/pci/devices")
) -> tuple[int | None, int | None]:
    """Return generation and width of the link of the device at ``bus_id``, None if unknown.

    The generation is the highest that both ends can do: an idle GPU lowers the current one.
    """
    device = folder / bus_id.lower()
    try:
        width = int((device / "current_link_width").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None, None
    # A bridge above it, where one is to be seen, may do less than the device.
    ends = [_generation(device), _generation(device.resolve().parent)]
    known = [generation for generation in ends if generation is not None]
    return min(known, default=None), width if 0 < width <= 32 else None


def _generation(device: Path) -> int | None:
    try:
        speed = (device / "max_link_speed").read_text(encoding="ascii").split()[0]
    except (OSError, IndexError):
        return None
    return _GENERATION_BY_SPEED.get(speed)
