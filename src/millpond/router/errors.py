"""What the router itself answers when it cannot pass something on, in the API's own form."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

Headers = Sequence[tuple[bytes, bytes]]


class Ended(enum.StrEnum):
    """How a request ended."""

    COMPLETE = "complete"
    CLIENT_GONE = "client-gone"
    CLIENT_STALLED = "client-stalled"
    REPLICA_GONE = "replica-gone"
    REPLICA_SILENT = "replica-silent"
    NO_REPLICA = "no-replica"
    REFUSED = "refused"
    ROUTER_STOPPED = "router-stopped"
    ROUTER_FAILED = "router-failed"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer of the router's own."""

    status: int
    kind: str
    message: str
    ended: Ended = Ended.REFUSED
    headers: Headers = ()

    def body(self) -> bytes:
        """Return the body of an answer."""
        return msgspec.json.encode({"error": self._fields()})

    def event(self, path: str) -> bytes:
        """Return the server-sent events that end a stream with this error."""
        if path == "/v1/responses":
            fields = {"type": "error", "sequence_number": 0, "error": self._fields()}
            return b"event: error\ndata: " + msgspec.json.encode(fields) + b"\n\n"
        return b"data: " + self.body() + b"\n\ndata: [DONE]\n\n"

    def _fields(self) -> dict[str, object]:
        return {"message": self.message, "type": self.kind, "param": None, "code": self.status}


def unauthorized() -> Refusal:
    """The router's own key is missing or wrong."""
    return Refusal(401, "AuthenticationError", "the router's API key is missing or wrong")


def password_missing() -> Refusal:
    """The same where people come with browsers, which then ask for a password."""
    return Refusal(
        401,
        "AuthenticationError",
        "the router's API key is missing or wrong; in a browser it is the password",
        headers=((b"www-authenticate", b'Basic realm="Millpond router", charset="UTF-8"'),),
    )


def bad_header() -> Refusal:
    """A header's bytes cannot be passed on as they are."""
    return Refusal(400, "BadRequestError", "a header is not UTF-8")


def not_found(path: str) -> Refusal:
    """Below the router's own paths there is nothing else."""
    return Refusal(404, "NotFoundError", f"the router has no {path}")


def body_too_large(bytes_max: int) -> Refusal:
    """The body is longer than the router keeps in memory."""
    return Refusal(413, "BadRequestError", f"the body has more than {bytes_max} bytes")


def body_late(seconds: float) -> Refusal:
    """The client stopped sending its body."""
    return Refusal(408, "BadRequestError", f"no more of the body came for {seconds:g} s")


def no_replica() -> Refusal:
    """Nobody is ready."""
    return Refusal(503, "ServiceUnavailableError", "no replica is ready", ended=Ended.NO_REPLICA)


def replica_gone(name: str) -> Refusal:
    """The replica ended the connection, or never accepted it."""
    return Refusal(
        502, "BadGatewayError", f"replica {name} ended the connection", ended=Ended.REPLICA_GONE
    )


def replica_silent(name: str, seconds: float) -> Refusal:
    """The replica sent nothing for too long."""
    return Refusal(
        504,
        "GatewayTimeoutError",
        f"replica {name} sent nothing for {seconds:g} s",
        ended=Ended.REPLICA_SILENT,
    )
