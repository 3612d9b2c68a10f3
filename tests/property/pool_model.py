"""What the pool has to do, said again in dicts and sets, without any regard to speed.

A path is a tuple of letters; its key is a digest of it. An ``Entry`` is one part of one block
in one place. It is alive while the index has it or a live lease holds it, and *no two entries
that are alive may overlap in memory*: that is the safety the pool is there for.

What is evicted is the pool's choice. The model does not predict it: it asks what is gone after
a reservation and checks that each of it was free to go (``note_evicted``).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from millpond.model.names import Admission, Coverage, Outcome, SlotRef
from millpond.model.namespace import Namespace, aligned_slot_bytes
from tests.pool_values import KEY_BYTES

Path = tuple[str, ...]


def packed(path: Path) -> bytes:
    """Return the keys of the blocks of ``path``."""
    return b"".join(key(path[: i + 1]) for i in range(len(path)))


def key(path: Path) -> bytes:
    return hashlib.sha256("/".join(path).encode()).digest()[:KEY_BYTES]


@dataclass(eq=False)
class Entry:
    namespace_id: int
    path: Path
    part: int
    offset: int
    num_bytes: int
    ref: SlotRef
    writer: str
    committed: bool = False

    @property
    def place(self) -> tuple[int, Path, int]:
        return self.namespace_id, self.path, self.part


@dataclass(eq=False)
class ModelLease:
    session: int
    namespace_id: int
    entries: list[Entry]
    ranks: set[int]
    granted_ns: int
    writes: bool
    aborted: bool = False


@dataclass
class ModelSession:
    replica: str
    namespace_id: int
    num_ranks: int
    is_open: bool = True


@dataclass
class Model:
    namespaces: list[Namespace]
    admission: Admission
    index: dict[tuple[int, Path, int], Entry] = field(default_factory=dict)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    sessions: dict[int, ModelSession] = field(default_factory=dict)
    offered_by: dict[tuple[int, Path], object] = field(default_factory=dict)

    # ------------------------------------------------------------ what is there

    def every(self, namespace_id: int) -> list[int]:
        parts = self.namespaces[namespace_id].parts
        return [p for p, spec in enumerate(parts) if spec.coverage is Coverage.EVERY]

    def tails(self, namespace_id: int) -> list[int]:
        every = self.every(namespace_id)
        return [p for p in range(len(self.namespaces[namespace_id].parts)) if p not in every]

    def slot_bytes(self, namespace_id: int, part: int) -> int:
        return aligned_slot_bytes(self.namespaces[namespace_id].parts[part].slot_bytes)

    def is_committed(self, namespace_id: int, path: Path, part: int) -> bool:
        entry = self.index.get((namespace_id, path, part))
        return entry is not None and entry.committed

    def is_present(self, namespace_id: int, path: Path) -> bool:
        """Return whether the block is in the tree: it or one after it has some part."""
        return any(n == namespace_id and p[: len(path)] == path for n, p, _ in self.index)

    def num_present(self, namespace_id: int, path: Path) -> int:
        n = 0
        while n < len(path) and self.is_present(namespace_id, path[: n + 1]):
            n += 1
        return n

    def num_ready(self, namespace_id: int, path: Path) -> int:
        n = 0
        while (
            n < len(path)
            and self.is_present(namespace_id, path[: n + 1])
            and all(
                self.is_committed(namespace_id, path[: n + 1], part)
                for part in self.every(namespace_id)
            )
        ):
            n += 1
        return n

    def needed_tails(self, namespace_id: int, path: Path) -> Iterator[tuple[Path, int]]:
        """Yield what resuming after ``path`` needs beside the EVERY parts, deepest first."""
        for part in self.tails(namespace_id):
            width = self.namespaces[namespace_id].parts[part].window_blocks or 1
            for n in range(len(path), max(0, len(path) - width), -1):
                yield path[:n], part

    def usable(self, namespace_id: int, path: Path) -> tuple[int, set[Outcome]]:
        """Return the usable blocks, and which outcomes are right."""
        num_ready = self.num_ready(namespace_id, path)
        can_wait = num_ready < len(path) and self.is_present(namespace_id, path[: num_ready + 1])
        for n in range(num_ready, -1, -1):
            lacking = [
                (at, part)
                for at, part in self.needed_tails(namespace_id, path[:n])
                if not self.is_committed(namespace_id, at, part)
            ]
            if not lacking:
                break
            can_wait = can_wait or (namespace_id, *lacking[0]) in self.index
        if n == len(path):
            return n, {Outcome.HIT}
        if len(self.tails(namespace_id)) > 1:  # which of two missing parts counts is left open
            return n, {Outcome.MISS, Outcome.PENDING}
        return n, {Outcome.PENDING if can_wait else Outcome.MISS}

    def to_read(self, namespace_id: int, path: Path, first_block: int) -> set[tuple[Path, int]]:
        """Return which blocks and parts a reader that has ``first_block`` blocks needs."""
        pages = {
            (path[: n + 1], part)
            for n in range(first_block, len(path))
            for part in self.every(namespace_id)
        }
        return pages | set(self.needed_tails(namespace_id, path))

    def missing(
        self, namespace_id: int, path: Path, tails: dict[int, set[int]]
    ) -> set[tuple[int, int]]:
        """Return (block, part) for what a writer of ``path`` could write."""
        num_present = self.num_present(namespace_id, path)
        pages = {
            (n, part) for n in range(num_present, len(path)) for part in self.every(namespace_id)
        }
        return pages | {
            (n, part)
            for part, blocks in tails.items()
            for n in blocks
            if (namespace_id, path[: n + 1], part) not in self.index
        }

    # ------------------------------------------------------------ what changes

    def held(self) -> set[Entry]:
        return {entry for lease in self.leases.values() for entry in lease.entries}

    def alive(self) -> set[Entry]:
        return self.held() | set(self.index.values())

    def drop(self, namespace_id: int, path: Path) -> None:
        """Take a block and all after it out of the index."""
        for place in list(self.index):
            if place[0] == namespace_id and place[1][: len(path)] == path:
                del self.index[place]

    def note_evicted(self, still_there: dict[tuple[int, Path, int], int]) -> int:
        """Forget what is not at its place any more; everything of it must have been free to go."""
        gone = {e for place, e in self.index.items() if still_there.get(place) != e.offset}
        for entry in gone:
            assert entry.committed, f"{entry.place} was evicted while it was being written"
            assert entry not in self.held(), f"{entry.place} was evicted while a lease held it"
            del self.index[entry.place]
        for entry in gone:
            if entry.part in self.every(entry.namespace_id):
                left = [
                    p
                    for p in self.index
                    if p[0] == entry.namespace_id and p[1][: len(entry.path)] == entry.path
                ]
                assert not left, f"{entry.place} was evicted and left a hole before {left}"
        return len(gone)

    def offer(
        self, namespace_id: int, path: Path, num_present: int, request: tuple[int, str | None]
    ) -> int:
        """Note who offers the blocks after ``num_present``; return how many may be there then."""
        stop = num_present
        if self.admission is Admission.ALWAYS:
            return len(path)
        # Without a name, each offer is a request of its own.
        requester = request if request[1] is not None else object()
        for n in range(num_present, len(path)):
            first = self.offered_by.setdefault((namespace_id, path[: n + 1]), requester)
            if first != requester and n == stop:
                stop = n + 1
        return stop

    def flush(self) -> None:
        self.index.clear()
        self.offered_by.clear()

    def abort(self, lease: ModelLease) -> None:
        if not lease.writes or lease.aborted:
            return
        lease.aborted = True
        for entry in lease.entries:
            if self.index.get(entry.place) is not entry:
                continue
            if entry.part in self.every(entry.namespace_id):
                self.drop(entry.namespace_id, entry.path)
            else:
                del self.index[entry.place]

    def end_rank(self, lease_id: int, ranks: set[int]) -> None:
        lease = self.leases[lease_id]
        lease.ranks -= ranks
        if lease.ranks:
            return
        if lease.writes and not lease.aborted:
            for entry in lease.entries:
                entry.committed = self.index.get(entry.place) is entry
        del self.leases[lease_id]
        self.forget_session(lease.session)

    def forget_session(self, session: int) -> None:
        record = self.sessions[session]
        if not record.is_open and not any(le.session == session for le in self.leases.values()):
            del self.sessions[session]
