"""Which recurrent states the scheduler's side stores, and where it loads one to.

Block tables are those of a hybrid in vLLM's align mode: group 0 has attention pages, groups 1
and 2 have states. A position of theirs is null unless a step ended there, or is running.
"""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.connector.geometry import EngineLayout
from millpond.connector.metadata import PartJob
from millpond.connector.scheduler import SchedulerSide
from millpond.model.layout import LayerPages, PartLayout
from millpond.model.leases import NO_SLOT, ReadLease, WriteLease
from millpond.model.names import Coverage, Outcome

BLOCK, PAGES, STATE = 256, 0, 1
Table = tuple[list[int], list[int], list[int]]


class Pool:
    """Grants a slot to all that is offered: block i of part p gets the slot 100 p + i."""

    session = 1

    def __init__(self) -> None:
        self.num_stored = 0
        self.pinned = ReadLease(None, 0, Outcome.MISS)

    def reserve(self, keys: bytes, key_bytes: int, **asked: Any) -> WriteLease:  # noqa: ANN401
        num_blocks = len(keys) // key_bytes
        states = asked["parts"][STATE]
        pages = [i if i >= self.num_stored else NO_SLOT for i in range(num_blocks)]
        slots = [100 + i if i in states else NO_SLOT for i in range(num_blocks)]
        self.num_stored = num_blocks
        return WriteLease(7, 0, (array("Q", pages), array("Q", slots)))

    def pin(self, *_: object, **__: object) -> ReadLease:
        return self.pinned

    def finish(self, *_: object, **__: object) -> None:
        """Nothing is held."""


class Engine:
    """One request of five blocks and thirty tokens, as its scheduler tells of it step by step."""

    def __init__(self, side: SchedulerSide, num_tokens: int = 5 * BLOCK + 30) -> None:
        self.side = side
        self.num_computed = 0
        self.is_new = True
        self.request: Any = SimpleNamespace(
            request_id="r",
            num_tokens=num_tokens,
            block_hashes=[bytes([i]) * 16 for i in range(20)],
            skip_reading_prefix_cache=False,
            kv_transfer_params=None,
            lora_request=None,
            resumable=False,
            shared_prefix_boundary=0,
        )
        side.new_request(self.request)

    def step(
        self, num_tokens: int, table: Table, *, resumed_at: int | None = None
    ) -> dict[int, PartJob]:
        """Compute so many tokens with these blocks more; return what is stored, by part."""
        if resumed_at is not None:
            self.num_computed = resumed_at
        new = [SimpleNamespace(req_id="r", num_computed_tokens=self.num_computed, block_ids=table)]
        cached = SimpleNamespace(
            req_ids=[] if self.is_new else ["r"],
            num_computed_tokens=[self.num_computed],
            new_block_ids=[table],
            resumed_req_ids=set() if resumed_at is None else {"r"},
        )
        output: Any = SimpleNamespace(
            scheduled_new_reqs=new if self.is_new else [],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={"r": num_tokens},
            total_num_scheduled_tokens=num_tokens,
        )
        self.is_new = False
        self.num_computed += num_tokens
        jobs = self.side.build_step(output).stores
        assert len(jobs) <= 1
        return {part.part: part for job in jobs for part in job.parts}

    def end_on_a_boundary(self) -> bool:
        """Make a step of one block that leaves a state; say whether it is stored."""
        return bool(states(self.step(BLOCK, ([1], [1], [1]))))


class BlockPool:
    """Counts how often each engine block is held."""

    def __init__(self) -> None:
        self.blocks = list(range(1000))
        self.held: list[int] = []

    def touch(self, blocks: list[int]) -> None:
        self.held += blocks


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def block_pool() -> BlockPool:
    return BlockPool()


@pytest.fixture
def side(pool: Pool, block_pool: BlockPool) -> SchedulerSide:
    return scheduler_side(pool, block_pool, (Coverage.EVERY, Coverage.LAST))


def scheduler_side(
    pool: Pool,
    block_pool: BlockPool,
    coverages: tuple[Coverage, ...],
    *,
    page_bytes: int = 512,
) -> SchedulerSide:
    """Return a scheduler's side; its states have 64 bytes, an eighth of a page."""
    parts = (
        PartLayout("attention", (LayerPages("a", 0, page_bytes),), {0: 1}),
        PartLayout("state", (LayerPages("s", 1, 32), LayerPages("t", 2, 32)), {1: 1, 2: 1}),
    )[: len(coverages)]
    windows = (None,) * len(coverages)
    layout = EngineLayout(BLOCK, BLOCK, (BLOCK,) * 3, parts, coverages, windows)
    link: Any = SimpleNamespace(client=pool)
    settings: Any = SimpleNamespace(load=True, store=True, pending_wait_s=0.0, check_ratio=0.0)
    made = SchedulerSide(layout, link, settings, num_ranks=1)
    binding: Any = block_pool
    made.bind_block_pool(binding)
    return made


