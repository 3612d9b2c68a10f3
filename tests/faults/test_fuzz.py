"""A short run of the fuzzer; docs/RESULTS.md records the long one."""

import os

import pytest

from millpond.service import client as client_module
from tests.faults.fuzz import run
from tests.faults.world import WAIT_S

NUM_FRAMES = 20_000


def test_damaged_frames_by_the_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REQUEST_TIMEOUT_S", WAIT_S)
    seed = int(os.environ.get("MILLPOND_SEED", "1"))
    result = run(NUM_FRAMES, seed)
    assert result["frames"] >= NUM_FRAMES
    # It must get somewhere, or it would find nothing.
    counts = result["fuzzer"]
    for reply in ("Pinned granted", "Reserved granted", "Failed invalid", "Refused invalid"):
        assert counts[reply] > 10, reply
