"""What the scheduler's side and the workers' side of the connector tell each other."""

from dataclasses import dataclass, field
from typing import Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class PartJob:
    """Blocks of one part to copy: ``slots[i]`` is the arena offset of block i's slot.

    ``tables[g][i]`` lists the engine blocks of group g that make it up; 0 is skipped.
    ``seeds[i]`` goes into its checksums; there are none where nothing is summed.
    """

    part: int
    slots: list[int]
    tables: dict[int, list[list[int]]]
    seeds: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Job:
    """Copies under one lease of one session, for one request.

    ``job_id`` is unique within the engine process. A worker whose session is another one
    does not touch the arena for it: a store is dropped, a load fails and is recomputed.
    """

    job_id: int
    request_id: str
    session: int
    lease_id: int
    parts: tuple[PartJob, ...]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One scheduler step's work for the workers.

    ``delayed`` names finished requests whose stores are in flight: each worker reports them
    as sent when its own copies have ended, and the engine keeps stepping until then.
    ``computes``: some request has tokens in this step. ``uses_pages``: that, or pages are zeroed
    or copied before it.
    """

    loads: list[Job] = field(default_factory=list[Job])
    stores: list[Job] = field(default_factory=list[Job])
    delayed: set[str] = field(default_factory=set[str])
    computes: bool = True
    uses_pages: bool = True


NOT_READY: Final = "the arena is not ready for copies yet"
"""Why a load fails whose slots are not registered with the device, yet or at all."""


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """What ended since the last step, counted over ranks."""

    stores_done: dict[int, int] = field(default_factory=dict[int, int])
    loads_failed: dict[str, str] = field(default_factory=dict[str, str])
    unready_offset: int | None = None
    """Slots from here on were found not ready for copies."""

    def note_unready(self, offset: int) -> None:
        """Take note of a slot that was found not ready."""
        known = self.unready_offset
        self.unready_offset = offset if known is None else min(known, offset)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "StepResults":
        """Return the sum of two ranks' results."""
        if not isinstance(other, StepResults):
            raise ValueError(f"cannot add {type(other).__name__} to StepResults")
        done = dict(self.stores_done)
        for job_id, num_ranks in other.stores_done.items():
            done[job_id] = done.get(job_id, 0) + num_ranks
        sum_ = StepResults(done, self.loads_failed | other.loads_failed, self.unready_offset)
        if other.unready_offset is not None:
            sum_.note_unready(other.unready_offset)
        return sum_


@dataclass
class RankLayout(KVConnectorHandshakeMetadata):
    """What only a worker sees and the namespace must fix: its tensors and kernels.

    ``refusal`` is the reason why this rank cannot take part, or empty.
    """

    layout: str
    attention_backend: str
    refusal: str = ""
