"""Clients of the daemon: an engine's scheduler, its workers, and an operator.

All three raise ``DaemonGone`` or ``RequestTimedOut`` when the daemon is away or late, and are
closed after that: connect anew. An engine's connections belong together: when one of a
session ends, the daemon ends them all.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, cast

from millpond.arena.arena import Arena
from millpond.model.errors import DaemonGone
from millpond.model.leases import LookupResult, ReadLease, WriteLease
from millpond.model.limits import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S
from millpond.model.names import Outcome
from millpond.model.namespace import Namespace
from millpond.service.connection import Connection, Greeting
from millpond.service.protocol import (
    Blocks,
    BlocksReply,
    Check,
    Done,
    Finish,
    Flush,
    Hello,
    Link,
    Lookup,
    LookupReply,
    Pin,
    Pinned,
    Report,
    Requests,
    RequestsReply,
    Reserve,
    Reserved,
    Status,
    StatusReply,
    Switch,
    Welcome,
    pack_u64,
    unpack_u64,
)
from millpond.service.reaper import open_own_pidfd

_CHECK_TIMEOUT_S: Final = 300.0
"""A million blocks take ten seconds to check, or five times that on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaIdentity:
    """Who an engine is: its configured name, this start of it, and what it may share.

    ``session_key`` is drawn anew at each start of the engine and known to all its workers.
    ``namespace`` is what a scheduler shares under; a worker leaves it out.
    """

    replica: str
    session_key: str
    num_ranks: int
    namespace: Namespace | None = None


class _Client:
    """What the three have in common: one greeted connection."""

    def __init__(self, connection: Connection, welcome: Welcome) -> None:
        self._connection = connection
        self.welcome = welcome
        """The daemon's side of the handshake."""

    def poll_closed(self) -> bool:
        """Return whether the daemon is gone or has ended the session, without waiting."""
        return self._connection.poll_closed()

    def close(self) -> None:
        """End the connection, and with it the session it belongs to."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class SchedulerClient(_Client):
    """The engine's scheduler: asks what the pool has, pins and reserves.

    Calls block for at most REQUEST_TIMEOUT_S. Safe for several threads, which take turns.
    ``keys`` is the concatenation of block keys of ``key_bytes`` each, from the first block of
    the prefix on. A request beyond the limits of docs/PROTOCOL.md is a ``ValueError``.
    """

    @classmethod
    def connect(
        cls, socket_path: str, identity: ReplicaIdentity, *, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> Self:
        """Open the engine's session; raises ``DaemonGone`` or ``HandshakeRefused``."""
        hello = _hello("scheduler", identity)
        connection, greeting = _greet(socket_path, hello, timeout_s)
        if greeting.arena_fd is not None:
            os.close(greeting.arena_fd)  # a scheduler copies nothing
        return cls(connection, greeting.welcome)

    @property
    def session(self) -> int:
        """Number of the session, which its workers will hear too."""
        return _session(self.welcome)

    def lookup(self, keys: bytes, key_bytes: int) -> LookupResult:
        """Return the longest usable prefix of ``keys``, holding nothing."""
        request = Lookup(id=self._connection.next_id(), keys=keys, key_bytes=key_bytes)
        reply = self._connection.call(request, LookupReply, REQUEST_TIMEOUT_S)
        return LookupResult(reply.num_blocks, Outcome(reply.outcome))

    def pin(self, keys: bytes, key_bytes: int, *, first_block: int) -> ReadLease:
        """Hold the longest usable prefix, if it has more than ``first_block`` blocks."""
        request = Pin(
            id=self._connection.next_id(),
            keys=keys,
            key_bytes=key_bytes,
            first_block=first_block,
        )
        reply = self._connection.call(request, Pinned, REQUEST_TIMEOUT_S)
        return _read_lease(reply)

    def reserve(
        self,
        keys: bytes,
        key_bytes: int,
        *,
        first_block: int,
        parts: Sequence[Sequence[int]],
        request_id: str | None = None,
    ) -> WriteLease:
        """Take slots for what the pool lacks of the blocks from ``first_block`` on.

        ``parts[p]`` lists the blocks for which part p can be written; it is empty for a part
        with coverage ``every``, which is written for all of them. ``request_id`` tells whether
        two reserves are of one request; without it they are not.
        """
        request = Reserve(
            id=self._connection.next_id(),
            keys=keys,
            key_bytes=key_bytes,
            first_block=first_block,
            parts=tuple(map(pack_u64, parts)),
            request_id=request_id,
        )
        reply = self._connection.call(request, Reserved, REQUEST_TIMEOUT_S)
        return _write_lease(reply)

    def finish(self, lease_ids: Sequence[int], *, ok: bool) -> None:
        """End leases that no worker was ever told of, for all ranks at once."""
        message = Finish(leases=tuple(lease_ids), ok=ok, rank=None)
        self._connection.send(message, REQUEST_TIMEOUT_S)

    def report(self, report: Report) -> None:
        """Tell where the tokens of a finished request came from."""
        self._connection.send(report, REQUEST_TIMEOUT_S)


