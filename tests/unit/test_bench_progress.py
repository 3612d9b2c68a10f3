"""The time that a run has left, by a clock that the test moves."""

import time

import pytest

from millpond.bench.periods import Doing, _Progress, plan_periods
from millpond.bench.scenario import Design

PLANS = plan_periods(Design(rounds=1, aa_rounds=0), ["off", "millpond"])
START_S, MEASURE_S, NUM_REQUESTS = 30.0, 60.0, 20


class Clock:
    """Stands still unless it is moved."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def run_period(progress: _Progress, clock: Clock, number: int, *, num_sent: int) -> None:
    """Start for 30 s, and send a request every 3 s."""
    progress.begin(PLANS[number], NUM_REQUESTS)
    clock.now_s += START_S
    progress.show("warming up")
    for i in range(1, num_sent + 1):
        clock.now_s += MEASURE_S / NUM_REQUESTS
        progress.show("measuring", num_sent=i)


def test_nothing_is_told_before_a_tenth_of_the_first_period(clock: Clock) -> None:
    seen: list[Doing] = []
    run_period(_Progress(seen.append, 4, 4), clock, 0, num_sent=1)
    assert [doing.left_s for doing in seen] == [None] * 3


def test_the_first_period_tells_by_its_own_speed(clock: Clock) -> None:
    seen: list[Doing] = []
    run_period(_Progress(seen.append, 4, 4), clock, 0, num_sent=10)
    assert seen[-1].left_s == pytest.approx(MEASURE_S / 2 + 3 * (START_S + MEASURE_S))


def test_later_ones_tell_by_those_before(clock: Clock) -> None:
    seen: list[Doing] = []
    progress = _Progress(seen.append, 4, 4)
    for number in range(3):
        run_period(progress, clock, number, num_sent=NUM_REQUESTS)
    run_period(progress, clock, 3, num_sent=15)
    assert seen[-1].left_s == pytest.approx(MEASURE_S / 4)
    clock.now_s += 1000.0
    progress.show("measuring", num_sent=16)
    assert seen[-1].left_s == 0.0, "a period that takes longer is nearly done"


def test_a_resumed_run_counts_what_is_left_of_it(clock: Clock) -> None:
    seen: list[Doing] = []
    run_period(_Progress(seen.append, 4, 2), clock, 2, num_sent=10)
    assert seen[-1].left_s == pytest.approx(MEASURE_S / 2 + START_S + MEASURE_S)
