"""The CUDA copy engine keeps its edges under an imposed delay, and the test can see it fail."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

if torch.cuda.is_available():
    from millpond.arena.arena import Arena
    from millpond.transfer import Copies, Direction, Ends
    from millpond.transfer.cuda import CudaDevice, CudaEvent
    from millpond.transfer.routes import Route, Routes
    from millpond.transfer.streams import StreamCopyEngine

NUM_BYTES = 96 * 2**20
"""More than the buffer of the staged route: its pieces are used again."""
PAGE = 64 * 2**10
ORDER = np.random.default_rng(0).permutation(NUM_BYTES // PAGE)
"""Page ORDER[i] of the GPU belongs to page i of the host."""
SPIN_CYCLES = 300_000_000
"""About 0.15 s on the device: a producer that is late."""
WAIT_S = 60.0


@pytest.fixture(params=["batch", "loop", "staged", "kernel"])
def engine(request: pytest.FixtureRequest) -> "Iterator[tuple[StreamCopyEngine, Arena]]":
    arena, _ = Arena.create(size_bytes=NUM_BYTES, extent_bytes=NUM_BYTES, epoch=1)
    device = CudaDevice(torch.device("cuda", 0), routes=Routes.only(Route(request.param)))
    made = StreamCopyEngine(device)
    made.adopt(arena)
    registered = device.registration
    assert registered is not None
    assert registered.wait(WAIT_S)
    # Load the kernel and every library before anything is timed or delayed.
    gpu = torch.zeros(NUM_BYTES // 8, dtype=torch.int64, device="cuda")
    for direction in Direction:
        warm = threading.Event()
        made.submit(
            direction,
            pages(direction, arena, gpu),
            after=made.fence(),
            keep_alive=arena,
            ends=Ends(lambda _, warm=warm: warm.set()),
        )
        assert warm.wait(WAIT_S)
    yield made, arena
    assert made.close(WAIT_S)


def words(seed: int) -> np.ndarray:
    """Return a pattern in which each 64-bit word differs from all others and by seed."""
    return np.arange(NUM_BYTES // 8, dtype=np.int64) + np.int64(seed) * 2**40


def stored(gpu: np.ndarray) -> np.ndarray:
    """Return what the host holds after a store of the GPU's words."""
    return gpu.reshape(len(ORDER), -1)[ORDER].ravel()


def loaded(host_words: np.ndarray) -> np.ndarray:
    """Return what the GPU holds after a load of the host's words."""
    pages_ = np.empty_like(host_words).reshape(len(ORDER), -1)
    pages_[ORDER] = host_words.reshape(len(ORDER), -1)
    return pages_.ravel()


def host(arena: "Arena") -> np.ndarray:
    return np.frombuffer(arena.view(0, NUM_BYTES), np.int64)


def pages(direction: "Direction", arena: "Arena", gpu: "torch.Tensor") -> "Copies":
    starts = np.arange(0, NUM_BYTES, PAGE, dtype=np.uint64)
    ends = (np.uint64(gpu.data_ptr()) + starts[ORDER], np.uint64(arena.address) + starts)
    if direction is Direction.LOAD:
        ends = ends[::-1]
    return Copies(*ends, np.full(len(starts), PAGE, np.uint64))


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "control"])
def test_a_store_waits_for_a_late_producer(engine: object, is_ordered: bool) -> None:
    copier, arena = engine
    gpu = torch.from_numpy(words(1)).cuda()
    late = torch.from_numpy(words(2)).cuda()
    early = CudaEvent(torch.cuda.Event())
    early.event.record()
    torch.cuda.synchronize()
    done = threading.Event()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        gpu.copy_(late)
        copier.submit(
            Direction.STORE,
            pages(Direction.STORE, arena, gpu),
            after=copier.fence() if is_ordered else early,
            keep_alive=arena,
            ends=Ends(lambda _: done.set()),
        )
    assert done.wait(WAIT_S)
    # The bytes at the moment of "done", not later.
    seen = host(arena).copy()
    torch.cuda.synchronize()
    new, old = stored(words(2)), stored(words(1))
    assert (seen == new).all() == is_ordered
    assert ((seen == old) | (seen == new)).all()


@pytest.mark.parametrize("is_ordered", [True, False], ids=["ordered", "control"])
def test_a_load_waits_for_a_late_reader_and_is_done_when_it_says_so(
    engine: object, is_ordered: bool
) -> None:
    copier, arena = engine
    host(arena)[:] = words(2)
    gpu = torch.from_numpy(words(1)).cuda()
    read = torch.zeros_like(gpu)
    early = CudaEvent(torch.cuda.Event())
    early.event.record()
    torch.cuda.synchronize()
    done = threading.Event()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SPIN_CYCLES)
        read.copy_(gpu)  # the last use of the pages that are about to be overwritten
        copier.submit(
            Direction.LOAD,
            pages(Direction.LOAD, arena, gpu),
            after=copier.fence() if is_ordered else early,
            keep_alive=arena,
            ends=Ends(lambda _: done.set()),
        )
    assert done.wait(WAIT_S)
    with torch.cuda.stream(torch.cuda.Stream()):
        arrived = gpu.cpu().numpy()
    assert (arrived == loaded(words(2))).all()
    torch.cuda.synchronize()
    assert bool((read.cpu().numpy() == words(1)).all()) == is_ordered


def test_submitting_does_not_wait_for_the_device(engine: object) -> None:
    copier, arena = engine
    gpu = torch.from_numpy(words(1)).cuda()
    torch.cuda.synchronize()
    done = threading.Event()
    torch.cuda._sleep(SPIN_CYCLES)
    fence = copier.fence()
    copier.submit(
        Direction.STORE,
        pages(Direction.STORE, arena, gpu),
        after=fence,
        keep_alive=arena,
        ends=Ends(lambda _: done.set()),
    )
    assert not fence.is_passed()
    assert not done.is_set()
    assert done.wait(WAIT_S)
