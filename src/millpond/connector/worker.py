"""The worker's side: owns the mapping of the arena and performs the copies of each step.

    main thread     start_loads, start_stores: check the session, plan, submit; never waits
    copy threads    copy, then: checksums if they are on, finish the lease with the daemon,
                    note the result
    main thread     begin_step: lets the device wait for a load that was reported early;
                    finished: goes on with copies, notes loads that have landed, or, early,
                    one that the next forward pass is to wait for;
                    take_results: hands on what was noted
    link thread     (re)joins the engine's session; tells the daemon which earlier ones are
                    drained, once no copy that began under them is in flight (E5)

No thread of the engine waits for a copy or for the daemon.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from millpond.arena.arena import Arena
from millpond.connector import versions
from millpond.connector.geometry import EngineLayout, describe_layout, layer_memory
from millpond.connector.link import Link
from millpond.connector.metadata import NOT_READY, Job, RankLayout, StepMetadata, StepResults
from millpond.connector.pacing import Pacing
from millpond.model.errors import DaemonGone, ExpectedError, UnsupportedEngine
from millpond.model.limits import LINK_PROBLEM_LENGTH_MAX
from millpond.service.client import ReplicaIdentity, WorkerClient
from millpond.service.protocol import Link as LinkMessage
from millpond.transfer import Copies, CopyEngine, Direction, Ends, Fence, plan_copies
from millpond.transfer.checksums import Checked, Checksums, Summed
from millpond.transfer.copies import LayerMemory
from millpond.transfer.link import LinkReport

logger = logging.getLogger("vllm.millpond")

_DRAIN_S = 60.0
_CLOSE_S = 10.0


class WorkerSettings(Protocol):
    """What of the configuration this side obeys."""

    @property
    def socket(self) -> Path: ...

    @property
    def check_ratio(self) -> float: ...

    @property
    def early_loads(self) -> bool: ...


class WorkerSide:
    """See the module. ``rank`` is this worker's tensor-parallel rank."""

    def __init__(
        self,
        layout: EngineLayout,
        identity: ReplicaIdentity,
        settings: WorkerSettings,
        copy_engine: CopyEngine,
        rank: int,
    ) -> None:
        self._layout = layout
        self._identity = identity
        self._socket_path = str(settings.socket)
        self._copy_engine = copy_engine
        self._rank = rank
        self._checksums = Checksums(layout.parts, rank, settings.check_ratio)
        self._early_loads = settings.early_loads
        self._memory: tuple[tuple[LayerMemory, ...], ...] = ()
        self._arena: Arena | None = None
        self._past_sessions: list[int] = []
        self._link = Link(f"rank{rank}", self._join, closed=self._left)
        self._gate = threading.Lock()
        """Taken to submit under a session and to leave it: none is submitted after leaving."""
        self._current: WorkerClient | None = None
        self._link_report: LinkReport | None = None
        self._unended: list[tuple[int, int]] = []
        """(session, lease) of jobs that came while this rank was not in their session."""
        self._lock = threading.Lock()
        self._results = StepResults()
        self._loaded: set[str] = set()
        self._landed: set[int] = set()
        """Jobs whose loads were reported when they landed, or early, and have not ended."""
        self._failed: set[str] = set()
        self._num_stores: dict[str, int] = {}
        self._delayed: set[str] = set()
        self._pacing = Pacing()
        self._computes = True
        """Whether the step that was begun last has tokens to compute."""
        self._begins_steps = False
        """Whether ``begin_step`` comes before anything else that a step enqueues."""

    # -------------------------------------------------------------- the engine's memory

    def register(
        self,
        kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        kv_cache_config: KVCacheConfig,
        vllm_config: VllmConfig,
    ) -> RankLayout:
        """Learn where the pages are and begin to connect; return what the namespace needs."""
        try:
            self._memory = layer_memory(self._layout, kv_caches, kv_cache_config.num_blocks)
        except UnsupportedEngine as error:
            return RankLayout("", "", refusal=str(error))
        self._begins_steps = versions.tells_of_each_step(vllm_config)
        if self._early_loads and not versions.may_load_early(vllm_config):
            logger.info("event=setting_changed name=connector.early_loads to=false")
            self._early_loads = False
        self._link.start()
        layers = [layer.layer for part in self._layout.parts for layer in part.layers]
        return RankLayout(
            describe_layout(self._layout, kv_caches, kv_cache_config),
            versions.attention_backend(vllm_config, layers),
        )

    # -------------------------------------------------------------- a step

    def begin_step(self, metadata: StepMetadata) -> None:
        """Let the step that begins wait, on the device, for a load that was reported early.

        Not an empty step: vLLM ends it with a mark on the stream, which the host waits for at
        the beginning of the next one, and that is the step that is to be launched meanwhile.
        """
        self._pacing.begin_step(computes=metadata.computes)
        if metadata.uses_pages:
            self._copy_engine.hold_back()
        self._copy_engine.begin_step()

    def start_loads(self, metadata: StepMetadata) -> None:
        """Begin this step's loads, ordered after all earlier uses of the blocks they fill."""
        self._computes = metadata.computes
        if self._begins_steps:
            self._copy_engine.pace(self._pacing.pace())
        with self._lock:
            self._delayed |= metadata.delayed
        if not metadata.loads:
            return
        # guards: a load must not overwrite a page that an earlier kernel reads or zeroes (E3).
        after = self._copy_engine.fence()
        for job in metadata.loads:
            self._submit(Direction.LOAD, job, after, self._end_load)

    def start_stores(self, metadata: StepMetadata) -> None:
        """Begin this step's stores, ordered after the forward pass that wrote the blocks."""
        if not metadata.stores:
            return
        with self._lock:
            for job in metadata.stores:
                self._num_stores[job.request_id] = self._num_stores.get(job.request_id, 0) + 1
        # guards: a store must not read a page before the kernels that write it are done (E1).
        after = self._copy_engine.fence()
        for job in metadata.stores:
            self._submit(Direction.STORE, job, after, self._end_store)

    def finished(self) -> tuple[set[str], set[str], set[str]]:
        """Return requests whose stores have ended, whose loads have, and whose loads failed.

        Only requests that the scheduler keeps for their stores are in the first set; those
        whose loads failed are in the second set too.
        """
        # An engine with nothing else to do prepares and launches the forward pass while the
        # load goes on; one that computes would keep the others waiting for the load as well.
        self._copy_engine.step(early=self._early_loads and not self._computes)
        if not self._begins_steps:
            self._copy_engine.hold_back()
        with self._lock:
            sent = {r for r in self._delayed if r not in self._num_stores}
            self._delayed -= sent
            loaded, self._loaded = self._loaded, set()
            failed, self._failed = self._failed, set()
        return sent, loaded, failed

    def take_results(self) -> StepResults | None:
        """Return what has ended since the last call, or None if nothing has."""
        with self._lock:
            results, self._results = self._results, StepResults()
        return results if results.stores_done or results.loads_failed else None

    def close(self) -> None:
        """End copies and connection; bounded."""
        self._link.stop(_CLOSE_S)
        if self._copy_engine.close(_CLOSE_S) and self._arena is not None:
            self._arena.close()

    # -------------------------------------------------------------- copy threads

    def _end_load(self, job: Job, client: WorkerClient | None, error: str | None) -> None:
        # Until its sums have been compared: whatever goes wrong, the request must hear of it.
        checked, failure = Checked(), error or "its checksums could not be compared"
        try:
            if client is not None and error is None:
                checked = self._checksums.check(client.arena, _summed(job))
            failure = error
            if checked.damaged:
                failure = f"slots with other bytes than were stored: {len(checked.damaged)}"
        finally:
            # guards: the slots may be reused once released: the last byte has been read (E5).
            self._finish(job, client, checked, ok=failure is None)
            self._report_load(job, failure)

    def _report_load(self, job: Job, failure: str | None) -> None:
        """Report a load that has ended, unless it was reported when it landed."""
        with self._lock:
            if job.job_id in self._landed:
                self._landed.remove(job.job_id)
                if failure is not None:  # of the device: the engine's next call fails as well
                    logger.error("event=load_failed_late request=%s", job.request_id)
                return
            self._loaded.add(job.request_id)
            if failure is not None:
                self._results.loads_failed[job.request_id] = failure
                self._failed.add(job.request_id)
            if failure == NOT_READY:
                self._results.note_unready(_last_slot(job))

    def _note_loaded(self, job: Job) -> None:
        """Let the engine use what a load has brought; its lease may end later."""
        with self._lock:
            self._landed.add(job.job_id)
            self._loaded.add(job.request_id)

    def _end_store(self, job: Job, client: WorkerClient | None, error: str | None) -> None:
        is_good = False  # until its sums are written: those of an earlier block may stand there
        try:
            if client is not None and error is None:
                self._checksums.write(client.arena, _summed(job))
            is_good = error is None
        finally:
            # guards: a commit must not precede the last byte in the arena (E2).
            self._finish(job, client, Checked(), ok=is_good)
            self._note_stored(job)

    def _note_stored(self, job: Job) -> None:
        with self._lock:
            self._results.stores_done[job.job_id] = 1
            left = self._num_stores[job.request_id] - 1
            if left:
                self._num_stores[job.request_id] = left
            else:
                del self._num_stores[job.request_id]

    def _finish(self, job: Job, client: WorkerClient | None, checked: Checked, *, ok: bool) -> None:
        if client is None:
            return
        try:
            if checked.num_slots:
                client.finish_checked(
                    job.lease_id, num_checked=checked.num_slots, damaged=checked.damaged
                )
            else:
                client.finish([job.lease_id], ok=ok)
        except ExpectedError as error:
            self._link.lost(client, error)

    # -------------------------------------------------------------- link thread

    def _join(self) -> WorkerClient:
        if self._past_sessions and not self._copy_engine.wait_idle(_DRAIN_S):
            raise DaemonGone(f"copies of an earlier session have not ended in {_DRAIN_S:.0f} s")
        try:
            client = WorkerClient.connect(
                self._socket_path,
                self._identity,
                rank=self._rank,
                drained=self._past_sessions,
                arena=self._arena,
            )
        except DaemonGone:
            self._give_up_arena()
            raise
        # An earlier mapping ends with its last copy (E6): submissions keep theirs alive.
        if self._arena is not client.arena:
            self._copy_engine.adopt(client.arena)
        self._arena = client.arena
        self._past_sessions = []
        with self._gate:
            self._current = client
            unended, self._unended = self._unended, []
            report = self._link_report
        due = [lease for session, lease in unended if session == client.session]
        if due:
            with contextlib.suppress(ExpectedError):  # lost already: that ends the leases too
                client.finish(due, ok=False)
        if report is not None:
            self._send_link(client, report)
        return client

    def _give_up_arena(self) -> None:
        """Let the memory of a daemon that is gone go: the next one may need it to start.

        Nothing is in flight: the session has ended, and its copies were waited for.
        """
        arena, self._arena = self._arena, None
        if arena is not None:
            self._copy_engine.release(_DRAIN_S)
            arena.close()

    def tell_link(self, report: LinkReport) -> None:
        """Pass on what the copy engine knows of its way to the arena (its threads)."""
        # Without a link there is no pace: loads are handed over at once.
        if report.speed is not None:
            self._pacing.tell_link(report.speed.h2d_gb_s * 1e9)
        with self._gate:
            self._link_report = report
            client = self._current
        if client is not None:
            self._send_link(client, report)

    def _send_link(self, client: WorkerClient, report: LinkReport) -> None:
        speed = report.speed
        try:
            client.tell_link(
                LinkMessage(
                    h2d_gb_s=speed and speed.h2d_gb_s,
                    d2h_gb_s=speed and speed.d2h_gb_s,
                    allowed_gb_s=speed and speed.allowed_gb_s,
                    problem=report.problem[:LINK_PROBLEM_LENGTH_MAX],
                )
            )
        except ExpectedError as error:
            self._link.lost(client, error)

    def _left(self, client: WorkerClient) -> None:
        with self._gate:
            self._current = None
        self._past_sessions.append(client.session)

    # -------------------------------------------------------------- planning

    def _submit(
        self,
        direction: Direction,
        job: Job,
        after: Fence,
        end: Callable[[Job, WorkerClient | None, str | None], None],
    ) -> None:
        """Queue a job's copies, or end the job where they cannot be made."""
        with self._gate:
            client = self._current
            if client is not None and client.session == job.session:
                refusal = self._refusal(job, client.arena)
                if refusal is None:
                    self._copy_engine.submit(
                        direction,
                        self._copies(direction, job, client.arena),
                        after=after,
                        keep_alive=client.arena,
                        ends=Ends(
                            lambda ticket: end(job, client, ticket.error),
                            self._landing(direction, job),
                        ),
                    )
                    return
            else:
                # Of a session that this rank has left, or is about to enter: then the lease
                # is live, and ends when the rank is in.
                refusal = "this rank is not in the job's session"
                self._unended.append((job.session, job.lease_id))
                client = None
        end(job, client, refusal)

    def _landing(self, direction: Direction, job: Job) -> Callable[[], None] | None:
        """Return what is to be done when a job's copies have landed, before it ends."""
        if direction is Direction.STORE or self._checksums.is_on:
            return None  # a store is there once it is committed, a load to be checked once it has
        return lambda: self._note_loaded(job)

    def _refusal(self, job: Job, arena: Arena) -> str | None:
        """Return why a job may not touch the arena, or None."""
        for part_job in job.parts:
            num_bytes = self._layout.parts[part_job.part].rank_bytes * self._identity.num_ranks
            if not all(0 <= slot <= arena.size_bytes - num_bytes for slot in part_job.slots):
                logger.error("event=job_refused request=%s reason=slot_outside", job.request_id)
                return "a slot lies outside the arena"
        if not self._copy_engine.is_ready(self._end_offset(job)):
            return NOT_READY
        return None

    def _end_offset(self, job: Job) -> int:
        """Return the end of the last byte in the arena that ``job`` touches."""
        num_ranks = self._identity.num_ranks
        return max(
            (
                max(part_job.slots) + self._layout.parts[part_job.part].rank_bytes * num_ranks
                for part_job in job.parts
            ),
            default=0,
        )

    def _copies(self, direction: Direction, job: Job, arena: Arena) -> Copies:
        planned: list[Copies] = []
        for part_job in job.parts:
            part = self._layout.parts[part_job.part]
            base = arena.address + self._rank * part.rank_bytes
            planned.append(
                plan_copies(
                    direction,
                    part,
                    self._memory[part_job.part],
                    part_job.tables,
                    [base + offset for offset in part_job.slots],
                )
            )
        return Copies.concatenate(planned)


def _last_slot(job: Job) -> int:
    """Return the largest offset of a slot that a job touches."""
    return max((slot for part_job in job.parts for slot in part_job.slots), default=0)


def _summed(job: Job) -> list[Summed]:
    """Return the slots of a job, and what their checksums are seeded with, if they have any."""
    return [
        Summed(part_job.part, slot, seed)
        for part_job in job.parts
        for slot, seed in zip(
            part_job.slots, part_job.seeds or [None] * len(part_job.slots), strict=True
        )
    ]
