"""One process of the full-pool check: it is to the pool what an engine is.

    reserve    slots for a chain of new blocks                  under the turn
    store      its pattern, by the real copy engine
    commit     and pin at once: pinned blocks are not evicted   under the turn
    ...        until the pool says that it is full
    compare    every byte of all that is pinned
    free       by ending the pins, in random order

A turn is what two processes share: a reserve of one must not evict what the other one has
committed and not pinned yet.
"""

import hashlib
import random
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.synchronize import Lock
from typing import Final, Self

from millpond.arena.arena import Arena
from millpond.gate.pool_device import Buffer, CheckedDevice, Mover, Pages
from millpond.gate.pool_errors import PoolFault
from millpond.gate.pool_pattern import Stamp
from millpond.model.errors import ExpectedError, RequestTimedOut, SetupError
from millpond.model.limits import NAME_LENGTH_MAX
from millpond.model.names import Coverage
from millpond.model.namespace import Namespace, PartSpec
from millpond.service.client import ReplicaIdentity, SchedulerClient, WorkerClient

_KEY_BYTES: Final = 32
_TURN_S_MAX: Final = 60.0
_COMMIT_S_MAX: Final = 30.0
_POLL_S: Final = 0.0005
_CHUNKS_WANTED: Final = 64
"""Chains that a filling has at least, where slots are not too large: they are freed one by one
in random order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSpec:
    """Who a process is. ``run`` is drawn anew for each check: nobody else has its blocks."""

    socket: str
    run: str
    process: int
    slot_sizes: tuple[int, ...]
    seed: int

    def replica(self, slot_bytes: int) -> str:
        """Return the name under which the pool knows the session for one slot size."""
        return f"gate-{self.run}-{self.process}-{slot_bytes}"[:NAME_LENGTH_MAX]

    def replicas(self) -> list[str]:
        """Return all names of this process."""
        return [self.replica(size) for size in self.slot_sizes]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chain of blocks that a process has stored: where they lie, and the pin that holds them.

    ``lease_id`` is None for another process's.
    """

    slot_bytes: int
    stamp: Stamp
    offsets: "array[int]"
    lease_id: int | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all its slots."""
        return self.slot_bytes * len(self.offsets)

    def for_others(self) -> Self:
        """Return it without the pin, which is this process's own."""
        return type(self)(self.slot_bytes, self.stamp, self.offsets, None)


class _Session:
    """The connections for one slot size, as an engine's scheduler and worker have them."""

    def __init__(self, spec: ClientSpec, slot_bytes: int, arena: Arena | None) -> None:
        self.slot_bytes = slot_bytes
        self.num_stored = 0
        """Blocks in this filling."""
        identity = ReplicaIdentity(
            replica=spec.replica(slot_bytes),
            session_key=spec.replica(slot_bytes),
            num_ranks=1,
            namespace=_namespace(spec.run, slot_bytes),
        )
        self.scheduler = SchedulerClient.connect(spec.socket, identity)
        try:
            self.worker = WorkerClient.connect(spec.socket, identity, rank=0, arena=arena)
        except BaseException:
            self.scheduler.close()
            raise

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


