"""Small pages by way of a buffer on the GPU: packed there by a kernel, moved in long copies.

    store   pages ──kernel──▶ piece of the buffer ──copy engine──▶ slots
            side stream       │                     the lane's stream
    load    slots ──copy engine──▶ piece of the buffer ──kernel──▶ pages

Two pieces take turns, so that the kernel of one runs beside the copy of the other. Both
streams are ordered by events alone, each with its line "guards:".
"""

from collections import deque
from typing import Final

import numpy as np
import torch

from millpond.model.limits import MIB
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.feed import Feed
from millpond.transfer.kernel import PageTable
from millpond.transfer.packing import HostRegion, Packing, Piece, pack

PIECE_BYTES: Final = 16 * MIB
NUM_PIECES: Final = 2
STAGED_BYTES_MAX: Final = PIECE_BYTES // 2
"""Largest page that goes through the buffer."""
_PIECES_AHEAD_MAX: Final = 32
"""Pieces enqueued and not ended."""
_PROGRAMS: Final = 64
"""Programs of the packing kernel: a few per cent of the time, half of the cores."""


class Stager:
    """The buffer of one lane; used by one thread at a time."""

    def __init__(
        self, device: torch.device, direction: Direction, stream: torch.cuda.Stream, feed: Feed
    ) -> None:
        """``stream`` is the lane's, ``feed`` the way onto it."""
        self._device = device
        self._stream = stream
        self._feed = feed
        self._direction = direction
        self._side = torch.cuda.Stream(device=device, priority=stream.priority)
        self._ahead: deque[torch.cuda.Event] = deque()
        self._buffer: torch.Tensor | None = None
        self._next = 0
        self._used: list[torch.cuda.Event | None] = [None] * NUM_PIECES
        """Behind the last use of each piece."""

    def awaited(self, num_bytes: int) -> torch.cuda.Event | None:
        """Return what to wait for until pages of so many bytes can be enqueued."""
        while self._ahead and self._ahead[0].query():
            self._ahead.popleft()
        # A piece takes at least half of its size: see packing.
        num_pieces = 1 + num_bytes // (PIECE_BYTES // 2)
        if not self._ahead or len(self._ahead) + num_pieces <= _PIECES_AHEAD_MAX:
            return None
        return self._ahead[0]

    def wait_for(self, fence: torch.cuda.Event) -> None:
        """Let the device hold back what is enqueued from now on until ``fence`` is passed."""
        # guards: the kernel must not touch pages before the work that the lane waits for is
        # done: kernels that write them (E1), or read or zero them (E3).
        self._side.wait_event(fence)

    def join(self) -> None:
        """Let the lane's stream wait for all that was enqueued so far."""
        if self._buffer is not None:
            # guards: "ended" must not precede the last page's last byte (E4), nor the end of a
            # kernel on the side stream where a later piece failed (E3, E5).
            self._stream.wait_event(_mark(self._side))

    def enqueue(self, copies: Copies, region: HostRegion) -> object:
        """Enqueue the copies; after the last of them, ``join``.

        The result must be kept alive until they have ended. ``RuntimeError`` where the GPU has
        no memory for the buffer or a table: then this call has enqueued nothing.
        """
        buffer = self._take_buffer()
        packing = pack(self._direction, copies, PIECE_BYTES, region)
        offsets = packing.offsets.copy()
        indexes: list[int] = []
        for piece in packing.pieces:
            indexes.append(self._next)
            offsets[piece.pages] += np.uint64(self._address(buffer, self._next))
            self._next = (self._next + 1) % NUM_PIECES
        is_store = self._direction is Direction.STORE
        ends = (packing.engine, offsets) if is_store else (offsets, packing.engine)
        table = PageTable(*ends, packing.lengths, self._side)
        move = self._store_piece if is_store else self._load_piece
        for index, piece in zip(indexes, packing.pieces, strict=True):
            move(index, piece, packing, table)
            self._ahead.append(_mark(self._side))
        # guards: table, buffer and arrays are in use until the copies end (E6).
        return table, packing, buffer

    def _store_piece(self, index: int, piece: Piece, packing: Packing, table: PageTable) -> None:
        used = self._used[index]
        if used is not None:
            # guards: a piece must not be refilled before it has been copied away (E6).
            self._side.wait_event(used)
        table.copy(piece.pages, self._side, _PROGRAMS)
        # guards: a piece must not be copied away before it has been filled (E1).
        self._stream.wait_event(_mark(self._side))
        self._copy_runs(index, piece, packing)
        self._used[index] = _mark(self._stream)

    def _load_piece(self, index: int, piece: Piece, packing: Packing, table: PageTable) -> None:
        used = self._used[index]
        if used is not None:
            # guards: a piece must not be refilled before its pages have been taken out (E6).
            self._stream.wait_event(used)
        self._copy_runs(index, piece, packing)
        # guards: pages must not be taken out before the piece has been filled (E4).
        self._side.wait_event(_mark(self._stream))
        table.copy(piece.pages, self._side, _PROGRAMS)
        self._used[index] = _mark(self._side)

    def _copy_runs(self, index: int, piece: Piece, packing: Packing) -> None:
        hosts = packing.run_hosts[piece.runs]
        places = packing.run_offsets[piece.runs] + np.uint64(
            self._address(self._take_buffer(), index)
        )
        ends = (places, hosts) if self._direction is Direction.STORE else (hosts, places)
        self._feed.copy(*ends, packing.run_lengths[piece.runs])

    def _take_buffer(self) -> torch.Tensor:
        if self._buffer is None:
            # guards: memory that the engine has just given back must not be written while its
            # kernels still use it (E6): torch hands out a stream's memory to that stream only.
            with torch.cuda.stream(self._side):
                self._buffer = torch.empty(
                    NUM_PIECES * PIECE_BYTES, dtype=torch.uint8, device=self._device
                )
        return self._buffer

    def _address(self, buffer: torch.Tensor, index: int) -> int:
        return buffer.data_ptr() + index * PIECE_BYTES


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event
