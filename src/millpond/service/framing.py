"""Cutting a stream of bytes into frames, the same on both ends of the socket."""

from millpond.model.limits import FRAME_BYTES_MAX
from millpond.service.protocol import LENGTH


class FrameError(Exception):
    """The peer's bytes are not frames; nothing after them can be understood."""


class FrameDecoder:
    """Collects received bytes and gives back the whole frames among them.

    Holds at most one unfinished frame (FRAME_BYTES_MAX and its length) between calls.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the frame that is not complete yet."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the frames that ``data`` completes, without their lengths.

        Raises ``FrameError`` as soon as a length beyond FRAME_BYTES_MAX is seen; the decoder
        is of no use after that.
        """
        buffer = self._buffer
        buffer += data
        frames: list[bytes] = []
        start = 0
        while len(buffer) - start >= LENGTH.size:
            (num_bytes,) = LENGTH.unpack_from(buffer, start)
            if num_bytes > FRAME_BYTES_MAX:
                raise FrameError(f"frame of {num_bytes} bytes, at most {FRAME_BYTES_MAX}")
            end = start + LENGTH.size + num_bytes
            if len(buffer) < end:
                break
            frames.append(bytes(memoryview(buffer)[start + LENGTH.size : end]))
            start = end
        if start:
            del buffer[:start]
        return frames
