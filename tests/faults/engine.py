"""An engine without a model: scheduler and workers in one process, and bytes that tell on it.

What is written for a block follows from its key alone. So each reader can say of every byte
that it reads under a lease whether it is the one that belongs there.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Self

from millpond.arena.arena import Arena
from millpond.model.leases import NO_SLOT, LookupResult, ReadLease, WriteLease
from millpond.model.names import Coverage
from millpond.model.namespace import PartSpec
from millpond.service.client import ReplicaIdentity, SchedulerClient, WorkerClient
from tests.faults.world import KEY_BYTES, SLOT_BYTES, block_key, eventually, keys, namespace


@dataclass(frozen=True)
class Kind:
    """What an engine shares under: its parts, and how many ranks copy them."""

    name: str
    parts: tuple[PartSpec, ...]
    num_ranks: int = 1

    def identity(self, replica: str, session_key: str) -> ReplicaIdentity:
        """Return who an engine of this kind is."""
        return ReplicaIdentity(
            replica=replica,
            session_key=session_key,
            num_ranks=self.num_ranks,
            namespace=namespace(
                layout=self.name, parts=self.parts, tensor_parallel_size=self.num_ranks
            ),
        )

    def expected(self, part: int, key: bytes) -> bytes:
        """Return the bytes of a whole slot."""
        return _stream(f"{self.name}/{part}/".encode() + key, self.parts[part].slot_bytes)


@lru_cache(maxsize=256)
def _stream(seed: bytes, num_bytes: int) -> bytes:
    """Return bytes of which no two seeds, and no two places, have the same."""
    return hashlib.shake_128(seed).digest(num_bytes)


PLAIN = Kind("plain", (PartSpec("pages", Coverage.EVERY, SLOT_BYTES),))
HYBRID = Kind(
    "hybrid",
    (
        PartSpec("pages", Coverage.EVERY, SLOT_BYTES // 2),
        PartSpec("state", Coverage.LAST, 3 * SLOT_BYTES // 4),
    ),
)
TWO_RANKS = Kind("two ranks", (PartSpec("pages", Coverage.EVERY, SLOT_BYTES),), num_ranks=2)
KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (PLAIN, HYBRID, TWO_RANKS)}


class Piece(NamedTuple):
    """One rank's slice of one slot, and what belongs into it."""

    rank: int
    offset_bytes: int
    content: bytes


def pieces_to_write(kind: Kind, lease: WriteLease, prefix: str) -> Iterator[Piece]:
    """Yield what a writer has to copy, in the order of the blocks."""
    for part, offsets in enumerate(lease.offsets):
        for block, offset in enumerate(offsets, lease.first_block):
            if offset != NO_SLOT:
                yield from _slices(kind, part, block_key(prefix, block), offset)


def pieces_to_read(kind: Kind, lease: ReadLease, prefix: str) -> Iterator[Piece]:
    """Yield what a reader must find."""
    for part, pairs in enumerate(lease.offsets):
        for block, offset in zip(pairs[0::2], pairs[1::2], strict=True):
            yield from _slices(kind, part, block_key(prefix, block), offset)


def _slices(kind: Kind, part: int, key: bytes, offset_bytes: int) -> Iterator[Piece]:
    content = kind.expected(part, key)
    num_bytes = len(content) // kind.num_ranks
    for rank in range(kind.num_ranks):
        start = rank * num_bytes
        yield Piece(rank, offset_bytes + start, content[start : start + num_bytes])


@dataclass
class Engine:
    """A connected engine; ``drained`` is what its workers say of earlier sessions."""

    socket_path: str
    replica: str
    kind: Kind = PLAIN
    session_key: str = ""
    drained: Sequence[int] = ()
    arena: Arena | None = None
    scheduler: SchedulerClient = field(init=False)
    workers: list[WorkerClient] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.connect_scheduler()
        try:
            for rank in range(self.kind.num_ranks):
                self.connect_worker(rank)
        except BaseException:
            self.disconnect()
            raise

    def connect_scheduler(self) -> None:
        """Open the session."""
        self.scheduler = SchedulerClient.connect(self.socket_path, self.identity)

    def connect_worker(self, rank: int) -> None:
        """Join the session as one rank."""
        worker = WorkerClient.connect(
            self.socket_path, self.identity, rank=rank, drained=self.drained, arena=self.arena
        )
        self.workers.append(worker)
        self.arena = worker.arena

    @property
    def identity(self) -> ReplicaIdentity:
        """Who this engine is."""
        return self.kind.identity(self.replica, self.session_key or self.replica)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.disconnect()
        self.mapping.close()

    @property
    def mapping(self) -> Arena:
        """The arena, which outlives the connections."""
        assert self.arena is not None
        return self.arena

    def disconnect(self) -> None:
        """Close all connections and keep the mapping."""
        for client in (self.scheduler, *self.workers):
            client.close()

    def lookup(self, prefix: str, num_blocks: int) -> LookupResult:
        """Ask how much of a prefix is there."""
        return self.scheduler.lookup(keys(prefix, num_blocks), KEY_BYTES)

    def reserve(self, prefix: str, num_blocks: int) -> WriteLease:
        """Ask for all that is missing of a prefix, with a state after every fourth block."""
        parts = [
            () if part.coverage is Coverage.EVERY else range(3, num_blocks, 4)
            for part in self.kind.parts
        ]
        return self.scheduler.reserve(
            keys(prefix, num_blocks), KEY_BYTES, first_block=0, parts=parts
        )

    def pin(self, prefix: str, num_blocks: int) -> ReadLease:
        """Hold what is there of a prefix."""
        return self.scheduler.pin(keys(prefix, num_blocks), KEY_BYTES, first_block=0)

    def finish(self, lease_id: int, *, ok: bool = True) -> None:
        """End a lease for all ranks."""
        for worker in self.workers:
            worker.finish([lease_id], ok=ok)

    def write(self, piece: Piece) -> None:
        """Copy one piece into the arena."""
        view = self.mapping.view(piece.offset_bytes, len(piece.content))
        view[:] = piece.content
        view.release()

    def holds(self, piece: Piece) -> bool:
        """Return whether the arena has the bytes of a piece in its place."""
        view = self.mapping.view(piece.offset_bytes, len(piece.content))
        found = bytes(view)
        view.release()
        return found == piece.content

    def store(self, prefix: str, num_blocks: int) -> None:
        """Write and commit a prefix; returns when it can be found."""
        lease = self.reserve(prefix, num_blocks)
        assert lease.lease_id is not None, lease.reason
        for piece in pieces_to_write(self.kind, lease, prefix):
            self.write(piece)
        self.finish(lease.lease_id)
        self.wait_found(prefix, num_blocks)

    def wait_found(self, prefix: str, num_blocks: int) -> None:
        """Wait until a prefix is committed: the workers' connections are behind ours."""
        eventually(
            lambda: self.lookup(prefix, num_blocks).num_blocks == num_blocks,
            f"prefix {prefix} committed",
        )

    def verify(self, prefix: str, num_blocks: int) -> None:
        """Read a prefix that must be there, byte by byte."""
        lease = self.pin(prefix, num_blocks)
        assert (lease.lease_id is not None, lease.num_blocks) == (True, num_blocks), lease
        assert lease.lease_id is not None
        wrong = [
            piece.offset_bytes
            for piece in pieces_to_read(self.kind, lease, prefix)
            if not self.holds(piece)
        ]
        self.finish(lease.lease_id)
        assert not wrong, f"prefix {prefix}: other bytes at offsets {wrong}"