class PoolClient:
    """See the module. ``on_bytes`` hears of every chunk that was stored or compared."""

    def __init__(
        self, spec: ClientSpec, device: CheckedDevice, turn: Lock, on_bytes: Callable[[int], None]
    ) -> None:
        self.spec = spec
        self.chunks: list[Chunk] = []
        self._turn = turn
        self._on_bytes = on_bytes
        self._chance = random.Random(spec.seed * 1000 + spec.process)
        self._sessions: dict[int, _Session] = {}
        self._writing: list[tuple[_Session, int]] = []
        """The write lease that is live right now."""
        with ExitStack() as held:
            for size in spec.slot_sizes:
                known = next(iter(self._sessions.values())).worker.arena if self._sessions else None
                self._sessions[size] = _Session(spec, size, known)
                held.callback(self._sessions[size].close)
            self.arena = self._sessions[spec.slot_sizes[0]].worker.arena
            self.mover = Mover(device)
            held.callback(self._stop_copies)
            buffer = Buffer(device, spec.slot_sizes)
            self._pages = {size: Pages(buffer, size) for size in spec.slot_sizes}
            self.mover.adopt(self.arena)
            self._held = held.pop_all()

    def close(self) -> None:
        """End all copies, then all leases and the sessions."""
        self._held.close()

    def _stop_copies(self) -> None:
        # guards: with a copy in flight the mapping stays, and the slots stay the lease's, until
        # the process ends (E5, E6).
        if not self.mover.close():
            return
        self.arena.close()
        with suppress(ExpectedError):  # the daemon is gone, and the leases with it
            for session, lease_id in self._writing:
                session.worker.finish([lease_id], ok=False)
            self.free()

    def begin(self, filling: int) -> None:
        """Store and pin one chain of new blocks."""
        for session in self._sessions.values():
            session.num_stored = 0
        self._store_some(self._chance.choice(list(self._sessions.values())), filling)

    def fill(self, filling: int) -> None:
        """Go on with all sizes, in random turns, until the pool is full."""
        left = list(self._sessions.values())
        while left:
            session = self._chance.choice(left)
            if not self._store_some(session, filling):
                left.remove(session)

    def compare(self, chunks: Sequence[Chunk]) -> int:
        """Read all of ``chunks`` back whole; return the bytes; raises ``PoolFault``.

        Another process's chunks are pinned meanwhile.
        """
        num_bytes = 0
        for chunk in chunks:
            with self._pinned(chunk):
                difference = self._pages[chunk.slot_bytes].compare(
                    self.mover, self.arena, chunk.stamp, chunk.offsets, self._chance
                )
            if difference is not None:
                raise PoolFault(str(difference))
            num_bytes += chunk.num_bytes
            self._on_bytes(chunk.num_bytes)
        return num_bytes

    def free(self) -> None:
        """End all pins, in random order."""
        self._chance.shuffle(self.chunks)
        for chunk in self.chunks:
            if chunk.lease_id is not None:
                self._sessions[chunk.slot_bytes].worker.finish([chunk.lease_id], ok=True)
        self.chunks.clear()

    # -------------------------------------------------------------- one chunk

    def _store_some(self, session: _Session, filling: int) -> bool:
        """Store one chunk; return False when the pool has no slot left for it."""
        pages = self._pages[session.slot_bytes]
        num_slots = self.arena.size_bytes // session.slot_bytes
        num_max = min(pages.num_blocks_max, max(1, num_slots // _CHUNKS_WANTED))
        stamp = Stamp(filling, self.spec.process, session.num_stored)
        keys = self._keys(session.slot_bytes, stamp, self._chance.randint(1, num_max))
        with self._my_turn():
            lease = session.scheduler.reserve(keys, _KEY_BYTES, first_block=0, parts=[()])
        if lease.lease_id is None:
            if lease.reason == "full":
                return False
            raise _refused(lease.reason)
        self._writing.append((session, lease.lease_id))
        offsets = lease.offsets[0]
        num_blocks = len(offsets)
        pages.store(self.mover, self.arena, stamp, offsets, self._chance)
        keys = keys[: num_blocks * _KEY_BYTES]
        with self._my_turn():
            session.worker.finish([lease.lease_id], ok=True)
            self._writing.clear()
            self._wait_committed(session, keys)
            chunk = self._pin(session, keys, Chunk(session.slot_bytes, stamp, offsets, None))
        session.num_stored += num_blocks
        self.chunks.append(chunk)
        self._on_bytes(chunk.num_bytes)
        return True

    def _pin(self, session: _Session, keys: bytes, chunk: Chunk) -> Chunk:
        lease = session.scheduler.pin(keys, _KEY_BYTES, first_block=0)
        if lease.lease_id is None or lease.num_blocks != len(chunk.offsets):
            raise PoolFault(
                f"{lease.num_blocks} of {len(chunk.offsets)} blocks of a committed chain were "
                f"there to be read ({lease.reason or lease.outcome})"
            )
        if lease.offsets[0][1::2] != chunk.offsets:
            raise PoolFault(f"{chunk.stamp} was written to other slots than it is read from")
        return Chunk(chunk.slot_bytes, chunk.stamp, chunk.offsets, lease.lease_id)

    @contextmanager
    def _pinned(self, chunk: Chunk) -> Generator[None]:
        if chunk.lease_id is not None:
            yield
            return
        session = self._sessions[chunk.slot_bytes]
        keys = self._keys(chunk.slot_bytes, chunk.stamp, len(chunk.offsets))
        lease_id = self._pin(session, keys, chunk).lease_id
        assert lease_id is not None
        try:
            yield
        finally:
            session.worker.finish([lease_id], ok=True)

    def _wait_committed(self, session: _Session, keys: bytes) -> None:
        """Wait until the commit, which goes over the worker's connection, has arrived."""
        deadline_s = time.monotonic() + _COMMIT_S_MAX
        num_blocks = len(keys) // _KEY_BYTES
        while session.scheduler.lookup(keys, _KEY_BYTES).num_blocks < num_blocks:
            if time.monotonic() > deadline_s:
                raise PoolFault(f"{num_blocks} blocks were not committed in {_COMMIT_S_MAX:g} s")
            time.sleep(_POLL_S)

    @contextmanager
    def _my_turn(self) -> Generator[None]:
        if not self._turn.acquire(timeout=_TURN_S_MAX):
            raise RequestTimedOut(f"the other process kept its turn for {_TURN_S_MAX:g} s")
        try:
            yield
        finally:
            self._turn.release()

    def _keys(self, slot_bytes: int, stamp: Stamp, num_blocks: int) -> bytes:
        chain = f"{self.spec.run}/{slot_bytes}/{stamp.process}/{stamp.filling}"
        return b"".join(
            hashlib.sha256(f"{chain}/{stamp.first_block}/{i}".encode()).digest()
            for i in range(num_blocks)
        )


def _refused(reason: str) -> Exception:
    if reason == "off":
        return SetupError("the pool is switched off: millpond pool on")
    if reason == "not-admitted":
        return SetupError(
            "this pool keeps only what was asked for twice, so that it cannot be filled: "
            "start it with --admission always"
        )
    return ExpectedError(f"the pool granted nothing: {reason}")


def _namespace(run: str, slot_bytes: int) -> Namespace:
    return Namespace(
        model="millpond gate pool",
        revision=run,
        weights="",
        dtype="int64",
        kv_cache_dtype="",
        quantization="",
        block_tokens=256,
        engine_block_tokens=256,
        tensor_parallel_size=1,
        attention_backend="",
        layout=str(slot_bytes),
        hash_algorithm="sha256",
        hash_seed=run,
        engine="gate",
        engine_version="",
        parts=(PartSpec("pages", Coverage.EVERY, slot_bytes),),
    )
