"""What the daemon answers: one function a request, over the pool and the reports."""

import logging
from collections.abc import Callable
from typing import Final

from millpond.model.errors import LeaseUnknown
from millpond.model.limits import (
    FRAME_BYTES_MAX,
    KIB,
    LEASES_PER_SESSION_MAX,
    LINK_PROBLEM_LENGTH_MAX,
)
from millpond.pool.pool import Pool
from millpond.service.checking import Checks
from millpond.service.framing import FrameError
from millpond.service.peer import Peer
from millpond.service.protocol import (
    Blocks,
    BlocksReply,
    Check,
    Done,
    Failed,
    Finish,
    Flush,
    Hello,
    Link,
    Lookup,
    LookupReply,
    Pin,
    Pinned,
    Reply,
    Report,
    Request,
    Requests,
    RequestsReply,
    Reserve,
    Reserved,
    Status,
    StatusReply,
    Switch,
    pack_u64,
    unpack_u64,
)
from millpond.service.reports import Reports
from millpond.service.sessions import Session, Sessions

_LOG: Final = logging.getLogger(__name__)
_REPLY_SLACK_BYTES: Final = 64 * KIB
_GB_S_MAX: Final = 1e6
_OFFSET_BYTES_MAX: Final = 16
"""What one block of one part takes in a reply at most: a pair of u64."""


