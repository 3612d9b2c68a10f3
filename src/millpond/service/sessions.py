"""Who belongs together: an engine's scheduler and workers, from the first hello to the end.

    scheduler's hello        opens the session
    each worker's hello      joins it, one a rank; complete when all are there
    any member's end         ends it for all: they come back by themselves
    afterwards               a rank's slots stay out of use until its process is dead or says,
                             in a later hello, that it has drained

A rank that never joined, or has finished all its leases, has nothing to drain. While the
session is incomplete nothing is granted.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from millpond.model.errors import HandshakeRefused
from millpond.model.limits import CLIENTS_MAX, NAME_LENGTH_MAX, STRING_LENGTH_MAX
from millpond.model.namespace import FieldDifference, Namespace, check_parts
from millpond.pool.pool import Pool
from millpond.service.peer import Peer
from millpond.service.protocol import Hello
from millpond.service.reaper import Orphans, Process

_DIFFERENCES_MAX: Final = 32
"""Replicas told of in one welcome."""
_VALUE_LENGTH_MAX: Final = 512
"""Characters of a value told of in a welcome."""
_DRAINED_MAX: Final = 1024
"""Earlier sessions named in one hello."""
_ORPHANS_MAX: Final = CLIENTS_MAX
"""Ranks of ended sessions that may still copy; each costs a descriptor. Beyond it, no new
session is opened."""


class Session:
    """One incarnation of an engine while all its connections last."""

    def __init__(
        self, number: int, namespace_id: int, namespace: Namespace, hello: Hello, scheduler: Peer
    ) -> None:
        self.number = number
        """The pool's id of it."""
        self.namespace_id = namespace_id
        self.namespace = namespace
        self.hello = hello
        """What the scheduler said."""
        self.scheduler = scheduler
        self.workers: dict[int, Peer] = {}

    @property
    def complete(self) -> bool:
        """Whether all ranks have joined."""
        return len(self.workers) == self.hello.num_ranks

    @property
    def members(self) -> tuple[Peer, ...]:
        """The scheduler and the workers that are there."""
        return (self.scheduler, *self.workers.values())


class Sessions:
    """All sessions of the daemon, and what is left of earlier ones."""

    def __init__(
        self,
        pool: Pool,
        *,
        watch: Callable[[Process], None],
        unwatch: Callable[[Process], None],
    ) -> None:
        """``watch`` starts to report the death of a process to ``process_died``."""
        self._pool = pool
        self._watch = watch
        self._unwatch = unwatch
        self._by_number: dict[int, Session] = {}
        self._orphans = Orphans(pool.drain_rank)
        # Numbers on the wire differ between daemons, or "drained" could be said of a session
        # of an earlier daemon and believed of one of this.
        self._wire_base = secrets.randbits(48) << 12

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_number.values())

    @property
    def orphans(self) -> Orphans:
        """Processes of ended sessions that may still copy."""
        return self._orphans

    def wire_number(self, number: int) -> int:
        """Return how the pool's session ``number`` is called outside of this process."""
        return self._wire_base + number

    def of(self, peer: Peer) -> Session | None:
        """Return the session that ``peer`` is a member of."""
        return None if peer.session is None else self._by_number.get(peer.session)

    def open(self, hello: Hello, peer: Peer) -> Session:
        """Open a session for a scheduler; raises ``HandshakeRefused``."""
        namespace = _checked_namespace(hello)
        for other in self:
            if other.hello.replica == hello.replica:
                raise HandshakeRefused(
                    "taken",
                    "replica",
                    f"replica {hello.replica} is connected from process "
                    f"{other.scheduler.credentials.pid}; names must differ",
                )
            if other.hello.session_key == hello.session_key:
                raise HandshakeRefused("taken", "session_key", "the session is open already")
        if len(self._orphans) >= _ORPHANS_MAX:
            message = f"{len(self._orphans)} processes of ended sessions have not drained"
            raise HandshakeRefused("full", "drained", message)
        process = _process(peer)
        try:
            namespace_id = self._pool.add_namespace(namespace)
            number = self._pool.open_session(
                replica=hello.replica, namespace_id=namespace_id, num_ranks=hello.num_ranks
            )
        except HandshakeRefused:
            process.close()
            raise
        session = Session(number, namespace_id, namespace, hello, peer)
        self._by_number[number] = session
        self._enter(session, peer, process)
        return session

    def join(self, hello: Hello, peer: Peer) -> Session:
        """Let a worker into its scheduler's session; raises ``HandshakeRefused``.

        What it says of earlier sessions is taken in either way.
        """
        check_hello(hello)
        if len(hello.drained) > _DRAINED_MAX:
            raise _invalid("drained", f"{len(hello.drained)} sessions, at most {_DRAINED_MAX}")
        process = _process(peer)
        for number in hello.drained:
            earlier = self._orphans.drained(number - self._wire_base, hello.rank, process)
            if earlier is not None:
                self._unwatch(earlier)
        try:
            session = self._joinable(hello)
        except HandshakeRefused:
            process.close()
            raise
        session.workers[hello.rank] = peer
        self._enter(session, peer, process)
        return session

    def end(self, session: Session) -> tuple[Peer, ...]:
        """End ``session`` and return its members, whose connections the caller closes."""
        del self._by_number[session.number]
        self._pool.close_session(session.number)
        for rank in range(session.hello.num_ranks):
            worker = session.workers.get(rank)
            if worker is None or worker.process is None:
                self._pool.drain_rank(session.number, rank)
            elif self._pool.may_copy(session.number, rank):
                self._orphans.add(session.number, rank, worker.process)
        for peer in session.members:
            peer.session = None
            if peer.process is not None and peer.process not in self._orphans:
                self._unwatch(peer.process)
        return session.members

    def process_died(self, process: Process) -> Session | None:
        """Free what ``process`` could have touched; return the session that ends with it."""
        if process in self._orphans:
            self._orphans.died(process)
            self._unwatch(process)
            return None
        for session in self:
            if any(peer.process is process for peer in session.members):
                return session
        return None

    def differences(self, session: Session) -> dict[str, tuple[FieldDifference, ...]]:
        """Return where replicas of the same model differ from ``session`` so as not to share."""
        found: dict[str, tuple[FieldDifference, ...]] = {}
        for other in self:
            is_related = other.namespace.model == session.namespace.model
            shares = other.namespace_id == session.namespace_id
            if is_related and not shares and len(found) < _DIFFERENCES_MAX:
                different = session.namespace.differences(other.namespace)
                found[other.hello.replica] = tuple(map(_shortened, different))
        return found

    def _joinable(self, hello: Hello) -> Session:
        for session in self:
            if session.hello.session_key == hello.session_key:
                break
        else:
            raise HandshakeRefused("no-session", "session_key", "the scheduler is not here yet")
        for field in ("replica", "num_ranks"):
            mine, theirs = getattr(session.hello, field), getattr(hello, field)
            if mine != theirs:
                raise _invalid(field, f"{theirs!r}, but the scheduler said {mine!r}")
        if hello.namespace is not None and hello.namespace != session.namespace:
            different = session.namespace.differences(hello.namespace)[0]
            raise _invalid(
                different.field, f"{different.theirs}, but the scheduler said {different.mine}"
            )
        if hello.rank in session.workers:
            holder = session.workers[hello.rank].credentials.pid
            raise HandshakeRefused("taken", "rank", f"rank {hello.rank} is process {holder}")
        return session

    def _enter(self, session: Session, peer: Peer, process: Process) -> None:
        peer.session = session.number
        peer.process = process
        self._watch(process)


