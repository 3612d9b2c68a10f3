"""How long loads may have the link beside an engine that computes."""

import math

import pytest

from millpond.connector.pacing import Pacing
from millpond.transfer import Pace

LINK = 50e9


class Engine:
    """Makes steps, with a clock that nothing else moves."""

    def __init__(self, *, bytes_per_s: float | None = LINK) -> None:
        self.now_s = self.asked_s = 100.0
        self.pacing = Pacing(clock=lambda: self.now_s)
        if bytes_per_s is not None:
            self.pacing.tell_link(bytes_per_s)

    def step(
        self, step_s: float, *, inputs_s: float = 0.0, computes: bool = True, idle_s: float = 0.0
    ) -> Pace | None:
        """Make a step of so many seconds; return the pace once its inputs are copied."""
        self.pacing.begin_step(computes=computes)
        self.now_s += inputs_s
        self.asked_s = self.now_s
        pace = self.pacing.pace()
        self.now_s += step_s - inputs_s + idle_s
        return pace


def busy_s(engine: Engine, pace: Pace | None) -> float:
    """Return for how long the link is lent, from the moment when it is."""
    assert pace is not None
    assert pace.bytes_per_s == LINK
    return pace.busy_until_s - engine.asked_s


def test_loads_are_over_before_the_inputs_of_the_next_step() -> None:
    engine = Engine()
    engine.step(0.1)
    assert busy_s(engine, engine.step(0.1, inputs_s=0.02)) == pytest.approx(0.8 * 0.08)


def test_the_shortest_of_the_last_steps_counts() -> None:
    engine = Engine()
    for step_s in (0.1, 0.02, 1.4):
        engine.step(step_s)
    assert busy_s(engine, engine.step(1.4)) == pytest.approx(0.8 * 0.02)
    for _ in range(3):
        engine.step(1.4)
    assert busy_s(engine, engine.step(1.4)) == pytest.approx(0.8 * 1.4)


def test_of_an_engine_that_was_not_seen_yet_short_steps_are_expected() -> None:
    engine = Engine()
    assert busy_s(engine, engine.step(5.0)) == pytest.approx(0.8 * 0.01)


def test_the_time_between_requests_is_no_step() -> None:
    engine = Engine()
    engine.step(0.1)
    engine.step(0.001, computes=False, idle_s=3600.0)
    assert busy_s(engine, engine.step(0.1)) == pytest.approx(0.8 * 0.1)


def test_a_step_that_is_nearly_over_already_has_no_time_for_loads() -> None:
    engine = Engine()
    engine.step(0.1)
    assert busy_s(engine, engine.step(0.1, inputs_s=0.04)) > 0
    assert busy_s(engine, engine.step(0.1, inputs_s=0.06)) == 0
    assert busy_s(engine, engine.step(0.1)) > 0


def test_nothing_is_limited_where_each_step_is_nearly_over_already() -> None:
    engine = Engine()
    engine.step(0.1)
    late = [engine.step(0.1, inputs_s=0.09) for _ in range(6)]
    assert [pace is None for pace in late] == [False] * 4 + [True] * 2
    assert engine.step(0.1) is not None


@pytest.mark.parametrize(("steps_s", "late_s"), [((0.02, 1.4), 0.25), ((0.2, 1.4), 0.6)])
def test_an_engine_that_comes_by_no_more_limits_nothing_in_the_end(
    steps_s: tuple[float, float], late_s: float
) -> None:
    engine = Engine()
    for step_s in steps_s:
        engine.step(step_s)
    pace = engine.step(0.1)
    assert pace is not None
    assert pace.ends_s - engine.asked_s == pytest.approx(late_s)


def test_nothing_is_limited_while_the_engine_computes_nothing() -> None:
    engine = Engine()
    engine.step(0.1)
    assert engine.step(0.001, computes=False) is None


@pytest.mark.parametrize("bytes_per_s", [None, 0.0, -1.0, math.inf, math.nan])
def test_nothing_is_limited_where_the_link_is_not_known(bytes_per_s: float | None) -> None:
    engine = Engine(bytes_per_s=bytes_per_s)
    assert engine.step(0.1) is None
