"""The one shared segment: made by the daemon, mapped by every worker.

    0                      ARENA_HEADER_BYTES               + size_bytes   + size_bytes / 512
    | header | unused      | slot area                      | checksums    |

Each SUMMED_BYTES_MIN of slots have room for one checksum, a u64: the clients' business.

The daemon takes memory from the kernel while it serves already, from the first slot on. How
much it still has to take stands in the header, where every process sees it without asking.

It is a memfd: it has no name in any file system, so that nothing is left when all processes
that use it have died. Its size is sealed, so that no peer can cut it short under a copy.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import struct
from typing import Final, Self

from millpond.model.limits import (
    ARENA_HEADER_BYTES,
    FORMAT_VERSION,
    SLOT_ALIGNMENT_BYTES,
    SUMMED_BYTES_MIN,
)

_MAGIC: Final = b"MILLPOND"
_HEADER: Final = struct.Struct("<8sIIQQQ")
"""Magic, format version, header bytes, epoch, size bytes, extent bytes."""
_MISSING: Final = slice(_HEADER.size, _HEADER.size + 8)
"""Bytes at the end of the slot area that are not there yet; 0 where nobody says otherwise."""
_SUM_BYTES: Final = 8
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Arena:
    """A mapping of the shared segment into this process.

    The mapping is not inherited by forked children. Offsets are in bytes from the start of
    the slot area, as in leases. ``address`` is for copies that need a raw pointer: whoever
    uses it must have drained them before ``close``.
    """

    def __init__(
        self, mapping: mmap.mmap, *, size_bytes: int, epoch: int, extent_bytes: int
    ) -> None:
        self._mapping: mmap.mmap | None = mapping
        self.epoch = epoch
        self.extent_bytes = extent_bytes
        self.size_bytes = size_bytes
        self.total_bytes = size_bytes + _sums_bytes(size_bytes)
        """Bytes of the slots and their checksums."""
        end = ARENA_HEADER_BYTES + size_bytes
        self._view = memoryview(mapping)[ARENA_HEADER_BYTES:end]
        self._sums = memoryview(mapping)[end:].cast("Q")
        # Of native items, since these are written and read in one go.
        self._missing = memoryview(mapping)[_MISSING].cast("Q")
        self.address = _address(mapping) + ARENA_HEADER_BYTES
        """Where the slot area begins in this process."""

    @classmethod
    def create(cls, *, size_bytes: int, extent_bytes: int, epoch: int) -> tuple[Self, int]:
        """Make a segment of zeros; return its mapping and the descriptor to pass to peers.

        No memory is taken yet: ``touch`` does that. The caller owns the descriptor.
        """
        if size_bytes <= 0 or size_bytes % SLOT_ALIGNMENT_BYTES:
            raise ValueError(f"size {size_bytes} is not a multiple of {SLOT_ALIGNMENT_BYTES}")
        fd = os.memfd_create("millpond-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            num_bytes = segment_bytes(size_bytes)
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapping = _map(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        _HEADER.pack_into(
            mapping,
            0,
            _MAGIC,
            FORMAT_VERSION,
            ARENA_HEADER_BYTES,
            epoch,
            size_bytes,
            extent_bytes,
        )
        arena = cls(mapping, size_bytes=size_bytes, epoch=epoch, extent_bytes=extent_bytes)
        return arena, fd

    @classmethod
    def attach(cls, fd: int, *, expected_epoch: int) -> Self:
        """Map the segment behind ``fd``, which stays the caller's.

        Raises ``ValueError`` unless it is whole, sealed, and of the epoch that the daemon
        named in its welcome.
        """
        num_bytes = os.fstat(fd).st_size
        if num_bytes <= ARENA_HEADER_BYTES:
            raise ValueError(f"a segment of {num_bytes} bytes is no arena")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the segment is not sealed: its size could change under a copy")
        mapping = _map(fd, num_bytes)
        try:
            magic, version, header_bytes, epoch, size_bytes, extent_bytes = _HEADER.unpack_from(
                mapping
            )
            _check("magic", magic, _MAGIC)
            _check("format version", version, FORMAT_VERSION)
            _check("header bytes", header_bytes, ARENA_HEADER_BYTES)
            _check("epoch", epoch, expected_epoch)
            _check("size", segment_bytes(size_bytes), num_bytes)
        except ValueError:
            mapping.close()
            raise
        return cls(mapping, size_bytes=size_bytes, epoch=epoch, extent_bytes=extent_bytes)

    @property
    def usable_bytes(self) -> int:
        """Bytes from the start of the slot area whose memory is there; never becomes less.

        Nobody registers what lies beyond, or the driver would take it page by page.
        """
        return self.size_bytes - self._missing[0]

    def tell_usable(self, num_bytes: int) -> None:
        """Tell every process that maps the arena how much of it is there: the daemon's part."""
        if not 0 <= num_bytes <= self.size_bytes:
            raise ValueError(f"{num_bytes} bytes of an arena of {self.size_bytes}")
        self._missing[0] = self.size_bytes - num_bytes

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """Return the bytes at an offset, writable; keeps the mapping alive while it lives."""
        end = offset_bytes + num_bytes
        if not 0 <= offset_bytes <= end <= self.size_bytes:
            raise ValueError(
                f"bytes {offset_bytes} to {end} are not in an arena of {self.size_bytes}"
            )
        return self._view[offset_bytes:end]

    def sums(self, offset_bytes: int, first: int, num_sums: int) -> "memoryview[int]":
        """Return checksums ``first`` and on of the slot at an offset, writable; 0 is none.

        ``ValueError`` outside of the arena.
        """
        start = offset_bytes // SUMMED_BYTES_MIN + first
        if not 0 <= start <= start + num_sums <= len(self._sums):
            raise ValueError(f"sums {start} to {start + num_sums} are not of {len(self._sums)}")
        return self._sums[start : start + num_sums]

    def close(self) -> None:
        """Give up the mapping; it goes when the last view of it does. Idempotent."""
        self._view.release()
        self._sums.release()
        self._missing.release()
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # While a view is out there closing fails, and the last view unmaps it instead.
            with contextlib.suppress(BufferError):
                mapping.close()


def segment_bytes(size_bytes: int) -> int:
    """Return the bytes of a segment whose slot area has ``size_bytes``."""
    return ARENA_HEADER_BYTES + size_bytes + _sums_bytes(size_bytes)


def _sums_bytes(size_bytes: int) -> int:
    return size_bytes // SUMMED_BYTES_MIN * _SUM_BYTES


def _map(fd: int, num_bytes: int) -> mmap.mmap:
    mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    # A child that outlives its parent must not hold the arena: nobody would know its copies.
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _check(name: str, found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"arena {name} is {found!r}, expected {expected!r}")
