"""Who holds what: replicas, their sessions, and the leases of each session.

A replica is a configured name and lives as long as the pool, so that its figures survive
reconnects. A session is one incarnation of its engine. A session record goes when it is
closed and its last lease has ended.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from heapq import nlargest

from millpond.model.errors import HandshakeRefused, LeaseUnknown
from millpond.pool.index import Index

REPLICAS_MAX = 65_535
"""Replica names that one pool can tell apart; a slot remembers its writer in 16 bits."""


@dataclass(slots=True, eq=False)
class Replica:
    """One configured name and what it did, over all its sessions."""

    number: int
    name: str
    last_session_id: int = 0
    num_sessions: int = 0
    num_read_leases: int = 0
    num_write_leases: int = 0
    num_write_leases_aborted: int = 0
    num_reserves_refused: Counter[str] = field(default_factory=Counter[str])
    num_blocks_read: int = 0
    num_bytes_read: int = 0
    num_blocks_written: int = 0
    num_blocks_read_by_writer: dict[str, int] = field(default_factory=dict[str, int])
    num_slots_checked: int = 0
    num_slots_damaged: int = 0
    """Of those it had written, by whomever they were read."""


@dataclass(slots=True, eq=False)
class Lease:
    """A live lease: it holds ``slots[p]`` (once each) until every rank has finished.

    ``ranks`` has a bit for each rank that may still be copying.
    """

    lease_id: int
    session: Session
    slots: tuple[array[int], ...]
    ranks: int


@dataclass(slots=True, eq=False)
class Reading(Lease):
    """A live read lease."""


@dataclass(slots=True, eq=False)
class Writing(Lease):
    """A live write lease; once aborted, its slots have left the index."""

    granted_ns: int
    is_aborted: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """One incarnation of an engine, and its live leases by id."""

    session_id: int
    replica: Replica
    index: Index
    num_ranks: int
    is_open: bool = True
    leases: dict[int, Lease] = field(default_factory=dict[int, Lease])

    @property
    def all_ranks(self) -> int:
        return (1 << self.num_ranks) - 1


class Sessions:
    """All sessions and replicas; ``writing`` has the unaborted write leases, oldest first."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.by_id: dict[int, Session] = {}
        self.writing: dict[int, Writing] = {}
        self._replica_by_name: dict[str, Replica] = {}
        self._last_session_id = 0
        self._last_lease_id = 0

    def open(self, replica_name: str, index: Index, num_ranks: int) -> Session:
        """Open a session under an id that was never used before."""
        replica = self._replica_by_name.get(replica_name)
        if replica is None:
            if len(self.replicas) == REPLICAS_MAX:
                raise HandshakeRefused(
                    "full", "replica", f"{REPLICAS_MAX} replica names were seen; use an old one"
                )
            replica = Replica(len(self.replicas), replica_name)
            self.replicas.append(replica)
            self._replica_by_name[replica_name] = replica
        replica.num_sessions += 1
        self._last_session_id += 1
        replica.last_session_id = self._last_session_id
        session = Session(self._last_session_id, replica, index, num_ranks)
        self.by_id[session.session_id] = session
        return session

    def opened(self, session_id: int) -> Session:
        """Return an open session; ``ValueError`` for any other."""
        session = self.by_id.get(session_id)
        if session is None or not session.is_open:
            raise ValueError(f"session {session_id} is not open")
        return session

    def latest_replicas(self, num_max: int) -> list[Replica]:
        """Return the replicas whose sessions were opened last, in the order of their numbers."""
        latest = nlargest(num_max, self.replicas, key=lambda replica: replica.last_session_id)
        return sorted(latest, key=lambda replica: replica.number)

    def forget_if_over(self, session: Session) -> None:
        """Drop the record of a session that is closed and holds nothing."""
        if not session.is_open and not session.leases:
            del self.by_id[session.session_id]

    def next_lease_id(self) -> int:
        """Return an id that no lease ever had."""
        self._last_lease_id += 1
        return self._last_lease_id

    def lease(self, session_id: int, lease_id: int) -> Lease:
        """Return a live lease of this session; ``LeaseUnknown`` where there is none."""
        session = self.by_id.get(session_id)
        lease = None if session is None else session.leases.get(lease_id)
        if lease is None:
            raise LeaseUnknown(lease_id)
        return lease

    def num_leases(self) -> int:
        """Return how many leases are live."""
        return sum(len(session.leases) for session in self.by_id.values())
