"""Errors of Millpond.

    MillpondError
    ├── ExpectedError            happens in production; callers turn it into a miss
    │   ├── DaemonGone           no daemon at the socket, or the connection broke
    │   ├── RequestTimedOut      the daemon did not answer in time
    │   ├── HandshakeRefused     the daemon says why this peer may not join
    │   ├── LeaseUnknown         the lease has ended, expired, or was never granted
    │   └── StaleSlot            the slot's epoch or generation has moved
    ├── SetupError               the user has to change something; carries the remedy
    │   ├── ConfigError          an unknown key or a value that cannot be parsed
    │   ├── ArenaTooLarge        more memory than the machine or its cgroup can give
    │   ├── SocketUnusable       path too long, not writable, or already served
    │   └── UnsupportedEngine    a model or an engine setting that cannot be served
    └── InvariantBroken          a bug in Millpond; the daemon stops serving

Misuse of an interface is a ``ValueError`` with the offending value.
"""


class MillpondError(Exception):
    """Base of all errors that Millpond raises on purpose."""


class ExpectedError(MillpondError):
    """Part of normal life with processes that die; the worst outcome is a miss."""


class DaemonGone(ExpectedError):
    """No daemon answers at the socket, or the connection to it broke."""


class RequestTimedOut(ExpectedError):
    """The daemon did not answer within the client's limit; the connection is closed."""


class HandshakeRefused(ExpectedError):
    """The daemon refused the handshake.

    ``code`` is a word of docs/PROTOCOL.md, ``field`` names what differs.
    """

    def __init__(self, code: str, field: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class LeaseUnknown(ExpectedError):
    """A lease id that is not live: ended, expired or never granted."""

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"lease {lease_id} is not live")
        self.lease_id = lease_id


class StaleSlot(ExpectedError):
    """A slot reference whose epoch or generation has moved on."""


class SetupError(MillpondError):
    """Something the user can mend; the message names the value and the remedy."""


class ConfigError(SetupError):
    """An unknown configuration key or a value that cannot be parsed."""


class ArenaTooLarge(SetupError):
    """The arena would not fit into memory; ``wanted_bytes`` and ``available_bytes`` say so."""

    def __init__(self, message: str, *, wanted_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.wanted_bytes = wanted_bytes
        self.available_bytes = available_bytes


class SocketUnusable(SetupError):
    """The socket path is too long, not writable, or another daemon serves it."""


class UnsupportedEngine(SetupError):
    """The engine runs in a way whose key/value state cannot be shared safely."""


class InvariantBroken(MillpondError):
    """The pool contradicts itself: a bug. Nothing may be served from it any more."""
