"""The loop over all connections, in one thread, with one selector, over one pool."""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import msgspec

from millpond import __version__
from millpond.arena.arena import Arena
from millpond.model.errors import HandshakeRefused, InvariantBroken
from millpond.model.limits import CLIENTS_MAX, HANDSHAKE_S_MAX, PROTOCOL_VERSION
from millpond.pool.pool import Pool
from millpond.service.checking import Checks
from millpond.service.dispatch import Dispatch
from millpond.service.framing import FrameError
from millpond.service.growing import Growth
from millpond.service.peer import Peer, SlowPeer, receive_buffer
from millpond.service.peercred import peer_credentials
from millpond.service.protocol import Failed, Hello, Refused, Reply, Request, Welcome
from millpond.service.reaper import Process
from millpond.service.reports import Reports
from millpond.service.sessions import Session, Sessions

_LOG: Final = logging.getLogger(__name__)
_REQUESTS: Final = msgspec.msgpack.Decoder(Request)
_TICK_NS: Final = 1_000_000_000
_TURN_NS: Final = 5_000_000
"""How long one connection is served before the others have their turn, but for one frame."""
_REASON_LENGTH_MAX: Final = 512
"""Characters that a refusal or a line of the log quotes of what a client said."""


_T = TypeVar("_T")


class _AnyHello(msgspec.Struct, tag="hello", tag_field="type"):
    """What a hello of any version of the protocol has."""

    protocol_version: int


_ANY_HELLO: Final = msgspec.msgpack.Decoder(_AnyHello)


