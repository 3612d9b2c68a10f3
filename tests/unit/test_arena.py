"""The arena: what is made is what is attached, and nothing else is."""

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from millpond.arena import touch as touch_module
from millpond.arena.arena import Arena, segment_bytes
from millpond.arena.touch import touch
from millpond.model.errors import ArenaTooLarge
from millpond.model.limits import ARENA_HEADER_BYTES, MIB

SIZE = 40 * MIB
EXTENT = 4 * MIB
EPOCH = 2**62 + 7


@contextmanager
def created(size_bytes: int = SIZE) -> Iterator[tuple[Arena, int]]:
    arena, fd = Arena.create(size_bytes=size_bytes, extent_bytes=EXTENT, epoch=EPOCH)
    try:
        yield arena, fd
    finally:
        arena.close()
        os.close(fd)


@contextmanager
def memfd(num_bytes: int) -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    try:
        yield fd
    finally:
        os.close(fd)


def allocated_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def test_attached_mapping_shows_the_same_bytes() -> None:
    with created() as (arena, fd):
        other = Arena.attach(fd, expected_epoch=EPOCH)
        assert (other.size_bytes, other.extent_bytes, other.epoch) == (SIZE, EXTENT, EPOCH)
        arena.view(5 * MIB, 4)[:] = b"pond"
        assert bytes(other.view(5 * MIB, 4)) == b"pond"
        assert other.address != arena.address
        assert ctypes.string_at(other.address + 5 * MIB, 4) == b"pond"
        other.close()


def test_slots_begin_after_the_header() -> None:
    with created() as (arena, fd):
        arena.view(0, 4)[:] = b"slot"
        assert os.pread(fd, 4, ARENA_HEADER_BYTES) == b"slot"
        assert os.pread(fd, 8, 0) == b"MILLPOND"


def test_creation_takes_no_memory_for_slots() -> None:
    with created() as (_, fd):
        assert allocated_bytes(fd) <= ARENA_HEADER_BYTES


@pytest.mark.parametrize("size_bytes", [0, -4096, 4097])
def test_size_must_be_a_multiple_of_pages(size_bytes: int) -> None:
    with pytest.raises(ValueError, match=str(size_bytes)):
        Arena.create(size_bytes=size_bytes, extent_bytes=EXTENT, epoch=EPOCH)


@pytest.mark.parametrize("new_bytes", [SIZE // 2, SIZE * 2])
def test_size_is_sealed(new_bytes: int) -> None:
    with created() as (_, fd), pytest.raises(PermissionError):
        os.ftruncate(fd, new_bytes)


@pytest.mark.parametrize(
    ("field", "offset"),
    [("magic", 0), ("format version", 8), ("header bytes", 12), ("epoch", 16), ("size", 24)],
)
def test_attach_refuses_a_header_that_differs(field: str, offset: int) -> None:
    with created() as (_, fd):
        byte = os.pread(fd, 1, offset)[0]
        os.pwrite(fd, bytes([byte ^ 1]), offset)
        with pytest.raises(ValueError, match=field):
            Arena.attach(fd, expected_epoch=EPOCH)


def test_attach_refuses_an_unsealed_segment() -> None:
    with created() as (_, fd), memfd(segment_bytes(SIZE)) as copy:
        os.pwrite(copy, os.pread(fd, 4096, 0), 0)
        with pytest.raises(ValueError, match="sealed"):
            Arena.attach(copy, expected_epoch=EPOCH)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, seals)
        Arena.attach(copy, expected_epoch=EPOCH).close()


def test_attach_refuses_a_segment_that_is_too_small() -> None:
    with memfd(ARENA_HEADER_BYTES) as fd, pytest.raises(ValueError, match="no arena"):
        Arena.attach(fd, expected_epoch=EPOCH)


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 4), (SIZE - 3, 4), (0, -1), (SIZE + 1, 0)])
def test_views_stay_inside(offset: int, num_bytes: int) -> None:
    with created() as (arena, _), pytest.raises(ValueError, match="not in an arena"):
        arena.view(offset, num_bytes)


def test_mapping_outlives_close_while_a_view_is_left() -> None:
    with created() as (_, fd):
        arena = Arena.attach(fd, expected_epoch=EPOCH)
        view = arena.view(0, 4)
        arena.close()
        arena.close()
        view[:] = b"late"
        assert os.pread(fd, 4, ARENA_HEADER_BYTES) == b"late"


def test_close_unmaps() -> None:
    arena, fd = Arena.create(size_bytes=SIZE, extent_bytes=EXTENT, epoch=EPOCH)
    os.close(fd)
    assert "memfd:millpond-arena" in _mappings()
    arena.close()
    assert "memfd:millpond-arena" not in _mappings()


def test_touch_takes_all_memory_and_tells_how_far_it_is() -> None:
    with created() as (arena, fd):
        progress: list[int] = []
        assert touch(arena, fd, stop=threading.Event(), on_progress=progress.append)
        assert progress == sorted(progress)
        assert progress[-1] == arena.total_bytes
        assert allocated_bytes(fd) >= arena.total_bytes > SIZE


def test_touch_falls_back_where_the_kernel_cannot_populate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def madvise(address: int, num_bytes: int, advice: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(touch_module._LIBC, "madvise", madvise)
    with created() as (arena, fd):
        assert touch(arena, fd, stop=threading.Event(), on_progress=lambda _: None)
        assert allocated_bytes(fd) >= SIZE


def test_touch_stops_early() -> None:
    with created() as (arena, fd):
        stop = threading.Event()
        assert not touch(arena, fd, stop=stop, on_progress=lambda _: stop.set())
        assert stop.is_set()


def test_stop_before_touch_takes_nothing_back() -> None:
    with created() as (arena, fd):
        stop = threading.Event()
        stop.set()
        progress: list[int] = []
        assert not touch(arena, fd, stop=stop, on_progress=progress.append)
        assert progress == []


def test_touch_without_memory_is_an_error_with_both_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def populate(arena: Arena, fd: int, start: int, num_bytes: int) -> None:
        if start >= 16 * MIB:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(touch_module, "_populate", populate)
    with created() as (arena, fd), pytest.raises(ArenaTooLarge, match="of 40 MiB") as caught:
        touch(arena, fd, stop=threading.Event(), on_progress=lambda _: None)
    assert caught.value.wanted_bytes == arena.total_bytes
    assert caught.value.available_bytes <= 16 * MIB


def test_touch_leaves_no_thread_when_progress_fails() -> None:
    def fail(done_bytes: int) -> None:
        raise KeyboardInterrupt

    with created() as (arena, fd), pytest.raises(KeyboardInterrupt):
        touch(arena, fd, stop=threading.Event(), on_progress=fail)
    assert not [thread for thread in threading.enumerate() if thread.name == "millpond-touch"]


def _mappings() -> str:
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        return maps.read()


def test_page_size_divides_the_header() -> None:
    assert ARENA_HEADER_BYTES % mmap.PAGESIZE == 0
