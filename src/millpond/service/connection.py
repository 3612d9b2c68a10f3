"""A client's end of the socket: one blocking connection with a deadline on every call."""

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec

from millpond.model.errors import (
    DaemonGone,
    HandshakeRefused,
    InvariantBroken,
    MillpondError,
    RequestTimedOut,
)
from millpond.service.framing import FrameDecoder, FrameError
from millpond.service.peercred import peer_credentials
from millpond.service.protocol import (
    Failed,
    Hello,
    Refused,
    Reply,
    Request,
    Welcome,
    frame,
)

_RECEIVE_BYTES: Final = 256 * 1024
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Reply)


class _Numbered(Protocol):
    @property
    def id(self) -> int: ...


_ReplyT = TypeVar("_ReplyT", bound=_Numbered)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a successful handshake gave: the daemon's welcome and the arena's descriptor.

    The receiver owns ``arena_fd`` and closes it; admins get None.
    """

    welcome: Welcome
    arena_fd: int | None


class Connection:
    """One connection to the daemon, from handshake to the first error.

    Replies come in the order of requests, so after a time-out or a broken read the stream is
    out of step: any error closes the connection, and every later call raises ``DaemonGone``.
    Safe for several threads, which take turns; ``poll_closed`` never waits for another call.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        """Connect within ``timeout_s``; raises ``DaemonGone`` or ``HandshakeRefused``."""
        self.path = path
        self._lock = threading.Lock()
        self._decoder = FrameDecoder()
        self._next_id = 0
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
            self._refuse_stranger()
        except OSError as error:
            self._socket.close()
            raise DaemonGone(f"no daemon at {path}: {error.strerror or error}") from error
        except MillpondError:
            self._socket.close()
            raise

    def greet(self, hello: Hello, *, pidfd: int | None, timeout_s: float) -> Greeting:
        """Shake hands, sending a duplicate of ``pidfd`` along; must be the first call."""
        deadline = time.monotonic() + timeout_s
        data = frame(_ENCODER.encode(hello))
        with self._lock:
            try:
                self._socket.settimeout(timeout_s)
                # A daemon that refuses us before it has read all hangs up on our sending, but
                # its reason is there to be read.
                with contextlib.suppress(BrokenPipeError):
                    fds = [] if pidfd is None else [pidfd]
                    num_sent = socket.send_fds(self._socket, [data], fds)
                    if num_sent < len(data):
                        self._socket.sendall(data[num_sent:])
                encoded, arena_fd = self._receive_greeting(deadline)
            except (OSError, FrameError) as error:
                raise self._broken(error) from error
        try:
            return Greeting(self._welcome(encoded), arena_fd)
        except MillpondError:
            self.close()
            if arena_fd is not None:
                os.close(arena_fd)
            raise

    def next_id(self) -> int:
        """Return an id that no earlier request of this connection had."""
        self._next_id += 1
        return self._next_id

    def call(self, request: Request, reply_type: type[_ReplyT], timeout_s: float) -> _ReplyT:
        """Send ``request`` and return its reply.

        Raises ``RequestTimedOut`` or ``DaemonGone`` (the connection is closed then),
        ``ValueError`` for a request that the daemon finds out of its limits, and
        ``InvariantBroken`` when the daemon reports that of itself.
        """
        data = frame(_ENCODER.encode(request))
        with self._lock:
            try:
                self._check_open()
                self._socket.settimeout(timeout_s)
                deadline = time.monotonic() + timeout_s
                self._socket.sendall(data)
                reply = _DECODER.decode(self._receive(deadline))
            except (OSError, FrameError, msgspec.MsgspecError) as error:
                raise self._broken(error) from error
            if isinstance(reply, reply_type) and reply.id == getattr(request, "id", None):
                return reply
            if not isinstance(reply, Failed):
                raise self._broken(FrameError(f"a {type(reply).__name__} out of step"))
        if reply.code == "broken":
            raise InvariantBroken(reply.message)
        raise ValueError(f"{reply.code}: {reply.message}")

    def send(self, message: Request, timeout_s: float) -> None:
        """Send a message that has no reply; blocks only while the socket's buffer is full."""
        data = frame(_ENCODER.encode(message))
        with self._lock:
            try:
                self._check_open()
                self._socket.settimeout(timeout_s)
                self._socket.sendall(data)
            except OSError as error:
                raise self._broken(error) from error

    def poll_closed(self) -> bool:
        """Return whether the connection has ended, without waiting."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread is in a call and will learn it by itself
        try:
            if self._closed:
                return True
            # With a time-out set, Python waits for data before it looks at any flag.
            self._socket.settimeout(0.0)
            if self._socket.recv(1, socket.MSG_PEEK):
                self._broken(FrameError("a frame that nobody asked for"))
            self._close()
        except BlockingIOError:
            return False
        except OSError:
            self._close()
        finally:
            self._lock.release()
        return True

    def close(self) -> None:
        """Close the socket; waits for a call in another thread (bounded by its time-out)."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._socket.close()

    def _check_open(self) -> None:
        if self._closed:
            raise DaemonGone(f"the connection to {self.path} is closed")

    def _broken(self, error: Exception) -> MillpondError:
        """Close, and return what to raise for ``error``."""
        self._close()
        if isinstance(error, TimeoutError):
            return RequestTimedOut(f"the daemon at {self.path} did not answer in time")
        return DaemonGone(f"the connection to {self.path} broke: {error}")

    def _refuse_stranger(self) -> None:
        """Attach no memory that another user's process offers."""
        peer = peer_credentials(self._socket)
        if peer.uid != os.geteuid():
            message = f"the daemon at {self.path} runs as uid {peer.uid}, this is {os.geteuid()}"
            raise HandshakeRefused("invalid", "uid", message)

    def _receive(self, deadline: float) -> bytes:
        """Return the next frame; there must never be more than one on its way."""
        while True:
            self._socket.settimeout(_remaining(deadline))
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise ConnectionResetError("the daemon closed it")
            frames = self._decoder.feed(data)
            if len(frames) > 1 or (frames and self._decoder.buffered_bytes):
                raise FrameError("more replies than requests")
            if frames:
                return frames[0]

    def _receive_greeting(self, deadline: float) -> tuple[bytes, int | None]:
        """Return the first frame and the descriptor that came with it."""
        received: list[int] = []
        try:
            while True:
                self._socket.settimeout(_remaining(deadline))
                data, fds, flags, _ = socket.recv_fds(
                    self._socket, _RECEIVE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
                )
                received += fds
                if not data or flags & socket.MSG_CTRUNC or len(received) > 1:
                    raise ConnectionResetError("the daemon closed it during the handshake")
                frames = self._decoder.feed(data)
                if frames:
                    return frames[0], received.pop() if received else None
        finally:
            for fd in received:
                os.close(fd)

    def _welcome(self, encoded: bytes) -> Welcome:
        try:
            reply = _DECODER.decode(encoded)
        except msgspec.MsgspecError as error:
            raise DaemonGone(f"no Millpond daemon at {self.path}: {error}") from error
        if isinstance(reply, Refused):
            raise HandshakeRefused(reply.code, reply.field, reply.message)
        if not isinstance(reply, Welcome):
            raise DaemonGone(f"no Millpond daemon at {self.path}: {type(reply).__name__}")
        return reply


def _remaining(deadline: float) -> float:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s
