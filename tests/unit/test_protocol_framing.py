"""Frames: any cut of the stream gives the same ones, and lengths are bounded."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.model.limits import FRAME_BYTES_MAX
from millpond.service.framing import FrameDecoder, FrameError
from millpond.service.protocol import LENGTH, frame


@given(
    payloads=st.lists(st.binary(max_size=300), max_size=8),
    cuts=st.lists(st.integers(0, 2500), max_size=12),
)
def test_frames_do_not_depend_on_how_the_stream_is_cut(
    payloads: list[bytes], cuts: list[int]
) -> None:
    stream = b"".join(map(frame, payloads))
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = FrameDecoder()
    found: list[bytes] = []
    for start, end in itertools.pairwise(places):
        found += decoder.feed(stream[start:end])
    assert found == payloads
    assert decoder.buffered_bytes == 0


@given(payload=st.binary(min_size=1, max_size=300), missing=st.integers(1, 300))
def test_an_unfinished_frame_is_kept_back(payload: bytes, missing: int) -> None:
    stream = frame(payload)
    part = stream[: max(0, len(stream) - missing)]
    decoder = FrameDecoder()
    assert decoder.feed(part) == []
    assert decoder.buffered_bytes == len(part)
    assert decoder.feed(stream[len(part) :]) == [payload]


@given(garbage=st.binary(max_size=5000))
def test_garbage_is_bounded(garbage: bytes) -> None:
    decoder = FrameDecoder()
    try:
        frames = decoder.feed(garbage)
    except FrameError:
        return
    assert sum(map(len, frames)) + decoder.buffered_bytes <= len(garbage)


def test_length_is_refused_before_the_bytes_come() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(LENGTH.pack(FRAME_BYTES_MAX)) == []
    with pytest.raises(FrameError, match=str(FRAME_BYTES_MAX + 1)):
        FrameDecoder().feed(LENGTH.pack(FRAME_BYTES_MAX + 1))


def test_largest_frame_passes() -> None:
    payload = bytes(FRAME_BYTES_MAX)
    assert FrameDecoder().feed(frame(payload)) == [payload]
    with pytest.raises(ValueError, match="at most"):
        frame(payload + b"x")
