"""The arena: what is made is what is attached, and nothing else is."""

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from millpond.arena import touch as touch_module
from millpond.arena.arena import Arena, segment_bytes
from millpond.arena.touch import Touching, map_touched, touch
from millpond.model.errors import ArenaTooLarge
from millpond.model.limits import ARENA_HEADER_BYTES, MIB
from tests.waiting import eventually

SIZE = 40 * MIB
EXTENT = 4 * MIB
EPOCH = 2**62 + 7
PIECE = touch_module._PIECE_BYTES
WAIT_S = 10.0


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
        assert progress[-1] == arena.usable_bytes == SIZE
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


def test_a_peer_sees_how_much_is_there() -> None:
    with created() as (arena, fd):
        other = Arena.attach(fd, expected_epoch=EPOCH)
        assert other.usable_bytes == SIZE  # nobody has said otherwise
        for num_bytes in (0, 5 * MIB, SIZE):
            arena.tell_usable(num_bytes)
            assert other.usable_bytes == num_bytes
        assert os.pread(fd, 8, 40) == bytes(8)
        for wrong in (-1, SIZE + 1):
            with pytest.raises(ValueError, match=str(wrong)):
                arena.tell_usable(wrong)
        other.close()


class Populating:
    """Stands for the kernel: a piece can be held up, or refused; notes what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[int] = []
        self.held: dict[int, threading.Event] = {}
        self.refused: set[int] = set()
        monkeypatch.setattr(touch_module, "_populate", self._populate)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})

    def hold(self, start: int) -> Callable[[], None]:
        self.held[start] = threading.Event()
        return self.held[start].set

    def _populate(self, _arena: Arena, _fd: int, start: int, _num_bytes: int) -> None:
        self.asked.append(start)
        if start in self.held:
            assert self.held[start].wait(WAIT_S)
        if start in self.refused:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.fixture
def populating(monkeypatch: pytest.MonkeyPatch) -> Populating:
    return Populating(monkeypatch)


def wait_for(touching: Touching, num_bytes: int) -> None:
    assert touching.wait(num_bytes, stop=threading.Event(), on_progress=lambda _: None)


def has_news(touching: Touching, timeout_s: float = WAIT_S) -> bool:
    return bool(select.select([touching.news_fd], [], [], timeout_s)[0])


def test_memory_counts_once_none_is_missing_before_it(populating: Populating) -> None:
    release = populating.hold(PIECE)
    with created() as (arena, fd), closing(Touching(arena, fd)) as touching:
        wait_for(touching, PIECE)
        eventually(lambda: 2 * PIECE in populating.asked, "the next piece", timeout_s=WAIT_S)
        eventually(lambda: touching._num_running == 1, "and it is done", timeout_s=WAIT_S)
        assert touching.touched_bytes == arena.usable_bytes == PIECE
        release()
        wait_for(touching, SIZE)
        assert touching.touched_bytes == arena.usable_bytes == SIZE


def test_no_slot_counts_before_the_checksums(populating: Populating) -> None:
    release = populating.hold(SIZE)
    with created() as (arena, fd), closing(Touching(arena, fd)) as touching:
        eventually(lambda: touching._num_running == 1, "all slots are done", timeout_s=WAIT_S)
        assert arena.usable_bytes == 0
        release()
        wait_for(touching, SIZE)


def test_there_is_news_of_extents_and_of_the_end(populating: Populating) -> None:
    releases = [populating.hold(start) for start in (0, PIECE, 2 * PIECE)]
    with created() as (arena, fd), closing(Touching(arena, fd)) as touching:
        for release, touched_bytes in zip(releases[:2], (PIECE, 2 * PIECE), strict=True):
            assert not has_news(touching, timeout_s=0)
            release()
            assert has_news(touching)
            touching.take_news()
            assert touching.touched_bytes == touched_bytes
        touching.take_news()  # without news it waits for nothing
        releases[2]()
        wait_for(touching, SIZE)
        assert has_news(touching)


def test_memory_that_runs_out_later_leaves_what_was_there(populating: Populating) -> None:
    populating.refused.add(2 * PIECE)
    release = populating.hold(PIECE)
    with created() as (arena, fd), closing(Touching(arena, fd)) as touching:
        wait_for(touching, PIECE)
        eventually(lambda: touching._num_running == 1, "one has failed", timeout_s=WAIT_S)
        assert touching.failure is None  # what had been begun before may still count
        release()
        eventually(lambda: touching.failure is not None, "it is over", timeout_s=WAIT_S)
        assert arena.usable_bytes == 2 * PIECE
        assert f"gave {2 * PIECE // MIB} MiB of 40 MiB" in str(touching.failure)
        wait_for(touching, 2 * PIECE)
        with pytest.raises(ArenaTooLarge):
            wait_for(touching, SIZE)


def test_a_touching_that_is_closed_begins_nothing_more(populating: Populating) -> None:
    release = populating.hold(0)
    held = populating.hold(PIECE)
    with created() as (arena, fd):
        touching = Touching(arena, fd)
        eventually(lambda: PIECE in populating.asked, "both threads are busy", timeout_s=WAIT_S)
        closing_thread = threading.Thread(target=touching.close)
        closing_thread.start()
        eventually(lambda: touching._is_halted, "it is being closed", timeout_s=WAIT_S)
        release()
        held()
        closing_thread.join(WAIT_S)
        assert not closing_thread.is_alive()
        assert sorted(populating.asked) == [0, PIECE, SIZE]


def test_memory_that_another_mapping_touched_is_mapped_by_few_faults() -> None:
    with created() as (arena, fd):
        touch(arena, fd, stop=threading.Event(), on_progress=lambda _: None)
        allocated = allocated_bytes(fd)
        other = Arena.attach(fd, expected_epoch=EPOCH)
        with closing(other):
            before = resident_bytes(other.address)
            map_touched(other, EXTENT, 2 * EXTENT)
            mapped = resident_bytes(other.address) - before
            assert 2 * EXTENT <= mapped < 3 * EXTENT  # a fault maps its neighbours as well
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            map_touched(other, 0, SIZE)
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults
            assert resident_bytes(other.address) >= SIZE
            assert faults < (SIZE - mapped) // mmap.PAGESIZE // 4, "of a write there is one a page"
        assert allocated_bytes(fd) == allocated


def test_a_kernel_that_maps_nothing_at_once_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch_module, "_MADV_POPULATE_READ", 12345)
    with created() as (arena, _):
        map_touched(arena, 0, SIZE)


def resident_bytes(address: int) -> int:
    """Return how much is mapped of the mapping that holds ``address``."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", _smaps(), flags=re.MULTILINE)
    for block in filter(None, blocks):
        start, _, stop = block.partition(" ")[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return int(re.findall(r"^Rss: +(\d+) kB", block, flags=re.MULTILINE)[0]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


def _smaps() -> str:
    with open("/proc/self/smaps") as maps:  # noqa: PTH123
        return maps.read()


def _mappings() -> str:
    with open("/proc/self/maps") as maps:  # noqa: PTH123
        return maps.read()


def test_page_size_divides_the_header() -> None:
    assert ARENA_HEADER_BYTES % mmap.PAGESIZE == 0
