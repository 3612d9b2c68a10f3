"""How scattered pages are packed into pieces of a buffer, so that long copies can move them.

A slot keeps the pages of a block side by side, the engine keeps each layer's apart:

    engine     a ··· c ··· b ···         pages, scattered
    buffer     a b c │ d e f             pieces, in the order of the slots
    slots      a b c ···· d e f          runs: one long copy each
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millpond.transfer.copies import Copies, Direction


@dataclass(frozen=True, slots=True)
class HostRegion:
    """The registered memory at ``address``; no copy may cross a multiple of ``unit_bytes``."""

    address: int
    unit_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What goes through one filling of the buffer: a range of the pages, a range of the runs."""

    pages: slice
    runs: slice


@dataclass(frozen=True, slots=True)
class Packing:
    """Pages in the order of their places on the host, and the runs that these form.

    ``offsets`` and ``run_offsets`` are places in a piece of the buffer, in bytes.
    """

    engine: NDArray[np.uint64]
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    run_hosts: NDArray[np.uint64]
    run_offsets: NDArray[np.uint64]
    run_lengths: NDArray[np.uint64]
    pieces: tuple[Piece, ...]


def pack(direction: Direction, copies: Copies, piece_bytes: int, region: HostRegion) -> Packing:
    """Return how ``copies`` go through pieces of ``piece_bytes``.

    ``ValueError`` for a page larger than half a piece.
    """
    is_store = direction is Direction.STORE
    host = copies.targets if is_store else copies.sources
    order = np.argsort(host, kind="stable")
    host, lengths = host[order], copies.lengths[order]
    engine = (copies.sources if is_store else copies.targets)[order]
    longest = int(lengths.max())
    if 2 * longest > piece_bytes:
        raise ValueError(f"a page of {longest} bytes for pieces of {piece_bytes}")
    ends = np.cumsum(lengths)
    starts = ends - lengths
    # A piece takes pages that start within it; the last may reach over by less than a page.
    piece_of = starts // np.uint64(piece_bytes - longest)
    first_pages = np.flatnonzero(np.concatenate(([True], piece_of[1:] != piece_of[:-1])))
    piece_sizes = np.diff(np.append(first_pages, len(host)))
    offsets = starts - np.repeat(starts[first_pages], piece_sizes)
    unit = (host - np.uint64(region.address)) // np.uint64(region.unit_bytes)
    breaks = np.ones(len(host), np.bool_)
    breaks[1:] = (
        (host[1:] != host[:-1] + lengths[:-1])
        | (unit[1:] != unit[:-1])
        | (piece_of[1:] != piece_of[:-1])
    )
    first_of_run = np.flatnonzero(breaks)
    run_starts = np.searchsorted(first_of_run, first_pages)
    page_ends = [*first_pages[1:].tolist(), len(host)]
    run_ends = [*run_starts[1:].tolist(), len(first_of_run)]
    pieces = tuple(
        Piece(slice(page, page_end), slice(run, run_end))
        for page, page_end, run, run_end in zip(
            first_pages.tolist(), page_ends, run_starts.tolist(), run_ends, strict=True
        )
    )
    return Packing(
        engine=engine,
        offsets=offsets,
        lengths=lengths,
        run_hosts=host[first_of_run],
        run_offsets=offsets[first_of_run],
        run_lengths=np.add.reduceat(lengths, first_of_run),
        pieces=pieces,
    )