class Dispatch:
    """Turns a greeted peer's requests into replies; holds no state but a few counts."""

    def __init__(
        self,
        pool: Pool,
        sessions: Sessions,
        reports: Reports,
        checks: Checks,
        statistics: Callable[[], dict[str, object]],
    ) -> None:
        self._pool = pool
        self._sessions = sessions
        self._reports = reports
        self._checks = checks
        self._statistics = statistics
        self.num_bad_reports = 0
        self.num_unknown_leases = 0

    def answer(self, peer: Peer, request: Request, now_ns: int) -> Reply | None:
        """Return the reply to ``request``, None for one that has none, or none yet.

        Raises ``FrameError`` for a request that this peer may not send at all, and
        ``InvariantBroken``.
        """
        if isinstance(request, Hello):
            raise FrameError("a second hello")
        if isinstance(request, Finish | Report | Link):
            self._note(peer, request, now_ns)
            return None
        try:
            match request:
                case Lookup() | Pin() | Reserve():
                    session = self._session(peer, "scheduler", request)
                    return self._serve(session, request, now_ns)
                case Status():
                    return StatusReply(id=request.id, statistics=self._statistics())
                case _:
                    return self._operate(peer, request)
        except ValueError as error:
            return Failed(id=request.id, code="invalid", message=str(error))

    def _session(self, peer: Peer, role: str, request: Request) -> Session:
        session = self._sessions.of(peer)
        if session is None or peer.hello is None or peer.hello.role != role:
            raise FrameError(f"a {type(request).__name__} from a peer that is no {role}")
        return session

    def _serve(self, session: Session, request: Lookup | Pin | Reserve, now_ns: int) -> Reply:
        if isinstance(request, Lookup):
            found = self._pool.lookup(session.namespace_id, request.keys, request.key_bytes)
            return LookupReply(id=request.id, num_blocks=found.num_blocks, outcome=found.outcome)
        _check_reply_fits(session, request)
        if isinstance(request, Pin):
            return self._pin(session, request, now_ns)
        return self._reserve(session, request, now_ns)

    def _pin(self, session: Session, request: Pin, now_ns: int) -> Pinned:
        if not session.complete:
            found = self._pool.lookup(session.namespace_id, request.keys, request.key_bytes)
            return Pinned(
                id=request.id,
                lease=None,
                num_blocks=found.num_blocks,
                outcome=found.outcome,
                reason="not-ready",
            )
        lease = self._pool.pin(
            session.number,
            request.keys,
            request.key_bytes,
            first_block=request.first_block,
            now_ns=now_ns,
        )
        return Pinned(
            id=request.id,
            lease=lease.lease_id,
            num_blocks=lease.num_blocks,
            outcome=lease.outcome,
            offsets=tuple(map(pack_u64, lease.offsets)),
            writers=lease.writers,
            reason=lease.reason,
        )

    def _reserve(self, session: Session, request: Reserve, now_ns: int) -> Reserved:
        if not session.complete:
            return Reserved(
                id=request.id, lease=None, first_block=request.first_block, reason="not-ready"
            )
        num_parts = len(session.namespace.parts)
        if len(request.parts) != num_parts:  # before any of them is unpacked
            raise ValueError(f"{len(request.parts)} lists of blocks for {num_parts} parts")
        lease = self._pool.reserve(
            session.number,
            request.keys,
            request.key_bytes,
            first_block=request.first_block,
            parts=tuple(map(unpack_u64, request.parts)),
            now_ns=now_ns,
            request_id=request.request_id,
        )
        return Reserved(
            id=request.id,
            lease=lease.lease_id,
            first_block=lease.first_block,
            offsets=tuple(map(pack_u64, lease.offsets)),
            reason=lease.reason,
        )

    def _note(self, peer: Peer, request: Finish | Report | Link, now_ns: int) -> None:
        """Take in what needs no reply."""
        if isinstance(request, Link):
            self._session(peer, "worker", request)
            peer.link = _checked_link(request)
            return
        if isinstance(request, Report):
            session = self._session(peer, "scheduler", request)
            try:
                self._reports.add(session.hello.replica, request)
            except ValueError:  # its user chose the request's name: not a reason to hang up
                self.num_bad_reports += 1
            return
        role = "scheduler" if request.rank is None else "worker"
        session = self._session(peer, role, request)
        if request.rank is not None and session.workers.get(request.rank) is not peer:
            raise FrameError(f"a finish for rank {request.rank}, which is another's")
        if len(request.leases) > LEASES_PER_SESSION_MAX:
            raise FrameError(f"a finish of {len(request.leases)} leases")
        for lease_id in request.leases:
            try:
                self._note_checked(session, request, lease_id)
                self._pool.finish(
                    session.number, lease_id, rank=request.rank, ok=request.ok, now_ns=now_ns
                )
            except LeaseUnknown:  # expired meanwhile
                self.num_unknown_leases += 1

    def _note_checked(self, session: Session, request: Finish, lease_id: int) -> None:
        """Take damaged slots out of use while the lease still holds them, and say so once."""
        if not request.num_checked and not request.damaged:
            return
        if len(request.leases) != 1:
            raise FrameError(f"one check for {len(request.leases)} leases")
        try:
            found = self._pool.note_checked(
                session.number,
                lease_id,
                num_checked=request.num_checked,
                damaged=request.damaged,
            )
        except ValueError as error:
            raise FrameError(str(error)) from error
        for damage in found:
            _LOG.error(
                "damaged block, not served again writer=%s reader=%s rank=%s part=%s block=%s "
                "offset=%d remedy=%s",
                damage.writer.name,
                damage.reader.name,
                request.rank,
                session.namespace.parts[damage.part].name,
                damage.key.hex() if damage.key else "gone",
                damage.offset_bytes,
                "check the memory, and the order of copies with millpond gate order",
            )

    def _operate(
        self, peer: Peer, request: Switch | Flush | Requests | Blocks | Check
    ) -> Reply | None:
        """Do what only an operator may ask for."""
        if peer.hello is None or peer.hello.role != "admin":
            message = f"{type(request).__name__} is for admins"
            return Failed(id=request.id, code="role", message=message)
        match request:
            case Switch():
                self._pool.set_enabled(enabled=request.enabled)
            case Flush():
                self._pool.flush()
            case Requests():
                found = (
                    self._reports.named(request.request_id)
                    if request.request_id
                    else self._reports.latest(request.last)
                )
                return RequestsReply(id=request.id, reports=found)
            case Blocks():
                blocks = self._pool.blocks(request.num_max)
                return BlocksReply(id=request.id, blocks=tuple(blocks))
            case Check():
                self._checks.request(peer, request.id)
                return None
        return Done(id=request.id)


def _check_reply_fits(session: Session, request: Pin | Reserve) -> None:
    """Refuse before anything is leased what no frame could carry."""
    num_parts = len(session.namespace.parts)
    num_blocks = len(request.keys) // max(1, request.key_bytes) - request.first_block
    num_bytes = num_blocks * num_parts * _OFFSET_BYTES_MAX
    if num_bytes > FRAME_BYTES_MAX - _REPLY_SLACK_BYTES:
        raise ValueError(f"{num_blocks} blocks of {num_parts} parts don't fit into one reply")


def _checked_link(link: Link) -> Link:
    """Return what a status can tell of; raises ``FrameError``."""
    for speed in (link.h2d_gb_s, link.d2h_gb_s, link.allowed_gb_s):
        if speed is not None and not 0 <= speed <= _GB_S_MAX:  # false for what is no number
            raise FrameError(f"a link of {speed} GB/s")
    if len(link.problem) > LINK_PROBLEM_LENGTH_MAX:
        raise FrameError(f"a problem of {len(link.problem)} characters")
    return link
