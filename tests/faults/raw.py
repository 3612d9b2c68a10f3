"""A client that says whatever a test wants, byte for byte."""

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from millpond.service.framing import FrameDecoder
from millpond.service.protocol import Hello, Reply, frame
from tests.faults.world import WAIT_S, namespace


def scheduler_hello(**changes: object) -> Hello:
    """Return a hello that the daemon accepts, but for ``changes``."""
    fields: dict[str, Any] = {
        "role": "scheduler",
        "replica": "raw",
        "session_key": "raw-1",
        "namespace": namespace(),
    }
    return Hello(**(fields | changes))


class RawClient:
    """A connected socket with no manners of its own; every wait is bounded."""

    def __init__(self, socket_path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(socket_path)
        self._decoder = FrameDecoder()
        self._frames: list[bytes] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave, and wait until the daemon has noticed."""
        with self.socket, contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            while self.socket.recv(1 << 20):
                pass

    def send(self, message: msgspec.Struct | dict[str, object]) -> None:
        """Send one well-framed message."""
        self.socket.sendall(frame(msgspec.msgpack.encode(message)))

    def send_with(self, message: msgspec.Struct, fds: Sequence[int]) -> None:
        """Send one message together with descriptors."""
        data = frame(msgspec.msgpack.encode(message))
        num_sent = socket.send_fds(self.socket, [data], fds)
        if num_sent < len(data):
            self.socket.sendall(data[num_sent:])

    def greet(self, hello: Hello) -> Any:  # noqa: ANN401
        """Shake hands with an own pidfd; return the reply."""
        pidfd = os.pidfd_open(os.getpid())
        try:
            self.send_with(hello, [pidfd])
        finally:
            os.close(pidfd)
        return self.reply()

    def reply(self) -> Any:  # noqa: ANN401
        """Return the next reply, closing descriptors that come along; None at the end."""
        while not self._frames:
            try:
                data, fds, _, _ = socket.recv_fds(self.socket, 1 << 20, 4)
            except ConnectionResetError:
                return None
            for fd in fds:
                os.close(fd)
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return msgspec.msgpack.decode(self._frames.pop(0), type=Reply)

    def is_hung_up(self) -> bool:
        """Wait for the daemon to close, and say whether it did without a word."""
        return self.reply() is None
