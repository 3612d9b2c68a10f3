"""Random work under random faults: a safety phase, then a liveness phase."""

import pytest

from tests.faults.random_faults import Violation, run


def test_nothing_wrong_is_read_and_everything_comes_back(seed: int) -> None:
    work = run(seed, seconds=10.0)["work"]
    assert work["loads"] > 0
    assert work["stores"] > 0


def test_a_daemon_that_reuses_slots_too_early_is_found(seed: int) -> None:
    with pytest.raises(Violation, match="violation"):
        run(seed, seconds=60.0, early_reuse=True)
