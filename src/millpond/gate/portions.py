"""A load that gets onto its stream in portions, for the engine computes meanwhile (E4).

    load's stream    ─ hold ─┬ portion ┬ portion ┬ … ┬ portion ┤ told of here
    who comes by       pace ─┘  pace ──┘  pace ──┘

As for a load in one piece: what was told of must be there, to the last portion's last byte.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from millpond.gate.own import OwnPath
from millpond.transfer.engine import Pace

NAME: Final = "in portions"
_NUM_PORTIONS_MIN: Final = 4
_BUSY_S: Final = 0.01
_ENDS_S: Final = 0.05
"""Where nobody comes by, as while a test waits for the end, the lane goes on after this."""


@contextmanager
def in_portions(path: OwnPath, num_bytes: int) -> Generator[None]:
    """Let a load of so many bytes come in portions, one at most whenever somebody comes by."""
    pace = Pace(num_bytes / _NUM_PORTIONS_MIN / _BUSY_S, _BUSY_S, _ENDS_S)

    def come_by() -> None:
        path.engine.pace(pace)
        path.engine.step()

    path.engine.pace(pace)
    path.come_by = come_by
    try:
        yield
    finally:
        path.come_by = path.engine.step
        path.engine.pace(None)
