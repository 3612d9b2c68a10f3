"""The scheduler's side: looks up, pins, plans loads and stores, accounts for every token.

    request   1 on_new_request          remembered
              2 get_num_new_matched     lookup and pin, one round trip     ┐ until allocated,
              3 update_state_after_alloc the pin becomes a load job        ┘ 2 may come again
              4 build_connector_meta    jobs go out with the step; for each block that this
                                        step completes: reserve, hold, a store job
              5 update_connector_output finished stores give their engine blocks back
              6 request_finished        report of sources; kept until its stores are done

Runs on the engine core's thread. The only waits are round trips to the daemon, each bounded.
Engine blocks are held through the block pool's reference count while they are copied, so
neither preemption nor the recycling of old states can overwrite them under a store (E5).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from millpond.connector import versions
from millpond.connector.adapters import Adapters
from millpond.connector.geometry import EngineLayout
from millpond.connector.inner_states import InnerStates
from millpond.connector.link import Link
from millpond.connector.metadata import Job, PartJob, StepMetadata, StepResults
from millpond.connector.requests import Pinned, RequestState, skips_pool
from millpond.model.errors import MillpondError
from millpond.model.leases import NO_SLOT, ReadLease, WriteLease
from millpond.model.names import Coverage, Outcome
from millpond.service.client import SchedulerClient
from millpond.service.protocol import Report

logger = logging.getLogger("vllm.millpond")

ResultT = TypeVar("ResultT")

_PENDING_POLL_S: Final = 0.02
"""Between two lookups of a request that waits for another replica."""
_PENDING_GAP_S: Final = 0.5
"""A writer of whom nothing has been seen for so long is not waited for."""
_NOT_READY_S: Final = 5.0
"""For so long nothing is loaded from slots at or behind one that was not ready for copies."""


@dataclass(slots=True)
class _StoreInFlight:
    """A store job: the engine blocks it holds, and how many ranks have yet to finish it."""

    request_id: str
    held: list[int]
    ranks_left: int


class SchedulerSettings(Protocol):
    """What of the configuration this side obeys."""

    @property
    def load(self) -> bool: ...

    @property
    def store(self) -> bool: ...

    @property
    def pending_wait_s(self) -> float: ...

    @property
    def check_ratio(self) -> float: ...


class SchedulerSide:
    """See the module. ``layout`` and ``num_ranks`` are those of this engine."""

    def __init__(
        self,
        layout: EngineLayout,
        link: Link[SchedulerClient],
        settings: SchedulerSettings,
        num_ranks: int,
    ) -> None:
        self._layout = layout
        self._link = link
        self._settings = settings
        self._num_ranks = num_ranks
        self._block_pool: BlockPool | None = None
        self._states: dict[str, RequestState] = {}
        self._loads: list[Job] = []
        self._stores: dict[int, _StoreInFlight] = {}
        self._delayed: set[str] = set()
        self._failed_loads: set[str] = set()
        self._unready_offset = 0
        self._unready_until_s = 0.0
        self._next_job_id = 0
        self._adapters = Adapters()
        self._inner_states = InnerStates(layout)

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        """Take the engine's block pool, through which blocks are held while they are copied."""
        self._block_pool = block_pool

    # -------------------------------------------------------------- lookup and load

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return how many tokens after ``num_computed_tokens`` the pool will supply.

        None asks the engine to come again: another replica is computing this prefix right
        now, and the request may wait for it a little longer.

        The blocks stay pinned until the load, a later answer, or the end of the request.
        Asked again before allocation, an answer that still holds costs no round trip.
        """
        state = self._state(request)
        if not state.tables:
            state.local_tokens = num_computed_tokens
        layout = self._layout
        first_block = num_computed_tokens // layout.block_tokens
        # The last token is always computed: its logits are not in any cache.
        num_blocks = min(
            (request.num_tokens - 1) // layout.block_tokens,
            state.extend_keys(layout.block_tokens, layout.hash_tokens),
        )
        now_s = time.monotonic()
        useless = num_blocks <= first_block or request.skip_reading_prefix_cache
        if useless or state.skips_pool or state.load_failed or not self._settings.load:
            self._release(state)
            return 0
        if now_s < state.ask_again_s:
            return None
        pinned = self._pin(state, num_blocks, first_block)
        if self._waits(state, now_s):
            state.ask_again_s = now_s + _PENDING_POLL_S
            self._release(state)
            return None
        if pinned is None:
            return 0
        if now_s < self._unready_until_s and _last_slot(pinned.lease) >= self._unready_offset:
            self._release(state)  # a load that fails costs more than a miss
            return 0
        return pinned.lease.num_blocks * layout.block_tokens - num_computed_tokens

    def _waits(self, state: RequestState, now_s: float) -> bool:
        """Say whether to wait for blocks that another replica is writing.

        Bounded twice: by the configured time in all, and by how long nobody has been seen
        writing (blocks of one step are committed just before those of the next are reserved).
        """
        limit_s = self._settings.pending_wait_s
        if not limit_s:
            return False
        if state.outcome is Outcome.PENDING:
            state.pending_seen_s = now_s
            if state.waits_since_s is None:
                state.waits_since_s = now_s
        if state.outcome is Outcome.HIT or state.waits_since_s is None:
            return False
        is_being_written = now_s - state.pending_seen_s < _PENDING_GAP_S
        return is_being_written and now_s - state.waits_since_s < limit_s

    def keep_last_state(self, request: Request, num_cached_tokens: int) -> None:
        """Make a prompt of whole blocks keep the state one block before its end.

        Such a prompt cannot resume from its own end: its last token is always computed.
        Engines from 0.32 on stop there by themselves; for earlier ones this is a shared-prefix
        boundary, which costs one more chunk of a block.
        """
        block = self._layout.block_tokens
        boundary = request.num_tokens - block
        is_whole = request.num_tokens % block == 0 and boundary > num_cached_tokens
        if is_whole and Coverage.LAST in self._layout.coverages:
            request.shared_prefix_boundary = boundary

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_loaded_tokens: int) -> None:
        """Turn the pin into a load job for the allocated blocks, or let it go."""
        state = self._state(request)
        pinned = state.pinned
        if num_loaded_tokens == 0:
            if not state.is_loading:
                self._release(state)
            return
        if pinned is None:
            raise ValueError(f"{num_loaded_tokens} tokens to load for a request without a pin")
        state.pinned = None
        end_tokens = pinned.lease.num_blocks * self._layout.block_tokens
        num_local_tokens = end_tokens - num_loaded_tokens
        if not state.tables:
            state.loaded_tokens = num_loaded_tokens
            state.writers = _split_tokens(pinned.lease.writers, num_loaded_tokens)
        tables = [list(ids) for ids in blocks.get_block_ids()]
        self._loads.append(
            Job(
                job_id=self._new_job_id(),
                request_id=request.request_id,
                session=pinned.session,
                lease_id=pinned.lease_id,
                parts=self._load_parts(state, pinned, tables, num_local_tokens),
            )
        )
        state.is_loading = True
        state.num_offered = pinned.lease.num_blocks

    def _load_parts(
        self,
        state: RequestState,
        pinned: Pinned,
        tables: list[list[int]],
        num_local_tokens: int,
    ) -> tuple[PartJob, ...]:
        jobs: list[PartJob] = []
        for part, pairs in enumerate(pinned.lease.offsets):
            blocks, slots = pairs[0::2].tolist(), pairs[1::2].tolist()
            if not slots:
                continue
            by_group: dict[int, list[list[int]]] = {}
            for group in self._layout.parts[part].blocks:
                tokens = self._layout.group_tokens[group]
                # Blocks that are local already may be in use by other requests: leave them.
                local = num_local_tokens // tokens
                hidden = [0] * min(local, len(tables[group])) + tables[group][local:]
                by_group[group] = [
                    self._layout.table(part, group, block, hidden) for block in blocks
                ]
            jobs.append(PartJob(part, slots, by_group, self._seeds(state, blocks)))
        return tuple(jobs)

    def _pin(self, state: RequestState, num_blocks: int, first_block: int) -> Pinned | None:
        client = self._link.client
        held = state.pinned
        if (
            held is not None
            and client is not None
            and (held.session, held.first_block) == (client.session, first_block)
        ):
            return held
        self._release(state)
        state.outcome = Outcome.MISS
        if client is None:
            return None
        keys = state.prefix(num_blocks)
        lease = self._ask(
            client, lambda: client.pin(keys, state.key_bytes, first_block=first_block)
        )
        if lease is not None:
            state.outcome = lease.outcome
        if lease is None or lease.lease_id is None:
            return None
        state.pinned = Pinned(lease, lease.lease_id, client.session, first_block)
        return state.pinned

    def _release(self, state: RequestState) -> None:
        pinned, state.pinned = state.pinned, None
        client = self._link.client
        if pinned is None or client is None or client.session != pinned.session:
            return  # the end of a session releases all it held
        self._ask(client, lambda: client.finish([pinned.lease_id], ok=True))

    # -------------------------------------------------------------- steps and stores

    def build_step(self, output: SchedulerOutput) -> StepMetadata:
        """Return this step's jobs: loads that were allocated, stores of what it completes."""
        metadata = StepMetadata(
            loads=self._loads,
            delayed=self._delayed,
            computes=output.total_num_scheduled_tokens > 0,
            uses_pages=versions.uses_pages(output),
        )
        self._loads, self._delayed = [], set()
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._set_table(new.req_id, new.block_ids)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            computed[request_id] = cached.num_computed_tokens[i]
            block_ids = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                self._set_table(request_id, block_ids)
            elif block_ids is not None:
                self._extend_table(request_id, block_ids)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            state = self._states.get(request_id)
            if state is not None and request_id in computed:
                if state.start_blocks is None:
                    state.start_blocks = computed[request_id] // self._layout.block_tokens
                job = self._plan_store(state, computed[request_id] + num_tokens)
                if job is not None:
                    metadata.stores.append(job)
        return metadata

    def _set_table(self, request_id: str, block_ids: tuple[list[int], ...] | None) -> None:
        state = self._states.get(request_id)
        if state is None:
            return
        state.tables = [list(ids) for ids in block_ids or ()]
        state.is_loading = False

    def _extend_table(self, request_id: str, block_ids: tuple[list[int], ...]) -> None:
        state = self._states.get(request_id)
        if state is not None:
            for table, new in zip(state.tables, block_ids, strict=True):
                table.extend(new)

    def _plan_store(self, state: RequestState, tokens_after: int) -> Job | None:
        layout = self._layout
        client = self._link.client
        num_blocks = min(
            min(tokens_after, state.request.num_tokens) // layout.block_tokens,
            state.extend_keys(layout.block_tokens, layout.hash_tokens),
        )
        reached = range(state.num_reached, num_blocks)
        state.num_reached = max(state.num_reached, num_blocks)
        if client is None or state.skips_pool or not self._settings.store:
            return None
        if num_blocks <= state.num_offered:
            return None
        offered = self._inner_states.thinned(
            state,
            [self._offered_blocks(state, part, reached) for part in range(len(layout.parts))],
        )
        keys = state.prefix(num_blocks)
        lease = self._ask(
            client,
            lambda: client.reserve(
                keys,
                state.key_bytes,
                first_block=0,
                parts=offered,
                request_id=state.request.request_id,
            ),
        )
        if lease is None:
            return None
        state.num_offered = num_blocks
        state.num_inner_states += self._inner_states.number(state, offered)
        if lease.lease_id is None:
            return None
        return self._store_job(state, client.session, lease.lease_id, lease)

    def _offered_blocks(self, state: RequestState, part: int, reached: range) -> list[int]:
        """Return which of the blocks ``reached`` by this step have ``part``'s data right now.

        A recurrent state lies at the position in the block table where its boundary is: a
        non-null engine block that ends at a boundary which this step reaches holds the state
        after exactly that many tokens. Positions reached before may have been recycled, so
        they are not offered even where the pool lacks them.
        """
        if self._layout.coverages[part] is Coverage.EVERY:
            return []
        return [
            block
            for block in reached
            if all(
                all(self._layout.table(part, group, block, state.tables[group]))
                for group in self._layout.parts[part].blocks
            )
        ]

    def _store_job(
        self, state: RequestState, session: int, lease_id: int, lease: WriteLease
    ) -> Job:
        jobs: list[PartJob] = []
        held: list[int] = []
        for part, offsets in enumerate(lease.offsets):
            wanted = [
                (lease.first_block + i, offset)
                for i, offset in enumerate(offsets)
                if offset != NO_SLOT
            ]
            if not wanted:
                continue
            tables = {
                group: [
                    self._layout.table(part, group, block, state.tables[group])
                    for block, _ in wanted
                ]
                for group in self._layout.parts[part].blocks
            }
            held += [i for rows in tables.values() for row in rows for i in row if i]
            seeds = self._seeds(state, [block for block, _ in wanted])
            jobs.append(PartJob(part, [offset for _, offset in wanted], tables, seeds))
        job = Job(self._new_job_id(), state.request.request_id, session, lease_id, tuple(jobs))
        self._hold(held)
        self._stores[job.job_id] = _StoreInFlight(job.request_id, held, self._num_ranks)
        state.store_jobs.add(job.job_id)
        return job

    def _seeds(self, state: RequestState, blocks: list[int]) -> list[int]:
        if not self._settings.check_ratio:
            return []
        return [state.checksum_seed(block) for block in blocks]

    def _hold(self, block_ids: list[int]) -> None:
        pool = self._block_pool
        if pool is None:
            raise ValueError("the engine has not bound its block pool")
        pool.touch([pool.blocks[i] for i in block_ids])

    # -------------------------------------------------------------- results and ends

    def take_results(self, results: StepResults | None) -> None:
        """Give back the engine blocks of finished stores; remember failed loads."""
        if results is None:
            return
        for job_id, num_ranks in results.stores_done.items():
            self._end_store(job_id, num_ranks)
        if results.unready_offset is not None:
            now_s = time.monotonic()
            known = self._unready_offset if now_s < self._unready_until_s else None
            found = results.unready_offset
            self._unready_offset = found if known is None else min(known, found)
            self._unready_until_s = now_s + _NOT_READY_S
        for request_id, reason in results.loads_failed.items():
            logger.warning("event=load_failed request=%s reason=%r", request_id, reason)
            state = self._states.get(request_id)
            if state is not None:
                state.load_failed = True
                self._failed_loads.add(request_id)
                state.loaded_tokens = 0
                state.writers = {}
                state.num_offered = 0

    def take_load_failure(self, request_id: str) -> bool:
        """Return, once for each failure, whether this request's load failed."""
        has_failed = request_id in self._failed_loads
        self._failed_loads.discard(request_id)
        return has_failed

    def _end_store(self, job_id: int, num_ranks: int) -> None:
        store = self._stores[job_id]
        store.ranks_left -= num_ranks
        if store.ranks_left > 0:
            return
        del self._stores[job_id]
        pool = self._block_pool
        if pool is not None:
            pool.free_blocks([pool.blocks[i] for i in reversed(store.held)])
        state = self._states.get(store.request_id)
        if state is not None:
            state.store_jobs.discard(job_id)
            if state.is_finished and not state.store_jobs:
                del self._states[store.request_id]

    @property
    def holds_blocks(self) -> bool:
        """Whether engine blocks are held for stores in flight."""
        return bool(self._stores)

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether the end of some store will free blocks: those of a request that is over."""
        return any(
            state.is_finished
            for store in self._stores.values()
            if (state := self._states.get(store.request_id)) is not None
        )

    def request_finished(self, request: Request) -> bool:
        """Report the request; return whether it has to be kept until its stores are done."""
        state = self._states.get(request.request_id)
        if state is None:
            return False
        self._release(state)
        self._failed_loads.discard(request.request_id)
        self._report(state)
        state.is_finished = True
        if not state.store_jobs:
            del self._states[request.request_id]
            return False
        if state.is_loading:
            return False  # the engine keeps it until the load is reported
        self._delayed.add(request.request_id)
        return True

    def new_request(self, request: Request) -> None:
        """Remember a request that has arrived."""
        self._state(request)

    def _report(self, state: RequestState) -> None:
        client = self._link.client
        if client is None:
            return
        request = state.request
        local = min(state.local_tokens, request.num_prompt_tokens)
        loaded = min(state.loaded_tokens, request.num_prompt_tokens - local)
        report = Report(
            request_id=request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            computed_tokens=request.num_prompt_tokens - local - loaded,
            local_tokens=local,
            loaded_tokens=loaded,
            writers=state.writers,
        )
        self._ask(client, lambda: client.report(report))

    def _state(self, request: Request) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None or state.is_finished:
            state = self._new_state(request)
            self._states[request.request_id] = state
        return state

    def _new_state(self, request: Request) -> RequestState:
        try:
            return RequestState(request, skips_pool(request), self._adapters.digest(request))
        except OSError as error:
            # Its files cannot be told apart, so its blocks may not be shared.
            logger.warning(
                "event=adapter_unreadable request=%s reason=%r", request.request_id, str(error)
            )
            return RequestState(request, skips_pool=True, adapter=b"")

    def _new_job_id(self) -> int:
        self._next_job_id += 1
        return self._next_job_id

    def _ask(self, client: SchedulerClient, call: Callable[[], ResultT]) -> ResultT | None:
        """Make one call to the daemon; None, and a lost connection, if it fails.

        Whatever the daemon says or does, the engine's step goes on.
        """
        try:
            return call()
        except (MillpondError, ValueError) as error:
            self._link.lost(client, error)
            return None


def _last_slot(lease: ReadLease) -> int:
    """Return the largest offset of a slot that a lease reads."""
    return max((max(pairs[1::2]) for pairs in lease.offsets if pairs), default=0)


def _split_tokens(writers: tuple[tuple[str, int], ...], num_tokens: int) -> dict[str, int]:
    """Share ``num_tokens`` among the writers of the loaded blocks, by blocks, exactly."""
    total = sum(num_blocks for _, num_blocks in writers)
    shares: dict[str, int] = {}
    given = blocks_seen = 0
    for replica, num_blocks in writers:
        blocks_seen += num_blocks
        share = num_tokens * blocks_seen // total - given
        shares[replica] = shares.get(replica, 0) + share
        given += share
    return shares
