"""How long loads may keep the link busy beside an engine that computes.

    begin ── inputs ── loads ───────── forward pass ───────── begin ── inputs ── ...
                       └─ the link is theirs until here ────┘

The inputs of a step are copies to the GPU, and queue behind all that were enqueued before them:
a load of 128k tokens would hold up the next step of everybody else for 0.16 s. So what is
enqueued behind the inputs of one step is to be over before those of the next.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from millpond.transfer import Pace

_SHARE: Final = 0.9
"""Of the time that is expected to be left: steps vary by some per cent."""
_STEP_S: Final = 0.01
"""Of an engine whose steps have not been seen yet."""
_NUM_STEPS: Final = 4
_SHARE_MIN: Final = 0.1
"""Of a step, for a load to end at all."""
_LATE: Final = 3.0
"""An engine that has not come by for so many steps is not held up by anything."""


class Pacing:
    """Watches the steps of an engine. For the engine's thread, but for ``tell_link``."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        """The beginning of the step that is being made; None if it computes nothing."""
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._bytes_per_s: float | None = None

    def tell_link(self, bytes_per_s: float) -> None:
        """Note what the link gives towards the GPU."""
        self._bytes_per_s = bytes_per_s

    def begin_step(self, *, computes: bool) -> None:
        """Note that a step begins, before its inputs are copied."""
        now_s = self._clock()
        if self._began_s is not None:
            self._steps_s.append(now_s - self._began_s)
        self._began_s = now_s if computes else None

    def pace(self) -> Pace | None:
        """Return for how long loads may be under way, now that the step's inputs are copied.

        None while the engine computes nothing, or the link is not known: then there is no limit.
        The shortest of the last steps counts, for those between requests are longer.
        """
        if self._began_s is None or self._bytes_per_s is None:
            return None
        step_s = min(self._steps_s, default=_STEP_S)
        left_s = step_s - (self._clock() - self._began_s)
        busy_s = max(_SHARE * left_s, _SHARE_MIN * step_s)
        return Pace(self._bytes_per_s, busy_s, _LATE * step_s)
