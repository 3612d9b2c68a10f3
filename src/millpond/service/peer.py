"""The daemon's end of one connection: bytes in, frames out of them; frames in, bytes out."""

import os
import select
import socket
from collections import deque
from typing import Final

import msgspec

from millpond.model.limits import OUTPUT_BYTES_MAX
from millpond.service.framing import FrameDecoder
from millpond.service.peercred import PeerCredentials
from millpond.service.protocol import Hello, Link, Reply, frame
from millpond.service.reaper import Process

_RECEIVE_BYTES: Final = 256 * 1024
_DESCRIPTORS_MAX: Final = 1
_ENCODER: Final = msgspec.msgpack.Encoder()


class SlowPeer(Exception):
    """The peer does not read its replies; more than OUTPUT_BYTES_MAX would wait for it."""


class Peer:
    """One accepted connection. Nothing here blocks; owns the socket and received descriptors."""

    def __init__(
        self, connected: socket.socket, credentials: PeerCredentials, *, now_ns: int
    ) -> None:
        self.socket = connected
        self.credentials = credentials
        self.connected_ns = now_ns
        self.hello: Hello | None = None
        """What it said first; None until the handshake is over."""
        self.session: int | None = None
        """The pool's session that it is a member of."""
        self.link: Link | None = None
        """What a worker said of its way to the arena, last."""
        self.process: Process | None = None
        self.descriptors: list[int] = []
        """Received with the handshake and not claimed yet."""
        self.frames: deque[bytes] = deque()
        """Received and not answered yet; no more is received before they are."""
        self.is_waiting = False
        """Whether the answer to a request takes its time; no other is given before it."""
        self.has_said_all = False
        """Whether it has closed its half of the connection."""
        self.closed = False
        self._decoder = FrameDecoder()
        self._output = bytearray()

    def describe(self) -> str:
        """Name the peer for a log line."""
        if self.hello is None:
            return f"pid={self.credentials.pid}"
        name = f"role={self.hello.role} pid={self.credentials.pid}"
        if self.hello.role == "admin":
            return name
        return f"replica={self.hello.replica} {name} session={self.session}"

    def has_hung_up(self) -> bool:
        """Say whether it has closed both halves: nobody would read an answer."""
        poll = select.poll()
        poll.register(self.socket, 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    @property
    def waiting_bytes(self) -> int:
        """Replies that the kernel has not taken yet."""
        return len(self._output)

    def receive(self, buffer: bytearray) -> bool:
        """Add the frames that have come to ``frames``; return False at the end of the stream.

        ``buffer`` is scratch space. Raises ``FrameError`` and ``OSError``.
        """
        if self.hello is None:
            data, fds, flags, _ = socket.recv_fds(
                self.socket, _RECEIVE_BYTES, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
            )
            self.descriptors += fds
            if flags & socket.MSG_CTRUNC or len(self.descriptors) > _DESCRIPTORS_MAX:
                raise OSError("more descriptors than a handshake has")
            self.frames += self._decoder.feed(data)
            return bool(data)
        num_bytes = self.socket.recv_into(buffer)
        self.frames += self._decoder.feed(memoryview(buffer)[:num_bytes])
        return num_bytes > 0

    def reply(self, message: Reply) -> None:
        """Queue ``message``; ``ValueError`` when it is too large for a frame.

        Raises ``SlowPeer`` when too much is waiting already.
        """
        data = frame(_ENCODER.encode(message))
        if len(self._output) + len(data) > OUTPUT_BYTES_MAX:
            raise SlowPeer
        self._output += data

    def reply_with(self, message: Reply, fd: int) -> None:
        """Send ``message`` together with a duplicate of ``fd``; nothing else may be waiting."""
        data = frame(_ENCODER.encode(message))
        num_sent = socket.send_fds(self.socket, [data], [fd])
        self._output += data[num_sent:]

    def flush(self) -> None:
        """Send what the kernel takes of the waiting replies."""
        while self._output:
            try:
                num_sent = self.socket.send(self._output)
            except BlockingIOError:
                return
            del self._output[:num_sent]

    def take_descriptor(self) -> int | None:
        """Hand over the descriptor that came with the handshake, if any."""
        return self.descriptors.pop() if self.descriptors else None

    def close(self) -> None:
        """Close the socket and every descriptor that nobody took; the process stays open."""
        self.closed = True
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())


def receive_buffer() -> bytearray:
    """Return scratch space for ``Peer.receive``."""
    return bytearray(_RECEIVE_BYTES)
