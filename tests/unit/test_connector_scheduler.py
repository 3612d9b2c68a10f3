"""The scheduler's side does not look for what cannot be loaded (client and request are seams)."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.connector import scheduler
from millpond.connector.geometry import EngineLayout
from millpond.connector.metadata import NOT_READY, StepResults
from millpond.connector.scheduler import SchedulerSide
from millpond.model.layout import LayerPages, PartLayout
from millpond.model.leases import ReadLease
from millpond.model.names import Coverage, Outcome

BLOCK, SLOT = 256, 4096


class FakeClient:
    """A pool that holds the first block of every prompt in the slot that the test names."""

    session = 1

    def __init__(self) -> None:
        self.slot = 0
        self.num_pins = 0
        self.released: list[int] = []

    def pin(self, *_: object, **__: object) -> ReadLease:
        self.num_pins += 1
        return ReadLease(self.num_pins, 1, Outcome.HIT, (array("q", [0, self.slot]),))

    def finish(self, lease_ids: list[int], *, ok: bool) -> None:
        assert ok
        self.released += lease_ids


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def side(client: FakeClient) -> SchedulerSide:
    part = PartLayout("attention", (LayerPages("l", 0, SLOT),), {0: 1})
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


@pytest.mark.parametrize(
    ("num_tokens", "zeroed", "copied", "uses_pages"),
    [(0, None, None, False), (1, None, None, True), (0, [3], None, True), (0, None, [3], True)],
)
def test_the_worker_hears_what_a_step_does_with_pages(
    side: SchedulerSide,
    num_tokens: int,
    zeroed: list[int] | None,
    copied: list[int] | None,
    uses_pages: bool,
) -> None:
    output: Any = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=num_tokens,
        new_block_ids_to_zero=zeroed,
        kv_cache_block_copies=copied,
    )
    step = side.build_step(output)
    assert step.computes == bool(num_tokens)
    assert step.uses_pages == uses_pages


def test_slots_that_were_not_ready_are_left_alone_for_a_while(
    side: SchedulerSide, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(scheduler, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    client.slot = 5 * SLOT
    assert look_up(side, "first") == BLOCK
    side.take_results(StepResults(loads_failed={"first": NOT_READY}, unready_offset=5 * SLOT))
    assert look_up(side, "second") == 0
    assert client.released == [2]
    client.slot = 4 * SLOT  # registered, perhaps: those in front of it are
    assert look_up(side, "third") == BLOCK
    side.take_results(StepResults(loads_failed={"third": NOT_READY}, unready_offset=4 * SLOT))
    side.take_results(StepResults(loads_failed={"other": NOT_READY}, unready_offset=9 * SLOT))
    assert look_up(side, "fourth") == 0
    now_s[0] += scheduler._NOT_READY_S
    assert look_up(side, "fifth") == BLOCK


def test_a_load_that_failed_otherwise_keeps_nobody_else_from_looking(
    side: SchedulerSide, client: FakeClient
) -> None:
    look_up(side, "first")
    side.take_results(StepResults(loads_failed={"first": "a slot lies outside the arena"}))
    assert look_up(side, "second") == BLOCK
    num_pins = client.num_pins
    assert look_up(side, "first") == 0  # computes its prompt itself
    assert client.num_pins == num_pins


def test_of_several_ranks_the_first_slot_that_is_not_ready_counts() -> None:
    one, other = StepResults(unready_offset=7), StepResults(unready_offset=3)
    assert one.aggregate(other).unready_offset == 3
    assert one.aggregate(StepResults()).unready_offset == 7
    assert StepResults().aggregate(other).unready_offset == 3