class Loop:
    """The loop over all connections; everything happens in the thread that calls ``run``."""

    def __init__(
        self, pool: Pool, arena: Arena, arena_fd: int, listener: socket.socket, growth: Growth
    ) -> None:
        self._pool = pool
        self._growth = growth
        self._arena = arena
        self._arena_fd = arena_fd
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._peers: set[Peer] = set()
        self._unserved: dict[Peer, None] = {}
        """Those whose turn ended before all their frames were answered; who waits longest first."""
        self._sessions = Sessions(pool, watch=self._watch, unwatch=self._unwatch)
        self._reports = Reports()
        self._endings: list[Callable[[], None]] = []
        """Ends of streams and processes that were seen in this round."""
        self._checks = Checks(pool, self._selector, self._answer_late)
        self._dispatch = Dispatch(
            pool, self._sessions, self._reports, self._checks, self.statistics
        )
        self._buffer = receive_buffer()
        self._started_ns = time.monotonic_ns()
        self._counts = {
            "frames": 0,
            "bad_frames": 0,
            "refused": 0,
            "slow_peers_dropped": 0,
            "internal_errors": 0,
        }
        self._accepting = False
        self._accept_again()

    def run(self, stop: threading.Event, wake_fd: int) -> None:
        """Serve until ``stop`` is set, which ``wake_fd`` announces by being readable."""
        self._selector.register(wake_fd, selectors.EVENT_READ, _wake_up)
        self._selector.register(self._growth.fd, selectors.EVENT_READ, self._on_memory)
        try:
            next_tick_ns = time.monotonic_ns() + _TICK_NS
            while not stop.is_set():
                waiting = tuple(self._unserved)
                wait_ns = 0 if waiting else max(0, next_tick_ns - time.monotonic_ns())
                for key, mask in self._selector.select(wait_ns / 1e9):
                    key.data(mask)
                for peer in waiting:
                    self._on_turn(peer)
                self._end_what_ended()
                if time.monotonic_ns() >= next_tick_ns:
                    self._tick(time.monotonic_ns())
                    next_tick_ns = time.monotonic_ns() + _TICK_NS
        except InvariantBroken as error:
            _LOG.error("invariant broken, serving ends reason=%s", error)
            raise
        finally:
            self._selector.unregister(self._growth.fd)
            self._selector.unregister(wake_fd)

    def close(self) -> None:
        """Close every connection; the arena lives on in the processes that map it."""
        self._checks.close()
        for peer in tuple(self._peers):
            self._forget(peer)
        self._selector.close()

    def statistics(self) -> dict[str, object]:
        """Return what service and pool count, and tokens by replica (all msgpack-able)."""
        now_ns = time.monotonic_ns()
        service = {
            "version": __version__,
            "protocol_version": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "epoch": self._arena.epoch,
            "uptime_s": (now_ns - self._started_ns) / 1e9,
            "memory": self._growth.statistics(),
            **self._counts,
            "bad_reports": self._dispatch.num_bad_reports,
            "unknown_leases": self._dispatch.num_unknown_leases,
            "clients": [self._client(peer, now_ns) for peer in self._peers if peer.hello],
            "orphans": [
                {
                    "session": self._sessions.wire_number(session),
                    "rank": rank,
                    "pid": process.pid,
                }
                for session, rank, process in self._sessions.orphans
            ],
        }
        return {
            "service": service,
            "pool": self._pool.statistics(),
            "tokens": self._reports.statistics(),
        }

    # ------------------------------------------------------------ events

    def _accept(self, _mask: int) -> None:
        try:
            connected, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptor left: leave it in the backlog for a tick
            _LOG.warning("accepting paused error=%s", error.strerror)
            self._selector.unregister(self._listener)
            self._accepting = False
            return
        connected.setblocking(False)  # noqa: FBT003
        credentials = peer_credentials(connected)
        peer = Peer(connected, credentials, now_ns=time.monotonic_ns())
        self._peers.add(peer)
        self._selector.register(connected, selectors.EVENT_READ, partial(self._on_peer, peer))
        if credentials.uid != os.geteuid():
            message = f"the pool serves uid {os.geteuid()} only, not {credentials.uid}"
            self._refuse(peer, HandshakeRefused("invalid", "uid", message))
        elif len(self._peers) > CLIENTS_MAX:
            message = f"{CLIENTS_MAX} connections are open"
            self._refuse(peer, HandshakeRefused("full", "clients", message))

    def _on_memory(self, _mask: int) -> None:
        self._growth.take()

    def _on_peer(self, peer: Peer, mask: int) -> None:
        if mask & selectors.EVENT_READ and not peer.frames:
            self._guarded(self._receive, peer)
            self._on_turn(peer)
        elif mask & selectors.EVENT_WRITE:
            self._guarded(self._send, peer)

    def _on_turn(self, peer: Peer) -> None:
        self._guarded(self._serve, peer)
        self._guarded(self._send, peer)
        if peer.has_said_all and not peer.frames and not peer.is_waiting:
            self._endings.append(partial(self._drop, peer, "closed by peer"))

    def _guarded(self, step: Callable[[Peer], None], peer: Peer) -> None:
        """Do ``step`` for one connection; whatever goes wrong in it ends it and no other."""
        if peer.closed:  # by an event of the same round
            return
        try:
            step(peer)
        except InvariantBroken:
            raise
        except (FrameError, msgspec.MsgspecError) as error:
            self._counts["bad_frames"] += 1
            self._drop(peer, f"bad frame: {error}")
        except SlowPeer:
            self._counts["slow_peers_dropped"] += 1
            self._drop(peer, "it does not read its replies")
        except OSError as error:
            self._drop(peer, error.strerror or str(error))
        except Exception:  # noqa: BLE001 - the daemon outlives any one connection
            self._counts["internal_errors"] += 1
            _LOG.exception("connection failed %s", peer.describe())
            self._drop(peer, "an error of the daemon's")
            self._pool.check_invariants()  # nothing may be served from a half-made change

    def _on_death(self, process: Process, _mask: int) -> None:
        self._endings.append(partial(self._died, process))

    def _end_what_ended(self) -> None:
        """End sessions after all else of a round.

        What a process has sent before it, or another of its session, ended is there to be read
        in the same round: its last finishes count.
        """
        endings, self._endings = self._endings, []
        for end in endings:
            end()

    def _died(self, process: Process) -> None:
        if process.closed:
            return
        session = self._sessions.process_died(process)
        if session is not None:
            _LOG.info("process died pid=%d replica=%s", process.pid, session.hello.replica)
            self._end(session)

    def _tick(self, now_ns: int) -> None:
        num_expired = self._pool.expire(now_ns)
        if num_expired:
            _LOG.warning("write leases expired num_leases=%d", num_expired)
        deadline_ns = now_ns - int(HANDSHAKE_S_MAX * 1e9)
        for peer in tuple(self._peers):
            if peer.hello is None and peer.connected_ns < deadline_ns:
                self._drop(peer, "no hello in time")
        self._accept_again()

    # ------------------------------------------------------------ one connection

    def _receive(self, peer: Peer) -> None:
        try:
            is_open = peer.receive(self._buffer)
        except BlockingIOError:
            return
        if is_open:
            return
        if peer.is_waiting and not peer.has_hung_up():
            peer.has_said_all = True  # and listens for the answer still
        else:
            self._endings.append(partial(self._drop, peer, "closed by peer"))

    def _serve(self, peer: Peer) -> None:
        """Answer what has come, for one turn: one client's thousand requests delay no other."""
        self._unserved.pop(peer, None)
        turn_ends_ns = time.monotonic_ns() + _TURN_NS
        while peer.frames and not peer.is_waiting and not peer.closed:
            now_ns = time.monotonic_ns()
            if now_ns >= turn_ends_ns:
                self._unserved[peer] = None  # behind the others
                return
            encoded = peer.frames.popleft()
            self._counts["frames"] += 1
            if peer.hello is None:
                self._greet(peer, encoded)
            else:
                self._answer(peer, encoded, now_ns)

    def _answer(self, peer: Peer, encoded: bytes, now_ns: int) -> None:
        reply = self._dispatch.answer(peer, _decode(_REQUESTS, encoded), now_ns)
        if reply is None:
            return
        try:
            peer.reply(reply)
        except ValueError as error:
            peer.reply(Failed(id=getattr(reply, "id", 0), code="too-large", message=str(error)))

    def _answer_late(self, peer: Peer, reply: Reply) -> None:
        """Answer what has taken until now, and go on with what has come meanwhile."""

        def answer(peer: Peer) -> None:
            peer.reply(reply)
            self._send(peer)
            self._unserved[peer] = None

        self._guarded(answer, peer)

    def _greet(self, peer: Peer, encoded: bytes) -> None:
        try:
            hello = _decode_hello(encoded)
            welcome = self._welcome(peer, hello)
        except HandshakeRefused as refusal:
            self._refuse(peer, refusal)
            return
        peer.hello = hello
        if welcome.session is None:
            peer.reply(welcome)
        else:
            peer.reply_with(welcome, self._arena_fd)
        _LOG.info("client joined %s", peer.describe())

    def _welcome(self, peer: Peer, hello: Hello) -> Welcome:
        session: Session | None = None
        if hello.role == "scheduler":
            session = self._sessions.open(hello, peer)
        elif hello.role == "worker":
            session = self._sessions.join(hello, peer)
        elif hello.role != "admin":
            raise HandshakeRefused("invalid", "role", f"role: {hello.role!r} is unknown")
        return Welcome(
            session=self._sessions.wire_number(session.number) if session else None,
            epoch=self._arena.epoch,
            arena_bytes=self._arena.size_bytes,
            enabled=self._pool.enabled,
            daemon_version=__version__,
            differences=self._sessions.differences(session) if session else {},
        )

    def _refuse(self, peer: Peer, refusal: HandshakeRefused) -> None:
        """Say why, as far as the peer listens, and hang up."""
        self._counts["refused"] += 1
        message = str(refusal)[:_REASON_LENGTH_MAX]
        _LOG.warning("client refused pid=%d reason=%s", peer.credentials.pid, _one_line(message))
        with contextlib.suppress(SlowPeer):
            peer.reply(Refused(code=refusal.code, field=refusal.field, message=message))
        self._drop(peer, f"refused: {refusal.code}")

    def _send(self, peer: Peer) -> None:
        peer.flush()
        self._listen_to(peer)

    def _listen_to(self, peer: Peer) -> None:
        """Have the events that matter reported.

        What a peer has sent is read no further while it cannot be served.
        """
        wanted = selectors.EVENT_WRITE if peer.waiting_bytes else 0
        if not peer.has_said_all and not (peer.is_waiting and peer.frames):
            wanted |= selectors.EVENT_READ
        key = self._selector.get_map().get(peer.socket)
        events = key.events if key else 0
        if wanted == events:
            return
        if events:
            self._selector.unregister(peer.socket)
        if wanted:
            self._selector.register(peer.socket, wanted, partial(self._on_peer, peer))

    def _drop(self, peer: Peer, reason: str) -> None:
        """End a connection, and with it the session it is a member of."""
        if peer.closed:
            return
        _LOG.info("client left %s reason=%s", peer.describe(), _one_line(reason))
        session = self._sessions.of(peer)
        if session is None:
            self._forget(peer)
        else:
            self._end(session)

    def _end(self, session: Session) -> None:
        for peer in self._sessions.end(session):
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        with contextlib.suppress(OSError):
            peer.flush()  # what was answered before is there to be read
        self._peers.discard(peer)
        self._unserved.pop(peer, None)
        if peer.socket in self._selector.get_map():
            self._selector.unregister(peer.socket)
        peer.close()

    # ------------------------------------------------------------ registrations

    def _watch(self, process: Process) -> None:
        self._selector.register(
            process.pidfd, selectors.EVENT_READ, partial(self._on_death, process)
        )

    def _unwatch(self, process: Process) -> None:
        if not process.closed:
            self._selector.unregister(process.pidfd)
            process.close()

    def _accept_again(self) -> None:
        if not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accepting = True

    def _client(self, peer: Peer, now_ns: int) -> dict[str, object]:
        hello = peer.hello
        session = self._sessions.of(peer)
        return {
            "role": hello.role if hello else None,
            "replica": hello.replica if hello and session else None,
            "rank": hello.rank if hello and hello.role == "worker" else None,
            "session": self._sessions.wire_number(session.number) if session else None,
            "pid": peer.credentials.pid,
            "connected_s": (now_ns - peer.connected_ns) / 1e9,
            "link": None if peer.link is None else msgspec.to_builtins(peer.link),
        }


def _wake_up(_mask: int) -> None:
    """Do nothing: what woke the loop has set its stop event."""


def _decode_hello(encoded: bytes) -> Hello:
    """Decode the first frame; a hello of another version is refused by name, not as garbage."""
    version = _decode(_ANY_HELLO, encoded).protocol_version
    if version != PROTOCOL_VERSION:
        message = f"the pool speaks protocol version {PROTOCOL_VERSION}, the client {version}"
        raise HandshakeRefused("version", "protocol_version", message)
    hello = _decode(_REQUESTS, encoded)
    if not isinstance(hello, Hello):
        raise FrameError(f"a {type(hello).__name__} before the hello")
    return hello


def _decode(decoder: "msgspec.msgpack.Decoder[_T]", encoded: bytes) -> _T:
    """Decode a frame; what is nested too deeply is as bad a frame as any."""
    try:
        return decoder.decode(encoded)
    except RecursionError as error:
        raise FrameError("nested too deeply") from error


def _one_line(text: str) -> str:
    """Return the beginning of what a client may have chosen, fit for one line of the log."""
    return repr(text[:_REASON_LENGTH_MAX])[1:-1]
