"""Small named values shared by every room."""

import enum
from dataclasses import dataclass


class Outcome(enum.StrEnum):
    """What a lookup found at the block after the usable prefix.

    ``HIT``: every asked block is usable. ``PENDING``: the next block is being written by
    some replica right now. ``MISS``: nobody has it and nobody is writing it. A partial hit
    is a ``MISS`` or ``PENDING`` with ``num_blocks > 0``.
    """

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class Coverage(enum.StrEnum):
    """Which blocks of a prefix must hold a part for the prefix to be usable.

    ``EVERY``: all of them (full attention). ``WINDOW``: the last ``window_blocks`` (sliding
    window). ``LAST``: only the last one (a recurrent state, which sums up all before it).
    """

    EVERY = "every"
    WINDOW = "window"
    LAST = "last"


class SlotState(enum.StrEnum):
    """Life of a slot: FREE → RESERVED → COMMITTED → FREE, with QUARANTINED beside it.

    A quarantined slot is in no index and may not be handed out, because some process could
    still be copying from or to it, or because it is damaged.
    """

    FREE = "free"
    RESERVED = "reserved"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"


class Eviction(enum.StrEnum):
    """Which block leaves a full pool first: see ``pool/policies``."""

    LRU = "lru"
    ARC = "arc"


class Admission(enum.StrEnum):
    """Which new blocks are stored: all, or those that some request had asked for before."""

    ALWAYS = "always"
    SECOND_TOUCH = "second-touch"


@dataclass(frozen=True, slots=True)
class SlotRef:
    """Where a part of a block lies: stale as soon as epoch or generation has moved."""

    epoch: int
    extent: int
    index: int
    generation: int
