"""A pool so small that replicas crowd each other out, and short forms of their verbs."""

from collections.abc import Sequence
from typing import Any

from millpond.model.leases import WriteLease
from millpond.model.limits import KIB, MIB
from millpond.model.names import Coverage
from millpond.model.namespace import PartSpec
from millpond.model.retention import Retention
from millpond.pool.pool import Pool
from tests.pool_values import KEY_BYTES, namespace

PAGES = PartSpec("pages", Coverage.EVERY, 256 * KIB)
STATE = PartSpec("state", Coverage.LAST, 512 * KIB)
SMALL = PartSpec("pages", Coverage.EVERY, 128 * KIB)
S = 10**9
ANY_STATES = Retention(state_ratio=1)


class Crowd:
    """A pool of ``num_extents`` extents of 1 MiB, and one session for each namespace."""

    def __init__(
        self,
        num_extents: int,
        *namespaces: tuple[PartSpec, ...],
        retention: Retention = ANY_STATES,
    ) -> None:
        self.pool = Pool(
            epoch=1, arena_bytes=num_extents * MIB, extent_bytes=MIB, retention=retention
        )
        self.parts = namespaces
        for number, parts in enumerate(namespaces):
            assert self.pool.add_namespace(namespace(*parts)) == number
        self.sessions = [
            self.pool.open_session(replica="north", namespace_id=number, num_ranks=1)
            for number in range(len(namespaces))
        ]

    def reserve(
        self,
        keys: bytes,
        *,
        at: int,
        states: Sequence[int] = (),
        model: int = 0,
        request_id: str | None = None,
    ) -> WriteLease:
        return self.pool.reserve(
            self.sessions[model],
            keys,
            KEY_BYTES,
            first_block=0,
            parts=((), states)[: len(self.parts[model])],
            now_ns=at * S,
            request_id=request_id,
        )

    def write(self, keys: bytes, *, at: int, states: Sequence[int] = (), model: int = 0) -> int:
        """Write and commit; return how many slots were granted."""
        lease = self.reserve(keys, at=at, states=states, model=model)
        if lease.lease_id is None:
            return 0
        self.finish(lease.lease_id, at=at, model=model)
        return sum(len(row) - row.count(2**64 - 1) for row in lease.offsets)

    def finish(self, lease_id: int, *, at: int, ok: bool = True, model: int = 0) -> None:
        self.pool.finish(self.sessions[model], lease_id, rank=None, ok=ok, now_ns=at * S)
        self.pool.check_invariants()

    def pin(self, keys: bytes, *, at: int, first_block: int = 0, model: int = 0) -> int:
        lease = self.pool.pin(
            self.sessions[model], keys, KEY_BYTES, first_block=first_block, now_ns=at * S
        )
        assert lease.lease_id is not None
        return lease.lease_id

    def read(self, keys: bytes, *, at: int, model: int = 0) -> None:
        self.finish(self.pin(keys, at=at, model=model), at=at, model=model)

    def usable(self, keys: bytes, *, model: int = 0) -> int:
        return self.pool.lookup(model, keys, KEY_BYTES).num_blocks

    def now(self) -> Any:  # noqa: ANN401 (nested figures)
        return self.pool.statistics()

    def num_spare(self) -> list[int]:
        """Return how many slots of each size would go first."""
        return [size["num_spare"] for size in self.now()["slot_sizes"]]

    def num_committed(self) -> list[int]:
        return [size["num_slots"]["committed"] for size in self.now()["slot_sizes"]]
