"""Until when loads may keep the link busy beside an engine that computes.

    begin ── inputs ── loads ───────── forward pass ───────── begin ── inputs ── ...
                       └─ the link is theirs until here ────┘

The inputs of a step are copies to the GPU. Behind a kernel that still runs they queue behind all
copies that were enqueued before them, on whatever stream; only a copy of a few KiB on an idle
stream goes around. Where the GPU sets the pace of an engine, a load of 128k tokens would hold up
everybody's next step for 0.16 s. So what is enqueued behind the inputs of one step is to be over
before those of the next. Where the speed of the link is not known, there is no limit.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from millpond.transfer import Pace

_SHARE: Final = 0.8
"""Of the time that is expected to be left: steps vary, and their inputs with them."""
_STEP_S: Final = 0.01
"""Of an engine whose steps have not been seen yet."""
_NUM_STEPS: Final = 4
_LATE_STEPS: Final = 3
_LATE_S: Final = 0.25
"""Nothing is limited after so long, or so many steps, whichever is longer: others prefill, say."""


class Pacing:
    """Watches the steps of an engine. For the engine's thread, but for ``tell_link``.

    ``clock`` is that of the copy engine.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        """The beginning of the step that is being made; None if it computes nothing."""
        self._steps_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._num_late = 0
        """Steps in a row that were nearly over when their inputs had been copied."""
        self._bytes_per_s: float | None = None

    def tell_link(self, bytes_per_s: float) -> None:
        """Note what the link gives towards the GPU; what is no speed is ignored."""
        if 0 < bytes_per_s < math.inf:
            self._bytes_per_s = bytes_per_s

    def begin_step(self, *, computes: bool) -> None:
        """Note that a step begins, before its inputs are copied."""
        now_s = self._clock()
        if self._began_s is not None:
            self._steps_s.append(now_s - self._began_s)
        self._began_s = now_s if computes else None

    def pace(self) -> Pace | None:
        """Return until when loads may be under way, now that the step's inputs are copied.

        None, for no limit: while the engine computes nothing; where the link is not known; where
        most of the step is over in each of some steps, for then there is no time between two
        inputs to be had (vLLM 0.32's first runner comes here once it has launched the forward
        pass). The shortest of the last steps counts, for those between requests are longer.
        """
        if self._began_s is None or self._bytes_per_s is None:
            return None
        now_s = self._clock()
        step_s = min(self._steps_s, default=_STEP_S)
        left_s = step_s - (now_s - self._began_s)
        self._num_late = self._num_late + 1 if left_s < step_s / 2 else 0
        if self._num_late > _NUM_STEPS:
            return None
        busy_s = 0.0 if self._num_late else _SHARE * left_s
        ends_s = max(_LATE_S, _LATE_STEPS * step_s)
        return Pace(self._bytes_per_s, now_s + busy_s, now_s + ends_s)
