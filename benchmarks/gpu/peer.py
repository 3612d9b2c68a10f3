"""The pool's memory once more, on another GPU: loads can be read from there.

Runs in an engine's process that sees two GPUs: the engine's own comes first.
"""

import ctypes
from typing import Any

import numpy as np
import torch

from millpond.transfer import Copies, Direction

PEER = "cuda:1"
CHUNK_BYTES = 2**28


class Mirror:
    """A copy of the arena of a connector's worker, as ``refresh`` last found it."""

    def __init__(self, worker: Any) -> None:  # noqa: ANN401
        self._arena = worker._arena  # noqa: SLF001
        self._bytes = torch.empty(
            self._arena.size_bytes,
            dtype=torch.uint8,
            device=PEER if torch.cuda.is_available() else "cpu",
        )
        offset = (self._bytes.data_ptr() - self._arena.address) % 2**64
        self._offset = np.uint64(offset)
        self._is_read = False
        self.num_loads = 0
        """How many have come from here."""
        engine = worker._copy_engine  # noqa: SLF001
        submit = engine.submit

        def submit_from_peer(direction: Direction, copies: Copies, **more: Any) -> None:  # noqa: ANN401
            if self._is_read and direction is Direction.LOAD:
                self.num_loads += 1
                # Unsigned: what overflows comes out right.
                copies = Copies(copies.sources + self._offset, copies.targets, copies.lengths)
            submit(direction, copies, **more)

        engine.submit = submit_from_peer

    def refresh(self) -> None:
        """Copy all of the arena; nobody writes to it."""
        size_bytes = self._arena.size_bytes
        there = (ctypes.c_uint8 * size_bytes).from_address(self._arena.address)
        host = torch.from_numpy(np.frombuffer(there, dtype=np.uint8))
        for start in range(0, size_bytes, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, size_bytes)
            self._bytes[start:stop].copy_(host[start:stop])
        if torch.cuda.is_available():
            # torch lets the device that a copy comes from reach the other one: either way once.
            own = torch.zeros(8, dtype=torch.uint8, device="cuda:0")
            own.copy_(self._bytes[:8])
            torch.zeros(8, dtype=torch.uint8, device=PEER).copy_(own)
            torch.cuda.synchronize(PEER)
            torch.cuda.synchronize()

    def read(self, *, enabled: bool) -> None:
        """Let loads come from here, or from host memory again."""
        self._is_read = enabled
