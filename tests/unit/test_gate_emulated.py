"""The emulated device means what CUDA means: who waits for whom, and who goes first."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from millpond.gate.device import Size, Where
from millpond.gate.emulated import EmulatedDevice, EmulatedStream, current_stream
from millpond.gate.patterns import Epoch, Rows, compare, pattern
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.routes import Route
from tests.waiting import eventually

WAIT_S = 10.0
LONG_S = 30.0


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    made = EmulatedDevice()
    yield made
    made.close()


def ran(stream: EmulatedStream) -> threading.Event:
    """Return an event that is set when the stream gets to it."""
    done = threading.Event()
    stream.enqueue(done.set)
    return done


def settled(*streams: EmulatedStream) -> None:
    """Wait until each stream has had every chance to run what it does not hold back."""
    for stream in streams:
        passed = threading.Event()
        stream.append(passed.set)
        assert passed.wait(WAIT_S)


def test_work_on_a_stream_is_in_order(device: EmulatedDevice) -> None:
    stream = device.make_stream("one")
    seen: list[int] = []
    for number in range(100):
        stream.enqueue(lambda number=number: seen.append(number))
    assert ran(stream).wait(WAIT_S)
    assert seen == list(range(100))


def test_non_blocking_streams_do_not_wait_for_the_legacy_stream(device: EmulatedDevice) -> None:
    with device.on(Where.LEGACY):
        hold = device.hold(LONG_S)
    for where in (Where.WORK, Where.OTHER):
        with device.on(where):
            assert ran(current_stream()).wait(WAIT_S)
    assert not hold.is_open()
    hold.release()


def test_the_legacy_stream_does_not_wait_for_non_blocking_streams(device: EmulatedDevice) -> None:
    with device.on(Where.WORK):
        hold = device.hold(LONG_S)
    with device.on(Where.LEGACY):
        assert ran(current_stream()).wait(WAIT_S)
    assert not hold.is_open()
    hold.release()


def test_blocking_streams_and_the_legacy_stream_wait_for_each_other(
    device: EmulatedDevice,
) -> None:
    blocking = device.make_stream("blocking", blocking=True)
    with device.on(Where.LEGACY):
        hold = device.hold(LONG_S)
    behind = ran(blocking)
    settled(device.make_stream("bystander"))
    assert not behind.is_set()
    hold.release()
    assert behind.wait(WAIT_S)
    gate = threading.Event()
    blocking.enqueue(lambda: gate.wait(LONG_S))
    legacy = ran(device.legacy)
    settled(device.make_stream("bystander"))
    assert not legacy.is_set()
    gate.set()
    assert legacy.wait(WAIT_S)


def test_a_stream_waits_for_an_event_of_another(device: EmulatedDevice) -> None:
    one, two = device.make_stream("one"), device.make_stream("two")
    gate = threading.Event()
    one.enqueue(lambda: gate.wait(LONG_S))
    event = one.record()
    two.wait_for(event)
    behind = ran(two)
    assert not event.is_passed()
    assert not behind.is_set()
    gate.set()
    assert behind.wait(WAIT_S)
    assert event.is_passed()


def test_a_fence_is_behind_the_current_stream_of_its_thread(device: EmulatedDevice) -> None:
    copier = device.copier(Route.LOOP)
    with device.on(Where.WORK):
        hold = device.hold(LONG_S)
        held = copier.fence()
        others: list[bool] = []

        def elsewhere() -> None:
            fence = copier.fence()  # of a thread without a current stream: the legacy one
            eventually(fence.is_passed, "the legacy stream is free", timeout_s=WAIT_S)
            others.append(fence.is_passed())

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(WAIT_S)
    assert others == [True]
    assert not held.is_passed()
    hold.release()
    eventually(held.is_passed, "the hold was released", timeout_s=WAIT_S)


def test_outside_of_a_test_no_stream_is_current(device: EmulatedDevice) -> None:
    with pytest.raises(LookupError):
        current_stream()
    with device.on(Where.OTHER), device.on(Where.WORK):
        inner = current_stream()
    with device.on(Where.WORK):
        assert current_stream() is inner
    with pytest.raises(LookupError):
        current_stream()


def test_a_hold_ends_by_itself_when_its_time_is_over(device: EmulatedDevice) -> None:
    with device.on(Where.WORK):
        hold = device.hold(0.01)
        point = device.point()
    eventually(point.is_passed, "the hold's time is over", timeout_s=WAIT_S)
    assert hold.is_open()


def test_loads_take_the_copy_engine_before_stores_that_wait_longer(device: EmulatedDevice) -> None:
    order: list[str] = []
    port, queued = device.port, threading.Event()

    def take(name: str, priority: int) -> None:
        with port.taken(priority):
            order.append(name)

    threads = [threading.Thread(target=take, args=each) for each in (("store", 0), ("load", -1))]
    with port.taken(0):
        for number, thread in enumerate(threads, start=1):
            thread.start()
            eventually(
                lambda number=number: len(port._waiting) == number, "queued", timeout_s=WAIT_S
            )
        queued.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["load", "store"]


def one_copy(source: np.ndarray, target: np.ndarray) -> Copies:
    one = lambda value: np.asarray([value], np.uint64)  # noqa: E731
    return Copies(one(source.ctypes.data), one(target.ctypes.data), one(source.nbytes))


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "given up"])
def test_a_table_that_is_given_up_too_early_sends_the_copy_elsewhere(
    device: EmulatedDevice, is_kept: bool
) -> None:
    source = pattern([5], 4096, Epoch.NEW)
    target = np.zeros_like(source)
    stream = device.copier(Route.LOOP).stream(Direction.STORE)
    with device.on(Where.WORK):
        hold = device.hold(LONG_S)
        stream.wait_for(device.point())
    staged: object = stream.copy(one_copy(source, target))
    if not is_kept:
        staged = None
    hold.release()
    stream.record().wait()
    assert compare(target, Rows((5,), Epoch.NEW)).is_right == is_kept
    del staged


def test_bytes_are_read_and_written_whatever_the_streams_do(device: EmulatedDevice) -> None:
    pages = device.make_pages(Size(2, 64))
    with device.on(Where.WORK):
        hold = device.hold(LONG_S)
    device.write(pages, pattern([1, 2], 64, Epoch.OLD))
    assert (device.read(pages) == pattern([1, 2], 64, Epoch.OLD)).all()
    assert not hold.is_open()
    hold.release()


def test_there_is_one_route_without_a_gpu(device: EmulatedDevice) -> None:
    assert {route for route, _ in device.routes} == {Route.LOOP}
    with pytest.raises(ValueError, match="kernel"):
        device.copier(Route.KERNEL)


def test_both_ways_onto_a_stream_are_taken(device: EmulatedDevice) -> None:
    """Some copies find room behind a fence that is not passed, more have to wait for it."""
    stream = device.copier(Route.LOOP).stream(Direction.STORE)
    with device.on(Where.WORK):
        hold = device.hold(LONG_S)
        fence = device.copier(Route.LOOP).fence()
    waits: list[bool] = []
    for _, size in device.routes:
        nothing = np.zeros(size.num_pages * 2 // 3, np.uint64)
        copies = Copies(nothing, nothing, nothing)
        stream.wait_for(fence)
        rooms: list[bool] = []
        for start in range(0, len(nothing), stream.portion(copies)):
            some = copies.part(slice(start, start + stream.portion(copies)))
            rooms.append(stream.awaited(some) is None)
            stream.copy(some)
        waits.append(not all(rooms))
    hold.release()
    assert stream.close(LONG_S)
    assert waits == [False, True]