def states(stored: dict[int, PartJob]) -> dict[int, tuple[int, ...]]:
    """Return which states are stored: the engine blocks of both groups by Millpond's block."""
    if STATE not in stored:
        return {}
    job = stored[STATE]
    blocks = [slot - 100 for slot in job.slots]
    rows = zip(job.tables[1], job.tables[2], strict=True)
    return {block: (*one, *other) for block, (one, other) in zip(blocks, rows, strict=True)}


# ---------------------------------------------------------------- stores


def test_states_are_stored_where_steps_end_on_a_boundary(side: SchedulerSide) -> None:
    engine = Engine(side)
    first = engine.step(2 * BLOCK, ([1, 2], [0, 21], [0, 31]))
    assert states(first) == {1: (21, 31)}
    assert first[PAGES].tables == {0: [[1], [2]]}, "pages of every block"
    second = engine.step(3 * BLOCK, ([3, 4, 5], [0, 0, 22], [0, 0, 32]))
    assert states(second) == {4: (22, 32)}
    assert second[PAGES].tables == {0: [[3], [4], [5]]}


def test_a_state_that_is_running_is_not_one(side: SchedulerSide) -> None:
    """A step that ends within a block: the state at that position is after its last token."""
    engine = Engine(side)
    stored = engine.step(2 * BLOCK + 100, ([1, 2, 3], [0, 0, 23], [0, 0, 33]))
    assert states(stored) == {}
    assert len(stored[PAGES].slots) == 2


def test_of_a_step_over_several_boundaries_the_states_that_are_there_are_stored(
    side: SchedulerSide,
) -> None:
    engine = Engine(side)
    stored = engine.step(4 * BLOCK, ([1, 2, 3, 4], [0, 22, 0, 24], [0, 32, 0, 34]))
    assert states(stored) == {1: (22, 32), 3: (24, 34)}


def test_within_a_prompt_states_are_stored_as_their_pages_allow(
    pool: Pool, block_pool: BlockPool
) -> None:
    """The first, and one for each eight times a state's bytes of pages: here, of four blocks."""
    side = scheduler_side(pool, block_pool, (Coverage.EVERY, Coverage.LAST), page_bytes=128)
    engine = Engine(side, 14 * BLOCK + 30)
    kept = [engine.end_on_a_boundary() for _ in range(14)]
    assert [block for block in range(14) if kept[block]] == [0, 3, 7, 11, 13]


def test_what_was_there_before_allows_no_state(pool: Pool, block_pool: BlockPool) -> None:
    side = scheduler_side(pool, block_pool, (Coverage.EVERY, Coverage.LAST), page_bytes=128)
    engine = Engine(side, 14 * BLOCK + 30)
    engine.num_computed = 5 * BLOCK
    # The engine keeps the state that it resumes from in its table.
    first = engine.step(BLOCK, ([1] * 6, [0] * 4 + [9, 1], [0] * 4 + [9, 1]))
    assert list(states(first)) == [4, 5]
    kept = [engine.end_on_a_boundary() for _ in range(6, 14)]
    assert [6 + i for i in range(8) if kept[i]] == [8, 12, 13]


def test_where_the_engine_stops_for_others_a_state_is_stored(
    pool: Pool, block_pool: BlockPool
) -> None:
    side = scheduler_side(pool, block_pool, (Coverage.EVERY, Coverage.LAST), page_bytes=128)
    engine = Engine(side, 14 * BLOCK + 30)
    engine.request.shared_prefix_boundary = 3 * BLOCK
    kept = [engine.end_on_a_boundary() for _ in range(6)]
    assert [block for block in range(6) if kept[block]] == [0, 2, 3]


def test_a_state_that_the_pool_did_not_take_leaves_its_room_to_the_next(
    pool: Pool, block_pool: BlockPool
) -> None:
    side = scheduler_side(pool, block_pool, (Coverage.EVERY, Coverage.LAST), page_bytes=128)
    engine = Engine(side, 14 * BLOCK + 30)
    side._link.client = None  # type: ignore[misc]
    engine.end_on_a_boundary()
    side._link.client = pool  # type: ignore[misc]
    assert engine.end_on_a_boundary()


def test_a_state_that_the_engine_lacks_takes_no_room_from_the_next(
    pool: Pool, block_pool: BlockPool
) -> None:
    side = scheduler_side(pool, block_pool, (Coverage.EVERY, Coverage.LAST), page_bytes=128)
    engine = Engine(side, 14 * BLOCK + 30)
    engine.step(BLOCK, ([1], [0], [0]))
    assert engine.end_on_a_boundary()


