"""The full-pool check: every slot of a pool handed out, written and read back whole.

    first       from an empty pool to the last slot
    again       after all slots were freed in random order
    shared      beside a second live client: each takes what it gets, writes and reads that
                back, and the first one reads what the second one has written

Slots are checked to be given once, aligned, inside the arena, and to be all there are; every
byte is compared, after the whole pool was written, with a pattern that is another in every
word. The daemon, its clients and the copy engine are the real ones; engine pages are a fixed
buffer that is used again and again.
"""

import multiprocessing
import secrets
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast

from millpond.gate.pool_client import Chunk, ClientSpec, PoolClient
from millpond.gate.pool_device import CheckedDevice, Moved, open_device
from millpond.gate.pool_errors import PoolFault, PoolInUse
from millpond.gate.pool_other import Order, OtherClient
from millpond.gate.pool_slots import check_full, check_slots, is_free, require_sizes
from millpond.model.errors import ConfigError, MillpondError, SetupError
from millpond.model.limits import KIB, MIB
from millpond.service.client import AdminClient
from millpond.transfer.copies import Direction
from millpond.transfer.device import CopyFailed

DEFAULT_SLOT_SIZES: Final = (1 * MIB, 200 * KIB)
"""Pages and states of a hybrid, say; the second does not divide an extent."""
_ADMIN_TIMEOUT_S: Final = 30.0
_SETTLE_S_MAX: Final = 60.0
_POLL_S: Final = 0.01
_WAIT_S_MAX: Final = 300.0
_BYTES_PER_S_MIN: Final = 20 * MIB
"""Slower than this, beside ``_WAIT_S_MAX``, the second client is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCheckOptions:
    """What to check. ``device`` is ``cpu`` or ``cuda``; ``seed`` decides the order of things."""

    socket: str
    slot_sizes: tuple[int, ...] = DEFAULT_SLOT_SIZES
    device: str = "cpu"
    seed: int = 1


@dataclass(frozen=True, slots=True)
class FillingResult:
    """One filling. Rates are of the copies alone, ``seconds`` of all of it."""

    name: str
    num_slots: int
    num_slots_by_size: dict[int, int]
    num_bytes: int
    num_bytes_compared: int
    seconds: float
    store_gb_per_s: float
    load_gb_per_s: float


@dataclass(slots=True)
class PoolReport:
    """What was checked, and the first thing that is wrong, if any."""

    device: str
    seed: int
    arena_bytes: int = 0
    extent_bytes: int = 0
    fillings: list[FillingResult] = field(default_factory=list[FillingResult])
    fault: str | None = None

    def as_json(self) -> dict[str, object]:
        """Return the report as plain values."""
        return asdict(self)


@dataclass(slots=True)
class _Filling:
    """A filling under way: its number, and what is known of it so far."""

    name: str
    number: int
    started_at: float
    chunks: list[Chunk]
    num_bytes_compared: int = 0
    moved: dict[Direction, Moved] = field(default_factory=lambda: {d: Moved() for d in Direction})

    def add(self, moved: dict[Direction, Moved] | None) -> None:
        for direction, counts in (moved or {}).items():
            self.moved[direction].add_all(counts)

    @property
    def num_bytes(self) -> int:
        return sum(chunk.num_bytes for chunk in self.chunks)


class PoolCheck:
    """Checks an empty pool, and leaves it empty. ``on_step`` hears what is being done."""

    def __init__(
        self,
        options: PoolCheckOptions,
        *,
        on_step: Callable[[str, str], None],
        open_device: Callable[[str], CheckedDevice] = open_device,
    ) -> None:
        self.options = options
        self._on_step = on_step
        self._open_device = open_device
        self._specs = [
            ClientSpec(
                socket=options.socket,
                run=run,
                process=process,
                slot_sizes=options.slot_sizes,
                seed=options.seed,
            )
            for run in [secrets.token_hex(8)]
            for process in range(2)
        ]
        self._turn = multiprocessing.get_context("spawn").Lock()
        self._num_strangers = 0
        self._stage = ""
        self._num_bytes_done = 0
        self.report = PoolReport(options.device, options.seed)

    def run(self) -> PoolReport:
        """Return what was found; a ``fault`` ends the check.

        Raises ``PoolInUse`` for a pool that is not empty, or that somebody else joins
        meanwhile, ``NotRegistered``, ``TooLittleMemory``, and ``ExpectedError`` where the
        daemon or the second client is away or late.
        """
        with AdminClient.connect(self.options.socket, timeout_s=_ADMIN_TIMEOUT_S) as admin:
            self._admin = admin
            self._require_empty()
            self._wait_for_memory()
            try:
                self._fill_all()
            except (PoolFault, CopyFailed) as fault:
                # A stranger's blocks would look like slots that are missing.
                self._require_no_stranger()
                self.report.fault = str(fault)
            finally:
                # Also after Ctrl-C; where the daemon is gone there is nothing to leave behind.
                with suppress(MillpondError):
                    self._leave_empty()
        return self.report

    def _fill_all(self) -> None:
        with ExitStack() as held:
            client = PoolClient(
                self._specs[0],
                self._open_device(self.options.device),
                self._turn,
                self._count_bytes,
            )
            held.callback(client.close)
            self.report.arena_bytes = client.arena.size_bytes
            self.report.extent_bytes = client.arena.extent_bytes
            for number, name in enumerate(("first", "again")):
                self._fill_alone(client, self._begin(name, number))
                self._free(client, None)
            self._show("starting a second client", "other")
            other = held.enter_context(OtherClient(self._specs[1], self.options.device, self._turn))
            self._fill_shared(client, other, self._begin("shared", 2))
            self._free(client, other)

    def _begin(self, name: str, number: int) -> _Filling:
        return _Filling(name, number, time.monotonic(), [])

    def _fill_alone(self, client: PoolClient, filling: _Filling) -> None:
        self._step(f"{filling.name}: filling")
        client.begin(filling.number)
        client.fill(filling.number)
        filling.chunks += client.chunks
        self._check_slots(filling)
        self._step(f"{filling.name}: reading back")
        filling.num_bytes_compared += client.compare(client.chunks)
        filling.add(client.mover.take_counts())
        self._finish(filling)

    def _fill_shared(self, client: PoolClient, other: OtherClient, filling: _Filling) -> None:
        limit_s = _WAIT_S_MAX + client.arena.size_bytes / _BYTES_PER_S_MIN
        self._step(f"{filling.name}: filling")
        # Both get a share, however much faster one of them is.
        other.tell(Order("begin", filling.number))
        other.wait(_WAIT_S_MAX)
        client.begin(filling.number)
        other.tell(Order("fill", filling.number))
        client.fill(filling.number)
        filled = other.wait(limit_s)
        filling.add(filled.moved)
        filling.chunks += [*client.chunks, *filled.chunks]
        if not client.chunks or not filled.chunks:
            raise SetupError(
                "one of the two clients took all slots: the pool is too small for its slots"
            )
        self._check_slots(filling)
        self._step(f"{filling.name}: reading back")
        other.tell(Order("compare"))
        filling.num_bytes_compared += client.compare(client.chunks)
        compared = other.wait(limit_s)
        filling.num_bytes_compared += compared.num_bytes_compared
        filling.add(compared.moved)
        self._step(f"{filling.name}: reading what the second client wrote")
        client.compare(filled.chunks)
        filling.add(client.mover.take_counts())
        self._finish(filling)

    def _check_slots(self, filling: _Filling) -> None:
        offsets: defaultdict[int, list[array[int]]] = defaultdict(list)
        for chunk in filling.chunks:
            offsets[chunk.slot_bytes].append(chunk.offsets)
        self._require_no_stranger()
        check_slots(offsets, self.report.arena_bytes)
        num_slots = _num_slots(filling.chunks)
        check_full(self._pool(), num_slots)
        require_sizes(num_slots, self.options.slot_sizes)
        self._admin.check()

    def _finish(self, filling: _Filling) -> None:
        if filling.num_bytes_compared != filling.num_bytes:
            raise PoolFault(
                f"{filling.num_bytes_compared} of {filling.num_bytes} bytes were compared"
            )
        by_size = _num_slots(filling.chunks)
        self.report.fillings.append(
            FillingResult(
                name=filling.name,
                num_slots=sum(by_size.values()),
                num_slots_by_size=by_size,
                num_bytes=filling.num_bytes,
                num_bytes_compared=filling.num_bytes_compared,
                seconds=time.monotonic() - filling.started_at,
                store_gb_per_s=_gb_per_s(filling.moved[Direction.STORE]),
                load_gb_per_s=_gb_per_s(filling.moved[Direction.LOAD]),
            )
        )

    def _free(self, client: PoolClient, other: OtherClient | None) -> None:
        """Free every slot, in random order: forgotten first, each is free when its pin ends."""
        self._step("freeing in random order")
        self._require_no_stranger()
        self._admin.flush()
        client.free()
        if other is not None:
            other.tell(Order("free"))
            other.wait(_WAIT_S_MAX)
        deadline_s = time.monotonic() + _SETTLE_S_MAX
        while not is_free(self._pool()):
            if time.monotonic() > deadline_s:
                raise PoolFault(f"slots were not free {_SETTLE_S_MAX:g} s after their last use")
            time.sleep(_POLL_S)

    # -------------------------------------------------------------- the pool

    def _pool(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self._admin.status()["pool"])

    def _require_empty(self) -> None:
        pool = self._pool()
        self._num_strangers = pool["num_replicas"]
        used = {
            "replicas": pool["num_sessions"],
            "blocks": pool["num_blocks"],
            "leases": pool["num_leases"],
            "slots in quarantine": pool["num_slots"]["quarantined"],
        }
        found = ", ".join(f"{number} {name}" for name, number in used.items() if number)
        if found:
            raise PoolInUse(
                f"the pool at {self.options.socket} is in use ({found}) and was left alone: "
                "give --size for a pool of its own, or stop its replicas and run "
                "`millpond pool flush`"
            )

        largest = max(self.options.slot_sizes)
        if largest > pool["extent_bytes"]:
            raise ConfigError(
                f"slots of {largest} bytes do not fit into this pool's extents of "
                f"{pool['extent_bytes']} bytes: choose a smaller --slot-size"
            )

    def _wait_for_memory(self) -> None:
        """Wait until all memory is there: before, a full pool does not stay full."""
        began_s = time.monotonic()
        while True:
            memory = self._admin.memory()
            if memory.is_complete:
                return
            if memory.problem is not None:
                raise SetupError(f"the pool did not get all of its memory: {memory.problem}")
            if time.monotonic() - began_s > _WAIT_S_MAX + memory.size_bytes / _BYTES_PER_S_MIN:
                raise SetupError("the pool is still taking its memory: try again later")
            self._show("waiting for the pool's memory", "memory")
            time.sleep(_POLL_S)

    def _require_no_stranger(self) -> None:
        mine = {name for spec in self._specs for name in spec.replicas()}
        pool = self._pool()
        num_mine = len(mine & pool["replicas"].keys())
        if pool["num_replicas"] != self._num_strangers + num_mine:
            raise PoolInUse(
                f"a replica has joined the pool at {self.options.socket} during the check, "
                "which therefore says nothing; stop the replicas, or give --size"
            )

    def _leave_empty(self) -> None:
        self._require_no_stranger()
        self._admin.flush()

    # -------------------------------------------------------------- progress

    def _step(self, stage: str) -> None:
        self._num_bytes_done = 0
        self._show(stage, stage)

    def _show(self, text: str, stage: str) -> None:
        self._stage = stage
        self._on_step(text, stage)

    def _count_bytes(self, num_bytes: int) -> None:
        self._num_bytes_done += num_bytes
        ratio = self._num_bytes_done / self.report.arena_bytes
        self._show(f"{self._stage}: {ratio:.0%} of the pool", self._stage)


def _num_slots(chunks: Sequence[Chunk]) -> dict[int, int]:
    by_size: dict[int, int] = {}
    for chunk in chunks:
        by_size[chunk.slot_bytes] = by_size.get(chunk.slot_bytes, 0) + len(chunk.offsets)
    return by_size


def _gb_per_s(moved: Moved) -> float:
    return moved.num_bytes / moved.elapsed_ns if moved.elapsed_ns else 0.0
