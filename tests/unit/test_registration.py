"""The arena is registered in the background, piece by piece (CUDA's calls are a seam)."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.model.limits import GIB
from millpond.transfer import cudart, registration
from millpond.transfer.registration import Registration
from tests.waiting import eventually

WAIT_S = 10.0
SIZE = 3 * GIB  # three pieces


class Driver:
    """What is registered; a piece can be held up, or refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registered: set[int] = set()
        self.mapped: set[int] = set()
        self.refused: set[int] = set()
        self.held: dict[int, threading.Event] = {}
        self.asked = threading.Event()
        monkeypatch.setattr(registration, "map_touched", self._map)
        monkeypatch.setattr(cudart, "register_host", self._register)
        monkeypatch.setattr(cudart, "unregister_host", self.registered.remove)

    def _map(self, _arena: object, start: int, _num_bytes: int) -> None:
        self.mapped.add(start)

    def _register(self, address: int, _num_bytes: int) -> None:
        assert address in self.mapped, "page by page, while nobody can launch a kernel"
        if address in self.refused:
            raise cudart.CudaFailed("no room")
        if address in self.held:
            self.asked.set()
            assert self.held[address].wait(WAIT_S)
        self.registered.add(address)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def register(usable_bytes: int = SIZE, **calls: Any) -> Registration:  # noqa: ANN401
    arena: Any = SimpleNamespace(
        address=0, size_bytes=SIZE, usable_bytes=usable_bytes, extent_bytes=GIB
    )
    nothing: Any = lambda *_: None  # noqa: E731
    usual = {"prepare": nothing, "on_first": nothing, "on_failure": nothing}
    usual["is_busy"] = lambda: False
    return Registration(arena, **(usual | calls))


def test_the_first_piece_counts_once_it_has_been_told_of(driver: Driver) -> None:
    counted: list[bool] = []
    made: list[Registration] = []
    may_tell = threading.Event()

    def on_first() -> None:
        assert may_tell.wait(WAIT_S)
        counted.append(made[0].covers(GIB))

    made.append(register(on_first=on_first))
    may_tell.set()
    assert made[0].wait(WAIT_S)
    assert counted == [False]
    assert driver.registered == {0, GIB, 2 * GIB}
    made[0].undo(WAIT_S)
    assert driver.registered == set()
    assert not made[0].covers(1)


def test_a_piece_that_is_refused_is_told_of_and_what_lies_before_it_serves(driver: Driver) -> None:
    driver.refused.add(2 * GIB)
    told: list[str] = []
    made = register(on_failure=told.append)
    assert not made.wait(WAIT_S)
    assert made.covers(2 * GIB)
    assert not made.covers(2 * GIB + 1)
    assert "1 GiB at 2 GiB not registered: no room; raise the limit" in told[0]


def test_a_thread_that_cannot_begin_is_told_of(driver: Driver) -> None:
    told: list[str] = []

    def prepare() -> None:
        raise OSError("no device")

    made = register(prepare=prepare, on_failure=told.append)
    assert not made.wait(WAIT_S)
    assert "no device" in told[0]
    assert driver.registered == set()


def test_a_device_that_others_use_is_left_to_them_as_long_as_a_piece_took(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = [0.0]

    def register_for_an_hour(address: int, _num_bytes: int) -> None:
        late_s[0] += 3600.0
        driver.registered.add(address)

    monkeypatch.setattr(cudart, "register_host", register_for_an_hour)
    monkeypatch.setattr(registration, "time", SimpleNamespace(monotonic=lambda: late_s[0]))
    made = register(is_busy=lambda: True)
    assert not made.wait(0.3)
    assert driver.registered == {0}  # nor does the other thread fill the pause
    made.undo(WAIT_S)  # and the pause is over
    assert driver.registered == set()


def test_a_piece_in_progress_while_it_is_undone_undoes_itself(driver: Driver) -> None:
    driver.held[GIB] = threading.Event()
    made = register()
    assert driver.asked.wait(WAIT_S)
    made.undo(0.0)
    driver.held[GIB].set()
    made.wait(WAIT_S)
    assert driver.registered == set()


def test_a_piece_is_registered_once_all_its_memory_is_there(driver: Driver) -> None:
    made = register(usable_bytes=2 * GIB - 1)
    arena: Any = made.arena
    eventually(lambda: made.covers(GIB), "the first", timeout_s=WAIT_S)
    assert not made.wait(0.2)
    assert driver.registered == {0}
    arena.usable_bytes = 2 * GIB
    eventually(lambda: made.covers(2 * GIB), "the second", timeout_s=WAIT_S)
    assert driver.registered == {0, GIB}
    arena.usable_bytes = SIZE
    assert made.wait(WAIT_S)


def test_who_waits_for_memory_stops_at_once(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_POLL_S", 3600.0)
    made = register(usable_bytes=GIB)
    eventually(lambda: made.covers(GIB), "the first", timeout_s=WAIT_S)
    made.undo(WAIT_S)
    assert not any(thread.is_alive() for thread in made._threads)
    assert driver.registered == set()


def test_who_waits_for_memory_hears_that_registration_failed(driver: Driver) -> None:
    driver.refused.add(0)
    made = register(usable_bytes=GIB)
    assert not made.wait(WAIT_S)
    assert not any(thread.is_alive() for thread in made._threads)
