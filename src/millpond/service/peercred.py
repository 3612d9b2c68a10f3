"""Who is at the other end of a Unix socket."""

import socket
import struct
from typing import Final, NamedTuple

_UCRED: Final = struct.Struct("3i")


class PeerCredentials(NamedTuple):
    """The peer as the kernel knows it; ``pid`` is 0 where our pid namespace can't see it."""

    pid: int
    uid: int
    gid: int


def peer_credentials(connected: socket.socket) -> PeerCredentials:
    """Return who connected, or for a client who listens."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return PeerCredentials(*_UCRED.unpack(data))
