"""The wire between the daemon and its clients, as types. docs/PROTOCOL.md is the prose.

A frame is a little-endian u32 length and that many bytes of msgpack: a map with a ``type``
field and the fields below. Each request carries an ``id`` that its one reply repeats; replies
come in the order of the requests. ``Finish``, ``Report`` and ``Link`` have no reply.

Bulk values are packed so that neither side loops over them to parse: ``keys`` is the
concatenation of equally long block keys, ``offsets`` are little-endian u64 arrays.
"""

import struct
from array import array
from collections.abc import Sequence
from typing import Final

import msgspec

from millpond.model.limits import FRAME_BYTES_MAX, PROTOCOL_VERSION
from millpond.model.namespace import FieldDifference, Namespace

LENGTH: Final = struct.Struct("<I")


class _Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all frames; the tag is the class name in kebab-case given below."""


# ---------------------------------------------------------------- client → daemon


class Hello(_Frame, frozen=True, forbid_unknown_fields=True, tag="hello", kw_only=True):
    """First frame of every connection; a pidfd of the sender rides along (SCM_RIGHTS).

    ``role`` is ``scheduler`` (looks up, reserves, pins), ``worker`` (copies, finishes) or
    ``admin`` (status and switches; no namespace, no pidfd, no arena). A scheduler opens a
    session under ``session_key``; workers of the same ``session_key`` join it, one a rank.
    A worker takes part in its session's namespace and need not name it; if it does, it must
    be the same.
    ``drained`` (workers): earlier sessions of this process in which it has no copy in flight.
    """

    role: str
    protocol_version: int = PROTOCOL_VERSION
    replica: str = ""
    session_key: str = ""
    rank: int = 0
    num_ranks: int = 1
    namespace: Namespace | None = None
    drained: tuple[int, ...] = ()


class Lookup(_Frame, frozen=True, forbid_unknown_fields=True, tag="lookup", kw_only=True):
    """Ask for the longest usable prefix of ``keys``. Reply: ``LookupReply``."""

    id: int
    keys: bytes
    key_bytes: int


class Pin(_Frame, frozen=True, forbid_unknown_fields=True, tag="pin", kw_only=True):
    """Look up and hold the longest usable prefix of ``keys`` in one step.

    Grants nothing unless more than ``first_block`` blocks are usable. Reply: ``Pinned``.
    """

    id: int
    keys: bytes
    key_bytes: int
    first_block: int


class Reserve(_Frame, frozen=True, forbid_unknown_fields=True, tag="reserve", kw_only=True):
    """Ask for slots for what is missing of the prefix ``keys``, from ``first_block`` on.

    ``parts[p]`` names the blocks for which part p can be written now, as a packed u64 array;
    a part with coverage ``every`` covers all blocks from ``first_block`` and its entry is
    empty. ``request_id`` is the same for all reserves of one request, which offers its prefix
    again with each step; None counts as a request of its own. Reply: ``Reserved``.
    """

    id: int
    keys: bytes
    key_bytes: int
    first_block: int
    parts: tuple[bytes, ...]
    request_id: str | None = None


class Finish(_Frame, frozen=True, forbid_unknown_fields=True, tag="finish", kw_only=True):
    """This rank has no copy in flight for these leases any more. No reply.

    ``ok`` False aborts a write lease; for a read lease it only ends the rank's part. ``rank``
    None speaks for all ranks: only a scheduler may, for leases it never handed to a worker.
    ``num_checked`` slots of one read lease were compared with their checksums; those at the
    offsets ``damaged`` had other bytes than were written.
    """

    leases: tuple[int, ...]
    ok: bool
    rank: int | None = None
    num_checked: int = 0
    damaged: tuple[int, ...] = ()


class Report(_Frame, frozen=True, forbid_unknown_fields=True, tag="report", kw_only=True):
    """Where the tokens of one finished request came from. No reply.

    ``writers`` counts loaded tokens by the replica that wrote them; they sum to
    ``loaded_tokens``, and the three sources sum to ``prompt_tokens``.
    """

    request_id: str
    prompt_tokens: int
    computed_tokens: int
    local_tokens: int
    loaded_tokens: int
    writers: dict[str, int]


class Link(_Frame, frozen=True, forbid_unknown_fields=True, tag="link", kw_only=True):
    """What a worker knows of its way to the arena. No reply; the latest one counts.

    GB/s (1e9 bytes) measured each way and what the link's kind allows, None where not known.
    ``problem`` is "" or says which part of the arena it cannot use, and why.
    """

    h2d_gb_s: float | None = None
    d2h_gb_s: float | None = None
    allowed_gb_s: float | None = None
    problem: str = ""


class Status(_Frame, frozen=True, forbid_unknown_fields=True, tag="status", kw_only=True):
    """Ask for ``statistics()``. Reply: ``StatusReply``. Any role."""

    id: int


class Switch(_Frame, frozen=True, forbid_unknown_fields=True, tag="switch", kw_only=True):
    """Turn the whole pool on or off; off, lookups miss and nothing is reserved. ``Done``."""

    id: int
    enabled: bool


class Flush(_Frame, frozen=True, forbid_unknown_fields=True, tag="flush", kw_only=True):
    """Forget every block; slots in use are freed when their leases end. Reply: ``Done``."""

    id: int


class Requests(_Frame, frozen=True, forbid_unknown_fields=True, tag="requests", kw_only=True):
    """Ask for reports: of one request as the client named it, or the latest ``last``.

    Reply: ``RequestsReply``. An engine wraps the name of a request in a prefix and suffixes;
    docs/PROTOCOL.md says how the two are matched.
    """

    id: int
    request_id: str = ""
    last: int = 0


class Blocks(_Frame, frozen=True, forbid_unknown_fields=True, tag="blocks", kw_only=True):
    """Ask where at most ``num_max`` (to BLOCKS_SHOWN_MAX) blocks lie. Reply: ``BlocksReply``."""

    id: int
    num_max: int


class Check(_Frame, frozen=True, forbid_unknown_fields=True, tag="check", kw_only=True):
    """Ask for ``check_invariants()``. Reply: ``Done`` or ``Failed`` with code ``broken``."""

    id: int


# ---------------------------------------------------------------- daemon → client


class Welcome(_Frame, frozen=True, forbid_unknown_fields=True, tag="welcome", kw_only=True):
    """The handshake succeeded; the arena's memfd rides along (not for admins).

    ``session`` is never used again, by no later daemon either; admins get None.
    ``differences`` lists, for each connected replica of the same model name that this one
    does *not* share with, the fields of the namespace that differ.
    """

    session: int | None
    epoch: int
    arena_bytes: int
    enabled: bool
    daemon_version: str
    protocol_version: int = PROTOCOL_VERSION
    differences: dict[str, tuple[FieldDifference, ...]] = {}


class Refused(_Frame, frozen=True, forbid_unknown_fields=True, tag="refused", kw_only=True):
    """The handshake failed; the daemon closes. ``field`` names what is at fault.

    ``code``: ``version`` · ``no-session`` (a worker before its scheduler: try again) ·
    ``invalid`` · ``too-large`` (a slot larger than an extent) · ``full`` (a limit on clients
    or namespaces) · ``taken`` (the rank or the replica's name is held by a live process).
    """

    code: str
    field: str
    message: str


class LookupReply(
    _Frame, frozen=True, forbid_unknown_fields=True, tag="lookup-reply", kw_only=True
):
    """``outcome`` is ``hit``, ``pending`` or ``miss``: what stands after the usable prefix."""

    id: int
    num_blocks: int
    outcome: str


class Pinned(_Frame, frozen=True, forbid_unknown_fields=True, tag="pinned", kw_only=True):
    """``offsets[p]`` packs pairs (block, offset); ``lease`` is None where none was granted."""

    id: int
    lease: int | None
    num_blocks: int
    outcome: str
    offsets: tuple[bytes, ...] = ()
    writers: tuple[tuple[str, int], ...] = ()
    reason: str = ""


class Reserved(_Frame, frozen=True, forbid_unknown_fields=True, tag="reserved", kw_only=True):
    """``offsets[p]`` packs one offset (or NO_SLOT) for each block from ``first_block`` on.

    ``first_block`` is the first block that has a slot: not before the one that was asked for.
    """

    id: int
    lease: int | None
    first_block: int
    offsets: tuple[bytes, ...] = ()
    reason: str = ""


class StatusReply(
    _Frame, frozen=True, forbid_unknown_fields=True, tag="status-reply", kw_only=True
):
    """``statistics`` has the maps ``service``, ``pool`` and, by replica, ``tokens``."""

    id: int
    statistics: dict[str, object]


class BlocksReply(
    _Frame, frozen=True, forbid_unknown_fields=True, tag="blocks-reply", kw_only=True
):
    """Each block as a map, after the block before it in its prefix: see docs/PROTOCOL.md."""

    id: int
    blocks: tuple[dict[str, object], ...]


class RequestsReply(
    _Frame, frozen=True, forbid_unknown_fields=True, tag="requests-reply", kw_only=True
):
    """``reports`` are ``Report`` frames with the reading replica's name added, oldest first."""

    id: int
    reports: tuple[tuple[str, Report], ...]


class Done(_Frame, frozen=True, forbid_unknown_fields=True, tag="done", kw_only=True):
    """The request was served and has no result."""

    id: int


class Failed(_Frame, frozen=True, forbid_unknown_fields=True, tag="failed", kw_only=True):
    """A request that was understood and cannot be served; the connection stays open."""

    id: int
    code: str
    message: str


Request = (
    Hello
    | Lookup
    | Pin
    | Reserve
    | Finish
    | Report
    | Link
    | Status
    | Switch
    | Flush
    | Requests
    | Blocks
    | Check
)
Reply = (
    Welcome
    | Refused
    | LookupReply
    | Pinned
    | Reserved
    | StatusReply
    | RequestsReply
    | BlocksReply
    | Done
    | Failed
)


def pack_u64(values: "Sequence[int] | array[int]") -> bytes:
    """Return ``values`` as little-endian u64 (the only byte order that Millpond runs on)."""
    packed = values if isinstance(values, array) else array("Q", values)
    return packed.tobytes()


def unpack_u64(data: bytes) -> "array[int]":
    """Return the u64 values in ``data``; ``ValueError`` unless its length is a multiple of 8."""
    values: array[int] = array("Q")
    values.frombytes(data)
    return values


def frame(encoded: bytes) -> bytes:
    """Return ``encoded`` with its length prefix; ``ValueError`` beyond FRAME_BYTES_MAX."""
    if len(encoded) > FRAME_BYTES_MAX:
        raise ValueError(f"frame of {len(encoded)} bytes, at most {FRAME_BYTES_MAX}")
    return LENGTH.pack(len(encoded)) + encoded