def test_decoding_stores_every_state_that_the_next_turn_may_resume_from(
    pool: Pool, block_pool: BlockPool
) -> None:
    side = scheduler_side(pool, block_pool, (Coverage.EVERY, Coverage.LAST), page_bytes=1)
    engine = Engine(side, BLOCK + 30)
    assert engine.end_on_a_boundary()
    for _ in range(3):
        engine.request.num_tokens += BLOCK
        assert engine.end_on_a_boundary()


def test_a_state_that_one_group_lacks_is_none(side: SchedulerSide) -> None:
    engine = Engine(side)
    assert states(engine.step(2 * BLOCK, ([1, 2], [0, 22], [0, 0]))) == {}


def test_the_state_of_a_boundary_that_decoding_crosses_is_stored(side: SchedulerSide) -> None:
    engine = Engine(side, 2 * BLOCK - 2)
    engine.step(2 * BLOCK - 2, ([1, 2], [21, 22], [31, 32]))
    for num_tokens in (2 * BLOCK - 1, 2 * BLOCK):
        engine.request.num_tokens = num_tokens
        stored = engine.step(1, ([], [], []))
    assert states(stored) == {1: (22, 32)}
    assert stored[PAGES].tables == {0: [[2]]}


def test_a_position_that_was_passed_may_hold_another_state_by_now(
    side: SchedulerSide, pool: Pool
) -> None:
    """The engine frees and reuses states of earlier boundaries; the table still names them."""
    engine = Engine(side)
    engine.step(2 * BLOCK, ([1, 2], [0, 22], [0, 32]))
    pool.num_stored = 0  # flushed: nothing of it is there any more
    stored = engine.step(2 * BLOCK, ([3, 4], [0, 24], [0, 34]))
    assert states(stored) == {3: (24, 34)}
    assert stored[PAGES].tables == {0: [[1], [2], [3], [4]]}, "pages stay where they are"


def test_blocks_are_held_while_they_are_copied(side: SchedulerSide, block_pool: BlockPool) -> None:
    Engine(side).step(2 * BLOCK, ([1, 2], [0, 22], [0, 32]))
    assert sorted(block_pool.held) == [1, 2, 22, 32]


def test_a_preempted_request_comes_back_with_another_table(side: SchedulerSide) -> None:
    """Its whole table is told anew, and what it stored is not stored again."""
    engine = Engine(side)
    engine.step(2 * BLOCK, ([1, 2], [0, 22], [0, 32]))
    again = engine.step(2 * BLOCK, ([51, 52], [0, 62], [0, 72]), resumed_at=0)
    assert again == {}
    stored = engine.step(2 * BLOCK, ([53, 54], [0, 64], [0, 74]))
    assert states(stored) == {3: (64, 74)}
    assert stored[PAGES].tables == {0: [[53], [54]]}


# ---------------------------------------------------------------- loads


def test_one_state_is_loaded_to_the_end_of_the_prefix(side: SchedulerSide, pool: Pool) -> None:
    """Two blocks are local already: of the others the pages, and the state after the last."""
    engine = Engine(side)
    pages, last = array("Q", [2, 1002, 3, 1003]), array("Q", [3, 2003])
    pool.pinned = ReadLease(5, 4, Outcome.HIT, (pages, last), (("a", 2),))
    assert side.num_matched_tokens(engine.request, 2 * BLOCK) == 2 * BLOCK
    tables = ([1, 2, 3, 4, 5], [0, 22, 0, 24, 25], [0, 32, 0, 34, 35])
    blocks: Any = SimpleNamespace(get_block_ids=lambda: tables)
    side.allocated(engine.request, blocks, 2 * BLOCK)
    nothing: Any = SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[]),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
    )
    (job,) = side.build_step(nothing).loads
    assert [(part.part, part.slots, part.tables) for part in job.parts] == [
        (PAGES, [1002, 1003], {0: [[3], [4]]}),
        (STATE, [2003], {1: [[24]], 2: [[34]]}),
    ]


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "boundary"),
    [
        (4 * BLOCK, 0, 3 * BLOCK),
        (4 * BLOCK, 2 * BLOCK, 3 * BLOCK),
        (4 * BLOCK, 3 * BLOCK, 0),
        (4 * BLOCK + 1, 0, 0),
        (4 * BLOCK - 1, 0, 0),
        (BLOCK, 0, 0),
    ],
)
def test_a_prompt_of_whole_blocks_is_stopped_one_block_early(
    side: SchedulerSide, num_tokens: int, num_cached: int, boundary: int
) -> None:
    """Its own end is of no use to it: its last token is computed in any case."""
    request = Engine(side, num_tokens).request
    side.keep_last_state(request, num_cached)
    assert request.shared_prefix_boundary == boundary


def test_without_states_no_prompt_is_stopped_early(pool: Pool, block_pool: BlockPool) -> None:
    side = scheduler_side(pool, block_pool, (Coverage.EVERY,))
    request = Engine(side, 4 * BLOCK).request
    side.keep_last_state(request, 0)
    assert request.shared_prefix_boundary == 0
