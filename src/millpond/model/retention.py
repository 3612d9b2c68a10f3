"""What a pool keeps, as it is configured: a value for the daemon, the planner and tests."""

from dataclasses import dataclass
from typing import Final

from millpond.model.names import Admission, Eviction

STATE_RATIO_MIN: Final = 0.01


@dataclass(frozen=True, slots=True)
class Retention:
    """How blocks are admitted and evicted.

    ``state_ratio`` is the largest share of the arena that recurrent states may take beside
    the pages of hybrid models; it does not bind models that have nothing but states.
    """

    eviction: Eviction = Eviction.LRU
    admission: Admission = Admission.ALWAYS
    state_ratio: float = 0.5

    def __post_init__(self) -> None:
        if not STATE_RATIO_MIN <= self.state_ratio <= 1:
            raise ValueError(f"state_ratio is {self.state_ratio}, must be {STATE_RATIO_MIN} to 1")


DEFAULT_RETENTION: Final = Retention()
"""What a pool keeps unless told otherwise."""
