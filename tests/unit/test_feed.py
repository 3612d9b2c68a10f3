"""How many copies the driver holds at a time, and what is waited for (events are a seam)."""

import numpy as np
import pytest

from millpond.transfer import cudart, feed
from millpond.transfer.feed import COPIES_MAX, Feed


class FakeEvent:
    """Passed once the test says so, or somebody waits for it."""

    made: "list[FakeEvent]" = []  # noqa: RUF012 - emptied by each test

    def __init__(self, *, blocking: bool) -> None:
        assert blocking
        self.is_passed = False
        self.num_waits = 0
        FakeEvent.made.append(self)

    def record(self, _stream: object) -> None: ...

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.num_waits += 1
        for event in FakeEvent.made[: FakeEvent.made.index(self) + 1]:
            event.is_passed = True


class FakeStream:
    cuda_stream = 7


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The copies of each call of the driver."""
    calls: list[int] = []
    FakeEvent.made = []
    monkeypatch.setattr(feed.torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(cudart, "has_batch_copy", lambda: True)
    monkeypatch.setattr(cudart, "copy_batch", lambda _s, _t, lengths, _: calls.append(len(lengths)))
    return calls


def put(way: Feed, num_copies: int) -> None:
    nothing = np.zeros(num_copies, np.uint64)
    way.copy(nothing, nothing, nothing)


def test_nothing_is_waited_for_while_there_is_room_and_then_the_oldest(sizes: list[int]) -> None:
    way = Feed(FakeStream())  # type: ignore[arg-type]
    while way.awaited(100, COPIES_MAX) is None:
        put(way, 100)
    assert sum(sizes) == COPIES_MAX // 100 * 100
    assert way.awaited(100, COPIES_MAX) is FakeEvent.made[0]
    FakeEvent.made[0].is_passed = True
    assert way.awaited(100, COPIES_MAX) is None
    assert way.awaited(300, COPIES_MAX) is FakeEvent.made[1]
    assert not any(event.num_waits for event in FakeEvent.made)


def test_less_room_is_waited_for_in_the_same_way(sizes: list[int]) -> None:
    way = Feed(FakeStream())  # type: ignore[arg-type]
    put(way, 100)
    put(way, 100)
    assert sizes == [100, 100]
    assert way.awaited(100, 300) is None
    assert way.awaited(101, 300) is FakeEvent.made[0]


@pytest.mark.usefixtures("sizes")
def test_a_portion_that_never_fits_goes_onto_an_empty_stream() -> None:
    """Or it would wait for ever."""
    way = Feed(FakeStream())  # type: ignore[arg-type]
    assert way.awaited(COPIES_MAX + 1, COPIES_MAX) is None
    put(way, 1)
    assert way.awaited(COPIES_MAX + 1, COPIES_MAX) is FakeEvent.made[0]
    FakeEvent.made[0].is_passed = True
    assert way.awaited(COPIES_MAX + 1, COPIES_MAX) is None
