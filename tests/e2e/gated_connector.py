"""The real connector with copies that a test can hold back or let fail, one by one.

What happens is decided by files in the folder that TEST_GATES names, looked at when a copy
is about to begin; ``<kind>`` is ``store`` or ``load``:

    hold-<kind>, hold-<kind>-<rank>     copies wait as long as the file is there (60 s at most)
    fail-<kind>, fail-<kind>-<rank>     copies move nothing and end with an error

Of each copy that is to fail there is a file ``failing-<kind>-<number>`` from then on.
"""

import os
import threading
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
from vllm.distributed.device_communicators import shm_broadcast

from millpond.config import ConnectorConfig
from millpond.connector import MillpondConnector
from millpond.connector.worker import WorkerSide
from millpond.transfer import Copies, CopyEngine, Direction, Ends, Fence

# While a store is held back the engine steps on, and ranks wait for each other by yielding in
# a loop. With no more cores than ranks that has kept every other process waiting for up to a
# minute (seen with Linux 6.18 on two cores).
_pause = threading.Event()
shm_broadcast.sched_yield = lambda: _pause.wait(0.0001)


class Gates:
    """One rank's view of the files."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank

    def is_set(self, word: str, direction: Direction) -> bool:
        name = f"{word}-{direction.value}"
        return any((self._folder / n).exists() for n in (name, f"{name}-{self._rank}"))

    def note_failing(self, direction: Direction) -> None:
        (self._folder / f"failing-{direction.value}-{uuid.uuid4().hex}").touch()


class GatedFence:
    """A fence that is passed once the other one is, and nobody holds the copy back."""

    def __init__(self, inner: Fence, gates: Gates, direction: Direction) -> None:
        self._inner = inner
        self._gates = gates
        self._direction = direction

    def is_passed(self) -> bool:
        return self._inner.is_passed() and not self._gates.is_set("hold", self._direction)


class GatedCopyEngine:
    """A copy engine in front of another one."""

    def __init__(self, inner: CopyEngine, gates: Gates) -> None:
        self._inner = inner
        self._gates = gates

    def fence(self) -> Fence:
        return self._inner.fence()

    def submit(
        self,
        direction: Direction,
        copies: Copies,
        *,
        after: Fence,
        keep_alive: object,
        ends: Ends,
    ) -> None:
        if self._gates.is_set("fail", direction):
            self._gates.note_failing(direction)
            nothing = np.empty(0, np.uint64)
            copies = Copies(nothing, nothing, nothing)
            on_done = ends.on_done
            ends = Ends(lambda t: on_done(replace(t, error="the test lets it fail")))
        self._inner.submit(
            direction,
            copies,
            after=GatedFence(after, self._gates, direction),
            keep_alive=keep_alive,
            ends=ends,
        )

    def wait_idle(self, timeout_s: float) -> bool:
        return self._inner.wait_idle(timeout_s)

    def close(self, timeout_s: float) -> bool:
        return self._inner.close(timeout_s)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class GatedConnector(MillpondConnector):
    """See the module."""

    def _make_worker(self, config: ConnectorConfig) -> WorkerSide:
        worker = super()._make_worker(config)
        gates = Gates(Path(os.environ["TEST_GATES"]), worker._rank)
        worker._copy_engine = GatedCopyEngine(worker._copy_engine, gates)
        return worker