class WorkerClient(_Client):
    """One rank of an engine: maps the arena and says when its copies are done.

    ``arena`` outlives the client: the caller closes it once no copy is in flight, or hands it
    to the next ``connect``. Safe for several threads, which take turns.
    """

    def __init__(self, connection: Connection, welcome: Welcome, rank: int, arena: Arena) -> None:
        super().__init__(connection, welcome)
        self.rank = rank
        self.arena = arena

    @classmethod
    def connect(
        cls,
        socket_path: str,
        identity: ReplicaIdentity,
        *,
        rank: int,
        drained: Sequence[int] = (),
        arena: Arena | None = None,
    ) -> Self:
        """Join the session that the engine's scheduler has opened.

        ``drained`` names earlier sessions of this process in which it has no copy in flight;
        only then are their slots used again while the process lives. ``arena`` is a mapping
        to go on with if the daemon is still the same one; otherwise it is left alone and a
        new one is made. Raises ``HandshakeRefused`` with code ``no-session`` while the
        scheduler is not there yet.
        """
        hello = _hello("worker", identity, rank=rank, drained=tuple(drained))
        connection, greeting = _greet(socket_path, hello, CONNECT_TIMEOUT_S)
        try:
            attached = _attach(greeting, arena)
        except (OSError, ValueError) as error:
            connection.close()
            raise DaemonGone(f"the arena of {socket_path} can't be mapped: {error}") from error
        return cls(connection, greeting.welcome, rank, attached)

    @property
    def session(self) -> int:
        """Number to name in ``drained`` later."""
        return _session(self.welcome)

    def finish(self, lease_ids: Sequence[int], *, ok: bool) -> None:
        """Say that this rank has no copy in flight for these leases any more.

        Blocks only while the socket's buffer is full, for at most REQUEST_TIMEOUT_S.
        """
        message = Finish(leases=tuple(lease_ids), ok=ok, rank=self.rank)
        self._connection.send(message, REQUEST_TIMEOUT_S)

    def tell_link(self, link: Link) -> None:
        """Say what this rank knows of its way to the arena; blocks as ``finish`` does."""
        self._connection.send(link, REQUEST_TIMEOUT_S)

    def finish_checked(self, lease_id: int, *, num_checked: int, damaged: Sequence[int]) -> None:
        """As ``finish`` for a read lease of which ``num_checked`` slots were compared.

        Those at the offsets ``damaged`` had other bytes than were written.
        """
        message = Finish(
            leases=(lease_id,),
            ok=not damaged,
            rank=self.rank,
            num_checked=num_checked,
            damaged=tuple(damaged),
        )
        self._connection.send(message, REQUEST_TIMEOUT_S)


class MemoryState(NamedTuple):
    """What a pool may use of the memory that it was started with, and why it gets no more.

    ``problem`` is None while more is to come, and when all is there.
    """

    size_bytes: int
    usable_bytes: int
    problem: str | None

    @property
    def is_complete(self) -> bool:
        """Whether all is there."""
        return self.usable_bytes == self.size_bytes


