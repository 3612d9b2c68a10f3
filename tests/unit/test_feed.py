"""How many copies the driver holds at a time, and who waits for room (events are a seam)."""

import numpy as np
import pytest

from millpond.transfer import cudart, feed
from millpond.transfer.feed import COPIES_MAX, PORTION_COPIES, Feed


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


def test_copies_go_in_portions_and_nobody_waits_while_there_is_room(sizes: list[int]) -> None:
    way = Feed(FakeStream())  # type: ignore[arg-type]
    put(way, 2 * PORTION_COPIES + 5)
    assert sizes == [PORTION_COPIES, PORTION_COPIES, 5]
    assert [event.num_waits for event in FakeEvent.made] == [0, 0, 0]


def test_who_has_more_than_there_is_room_for_waits_for_the_oldest(sizes: list[int]) -> None:
    way = Feed(FakeStream())  # type: ignore[arg-type]
    put(way, COPIES_MAX + 1)
    assert sum(sizes) == COPIES_MAX + 1
    assert [event.num_waits for event in FakeEvent.made] == [1] + [0] * (len(sizes) - 1)


def test_small_submissions_behind_a_fence_fill_it_too(sizes: list[int]) -> None:
    """Each asks first: who may not wait hands its copies to a thread that may."""
    way = Feed(FakeStream())  # type: ignore[arg-type]
    while way.has_room(100):
        put(way, 100)
    assert sum(sizes) == COPIES_MAX // 100 * 100
    assert not any(event.num_waits for event in FakeEvent.made)
    FakeEvent.made[0].is_passed = True
    assert way.has_room(100)
