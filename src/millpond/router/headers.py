"""Headers between client and replica: what passes, what ends at each hop, what is added."""

from collections.abc import Iterable, Sequence
from typing import Final

from millpond.router.records import Record

RawHeaders = Sequence[tuple[bytes, bytes]]

REQUEST_ID: Final = b"x-request-id"
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""RFC 9110, section 7.6.1; each hop has its own."""
_OF_THE_REQUEST: Final = frozenset({b"host", b"content-length", b"expect"})
"""Set anew for the replica: its own address, the length of the body that was read."""


def request_headers(headers: RawHeaders, request_id: str) -> list[tuple[str, str]]:
    """Return what the replica gets; raises ``UnicodeDecodeError`` for what is not UTF-8.

    Everything passes, keys too; of request ids exactly one, for reports to name.
    """
    dropped = _HOP_BY_HOP | _OF_THE_REQUEST | (_named_by_connection(headers) - {REQUEST_ID})
    passed = [(name.decode(), value.decode()) for name, value in headers if name not in dropped]
    others = [(name, value) for name, value in passed if name != REQUEST_ID.decode()]
    # Replicas read headers as Latin-1, and so does our name for the request.
    return [*others, (REQUEST_ID.decode(), request_id.encode("latin-1").decode())]


def response_headers(headers: Iterable[tuple[bytes, bytes]], record: Record) -> RawHeaders:
    """Return what the client gets: all that the replica said, and what the router knows."""
    lowered = [(name.lower(), value) for name, value in headers]
    dropped = _HOP_BY_HOP | _named_by_connection(lowered)
    if record.status == 304:
        dropped |= {b"content-length"}  # of the body that is not sent
    return [(name, value) for name, value in lowered if name not in dropped] + facts(record)


def facts(record: Record) -> list[tuple[bytes, bytes]]:
    """Return what is known of a request when its first byte is there.

    ``x-millpond-prefix-holder`` is the replica with the longest prefix, ``none`` if nobody was
    thought to hold any of it; ``x-millpond-prefix-identity`` says what that rests on.
    """
    found = [
        ("request-id", record.request_id),
        ("policy", record.policy),
        ("replica", record.replica),
    ]
    if record.identity:
        found += [
            ("prefix-holder", record.holder or "none"),
            ("prefix-identity", record.identity),
            ("moved", "yes" if record.is_moved else "no"),
        ]
    return [
        (f"x-millpond-{name}".encode(), value.encode("latin-1", "replace"))
        for name, value in found
        if value is not None
    ]


def _named_by_connection(headers: RawHeaders) -> frozenset[bytes]:
    return frozenset(
        token.strip().lower()
        for name, value in headers
        if name == b"connection"
        for token in value.split(b",")
    )