class AdminClient(_Client):
    """An operator: looks at the pool and switches it. Calls block for ``timeout_s``."""

    def __init__(self, connection: Connection, welcome: Welcome, timeout_s: float) -> None:
        super().__init__(connection, welcome)
        self._timeout_s = timeout_s

    @classmethod
    def connect(cls, socket_path: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> Self:
        """Connect to the daemon; raises ``DaemonGone`` where there is none."""
        connection, greeting = _greet(socket_path, Hello(role="admin"), timeout_s)
        return cls(connection, greeting.welcome, timeout_s)

    def status(self) -> dict[str, object]:
        """Return the daemon's ``statistics()``."""
        request = Status(id=self._connection.next_id())
        return self._connection.call(request, StatusReply, self._timeout_s).statistics

    def memory(self) -> MemoryState:
        """Return how much of its memory the pool has."""
        service = cast("dict[str, Any]", self.status()["service"])
        return MemoryState(**service["memory"])

    def switch(self, *, enabled: bool) -> None:
        """Turn the whole pool on or off."""
        request = Switch(id=self._connection.next_id(), enabled=enabled)
        self._connection.call(request, Done, self._timeout_s)

    def flush(self) -> None:
        """Forget every block."""
        self._connection.call(Flush(id=self._connection.next_id()), Done, self._timeout_s)

    def requests_named(self, request_id: str) -> tuple[tuple[str, Report], ...]:
        """Return (replica, report) of the request that a client named so, oldest first."""
        request = Requests(id=self._connection.next_id(), request_id=request_id)
        return self._connection.call(request, RequestsReply, self._timeout_s).reports

    def latest_requests(self, num_requests: int) -> tuple[tuple[str, Report], ...]:
        """Return (replica, report) of the latest finished requests, oldest first."""
        request = Requests(id=self._connection.next_id(), last=num_requests)
        return self._connection.call(request, RequestsReply, self._timeout_s).reports

    def blocks(self, num_max: int) -> tuple[dict[str, object], ...]:
        """Return where at most ``num_max`` blocks of the pool lie, parents before children."""
        request = Blocks(id=self._connection.next_id(), num_max=num_max)
        return self._connection.call(request, BlocksReply, self._timeout_s).blocks

    def check(self) -> None:
        """Check the pool's invariants; raises ``InvariantBroken``, and the daemon ends then.

        Blocks for at most five minutes, or ``timeout_s`` if that is more.
        """
        timeout_s = max(self._timeout_s, _CHECK_TIMEOUT_S)
        self._connection.call(Check(id=self._connection.next_id()), Done, timeout_s)


def _hello(
    role: str, identity: ReplicaIdentity, *, rank: int = 0, drained: tuple[int, ...] = ()
) -> Hello:
    return Hello(
        role=role,
        replica=identity.replica,
        session_key=identity.session_key,
        rank=rank,
        num_ranks=identity.num_ranks,
        namespace=identity.namespace,
        drained=drained,
    )


def _greet(socket_path: str, hello: Hello, timeout_s: float) -> tuple[Connection, Greeting]:
    connection = Connection(socket_path, timeout_s)
    if hello.role == "admin":
        return connection, connection.greet(hello, pidfd=None, timeout_s=timeout_s)
    pidfd = open_own_pidfd()
    try:
        return connection, connection.greet(hello, pidfd=pidfd, timeout_s=timeout_s)
    finally:
        os.close(pidfd)


def _attach(greeting: Greeting, known: Arena | None) -> Arena:
    """Return the mapping to use; the descriptor is closed either way, mappings don't need it."""
    if greeting.arena_fd is None:
        raise ValueError("the daemon passed no memory")
    try:
        if known is not None and known.epoch == greeting.welcome.epoch:
            return known
        return Arena.attach(greeting.arena_fd, expected_epoch=greeting.welcome.epoch)
    finally:
        os.close(greeting.arena_fd)


def _session(welcome: Welcome) -> int:
    if welcome.session is None:
        raise ValueError("an admin has no session")
    return welcome.session


def _read_lease(reply: Pinned) -> ReadLease:
    return ReadLease(
        lease_id=reply.lease,
        num_blocks=reply.num_blocks,
        outcome=Outcome(reply.outcome),
        offsets=tuple(map(unpack_u64, reply.offsets)),
        writers=reply.writers,
        reason=reply.reason,
    )


def _write_lease(reply: Reserved) -> WriteLease:
    offsets = tuple(map(unpack_u64, reply.offsets))
    return WriteLease(reply.lease, reply.first_block, offsets, reply.reason)