def check_hello(hello: Hello) -> None:
    """Raise ``HandshakeRefused`` naming the field that is out of its limits."""
    for field in ("replica", "session_key"):
        value = getattr(hello, field)
        if not 1 <= len(value) <= NAME_LENGTH_MAX or not value.isprintable():
            raise _invalid(field, f"must be 1 to {NAME_LENGTH_MAX} printable characters")
    if not 0 <= hello.rank < hello.num_ranks:
        raise _invalid("rank", f"{hello.rank} of {hello.num_ranks}")


def _checked_namespace(hello: Hello) -> Namespace:
    check_hello(hello)
    if hello.namespace is None:
        raise _invalid("namespace", "missing")
    texts = [*msgspec.structs.asdict(hello.namespace).items()]
    texts += [("parts", part.name) for part in hello.namespace.parts]
    for field, value in texts:
        if isinstance(value, str) and len(value) > STRING_LENGTH_MAX:
            raise _invalid(field, f"{len(value)} characters, at most {STRING_LENGTH_MAX}")
    try:
        check_parts(hello.namespace.parts, hello.num_ranks)
    except ValueError as error:
        raise _invalid("parts", str(error)) from error
    return hello.namespace


def _shortened(difference: FieldDifference) -> FieldDifference:
    """Return a difference that leaves room for others in one frame."""
    mine, theirs = (
        value if len(value) <= _VALUE_LENGTH_MAX else value[:_VALUE_LENGTH_MAX] + "…"
        for value in (difference.mine, difference.theirs)
    )
    return FieldDifference(difference.field, mine, theirs)


def _process(peer: Peer) -> Process:
    """Take over the pidfd that came with the hello."""
    pidfd = peer.take_descriptor()
    if pidfd is None:
        raise _invalid("pidfd", "missing: send one of the connecting process along")
    try:
        return Process(pidfd, pid=peer.credentials.pid)
    except ValueError as error:
        os.close(pidfd)
        raise _invalid("pidfd", str(error)) from error


def _invalid(field: str, message: str) -> HandshakeRefused:
    return HandshakeRefused("invalid", field, f"{field}: {message}")
