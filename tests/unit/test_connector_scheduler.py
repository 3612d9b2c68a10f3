"""The scheduler's side does not look for what cannot be loaded (client and request are seams)."""

from types import SimpleNamespace
from typing import Any

import pytest

from millpond.connector import scheduler
from millpond.connector.geometry import EngineLayout
from millpond.connector.metadata import NOT_READY, StepResults
from millpond.connector.scheduler import SchedulerSide
from millpond.model.layout import LayerPages, PartLayout
from millpond.model.names import Coverage, Outcome

BLOCK = 256


class FakeClient:
    """Counts lookups; the pool holds nothing."""

    session = 1

    def __init__(self) -> None:
        self.num_pins = 0

    def pin(self, *_: object, **__: object) -> Any:  # noqa: ANN401
        self.num_pins += 1
        return SimpleNamespace(outcome=Outcome.MISS, lease_id=None)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def side(client: FakeClient) -> SchedulerSide:
    part = PartLayout("attention", (LayerPages("l", 0, 4096),), {0: 1})
    layout = EngineLayout(BLOCK, BLOCK, (BLOCK,), (part,), (Coverage.EVERY,), (None,))
    link: Any = SimpleNamespace(client=client)
    settings: Any = SimpleNamespace(load=True, store=True, pending_wait_s=0.0, check_ratio=0.0)
    return SchedulerSide(layout, link, settings, num_ranks=1)


def look_up(side: SchedulerSide, name: str) -> int | None:
    request: Any = SimpleNamespace(
        request_id=name,
        num_tokens=3 * BLOCK,
        block_hashes=[bytes([i]) * 16 for i in range(3)],
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
        lora_request=None,
        resumable=False,
    )
    return side.num_matched_tokens(request, 0)


def test_nothing_is_looked_up_for_a_while_where_the_arena_is_not_ready(
    side: SchedulerSide, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    assert look_up(side, "first") == 0
    assert client.num_pins == 1
    side.take_results(StepResults(loads_failed={"first": NOT_READY}))
    assert look_up(side, "second") == 0
    assert client.num_pins == 1
    now_s[0] += scheduler._NOT_READY_S
    assert look_up(side, "third") == 0
    assert client.num_pins == 2


def test_a_load_that_failed_otherwise_keeps_nobody_else_from_looking(
    side: SchedulerSide, client: FakeClient
) -> None:
    look_up(side, "first")
    side.take_results(StepResults(loads_failed={"first": "a slot lies outside the arena"}))
    look_up(side, "second")
    assert client.num_pins == 2
    look_up(side, "first")  # computes its prompt itself
    assert client.num_pins == 2
