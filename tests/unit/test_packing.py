"""Packing moves every byte to where the plain copies would, through pieces of a small buffer."""

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.transfer import Copies, Direction
from millpond.transfer.packing import HostRegion, Packing, pack

PIECE = 4096
UNIT = 8192


def perform(direction: Direction, packing: Packing, piece_bytes: int) -> None:
    """Move the bytes as the device does, one piece after the other."""
    buffer = np.zeros(piece_bytes, np.uint8)
    base = buffer.ctypes.data
    for piece in packing.pieces:
        pages = [
            (int(engine), base + int(offset), int(length))
            for engine, offset, length in zip(
                packing.engine[piece.pages],
                packing.offsets[piece.pages],
                packing.lengths[piece.pages],
                strict=True,
            )
        ]
        runs = [
            (int(host), base + int(offset), int(length))
            for host, offset, length in zip(
                packing.run_hosts[piece.runs],
                packing.run_offsets[piece.runs],
                packing.run_lengths[piece.runs],
                strict=True,
            )
        ]
        assert all(place + length <= base + piece_bytes for _, place, length in pages + runs)
        first, then = (pages, runs) if direction is Direction.STORE else (runs, pages)
        for far, place, length in first:
            ctypes.memmove(place, far, length)
        for far, place, length in then:
            ctypes.memmove(far, place, length)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Draw (host offset, engine offset, length) of pages that do not overlap."""
    lengths = draw(st.lists(st.sampled_from([16, 64, 256, 1024]), min_size=1, max_size=60))
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 16, 512]), min_size=60, max_size=60))
    host, position = [], 0
    for length, gap in zip(lengths, gaps, strict=False):
        host.append(position + gap)
        position += gap + length
    order = draw(st.permutations(range(len(lengths))))
    engine = [0] * len(lengths)
    position = 0
    for i in order:
        engine[i] = position
        position += lengths[i]
    shuffled = draw(st.permutations(range(len(lengths))))
    return (
        [host[i] for i in shuffled],
        [engine[i] for i in shuffled],
        [lengths[i] for i in shuffled],
    )


@given(layouts(), st.sampled_from(list(Direction)), st.integers(0, 7))
def test_every_byte_arrives(
    layout: tuple[list[int], list[int], list[int]], direction: Direction, seed: int
) -> None:
    host_offsets, engine_offsets, lengths = layout
    chance = np.random.default_rng(seed)
    size = max(a + n for a, n in zip(host_offsets + engine_offsets, lengths * 2, strict=True))
    host = chance.integers(0, 256, size, np.uint8)
    engine = chance.integers(0, 256, size, np.uint8)
    wanted_host, wanted_engine = host.copy(), engine.copy()
    for h, e, n in zip(host_offsets, engine_offsets, lengths, strict=True):
        if direction is Direction.STORE:
            wanted_host[h : h + n] = engine[e : e + n]
        else:
            wanted_engine[e : e + n] = host[h : h + n]
    hosts = np.asarray(host_offsets, np.uint64) + np.uint64(host.ctypes.data)
    engines = np.asarray(engine_offsets, np.uint64) + np.uint64(engine.ctypes.data)
    ends = (engines, hosts) if direction is Direction.STORE else (hosts, engines)
    copies = Copies(*ends, np.asarray(lengths, np.uint64))
    region = HostRegion(host.ctypes.data, UNIT)
    packing = pack(direction, copies, PIECE, region)
    perform(direction, packing, PIECE)
    assert (host == wanted_host).all()
    assert (engine == wanted_engine).all()


def even(num_pages: int, page: int, host: int) -> Copies:
    starts = np.arange(num_pages, dtype=np.uint64) * np.uint64(page)
    return Copies(starts, starts + np.uint64(host), np.full(num_pages, page, np.uint64))


def test_pages_side_by_side_make_one_run_a_piece() -> None:
    packing = pack(Direction.STORE, even(24, 512, 1 << 20), PIECE, HostRegion(1 << 20, 1 << 20))
    assert packing.run_lengths.sum() == 24 * 512
    assert len(packing.run_lengths) == len(packing.pieces)
    assert len(packing.pieces) <= -(-24 * 512 // (PIECE - 512)) + 1


def test_no_run_crosses_a_unit() -> None:
    """A copy across two registrations is one that the driver may refuse, or make slow."""
    packing = pack(Direction.STORE, even(8, 512, 1 << 20), 1 << 20, HostRegion(1 << 20, 1024))
    assert packing.run_lengths.tolist() == [1024] * 4


def test_a_page_too_large_for_the_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="2064 bytes"):
        pack(Direction.LOAD, even(1, 2064, 0), PIECE, HostRegion(0, UNIT))
