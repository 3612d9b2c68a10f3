"""Every bound of the pool, its wire and its clients, in one place.

A limit is on a count or a size that a peer controls, or on a time that somebody waits.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

PROTOCOL_VERSION: Final = 1
"""Version of the wire; peers of different versions refuse each other."""
FORMAT_VERSION: Final = 2
"""Version of what the bytes in a slot mean; part of every namespace."""

FRAME_BYTES_MAX: Final = 4 * MIB
"""Largest frame on the socket, length prefix excluded."""
OUTPUT_BYTES_MAX: Final = 16 * MIB
"""Replies that may wait for one client before the daemon drops it."""
CLIENTS_MAX: Final = 1024
NAMESPACES_MAX: Final = 256
NAME_LENGTH_MAX: Final = 128
"""Longest replica name, request id or namespace string field (model paths: 4096)."""
STRING_LENGTH_MAX: Final = 4096
KEY_BYTES: Final = (16, 32)
"""Allowed lengths of one block key, in bytes (128-bit and 256-bit digests)."""
KEYS_PER_REQUEST_MAX: Final = 65_536
"""Blocks of one prefix; 65,536 blocks of 256 tokens are 16 M tokens."""
BLOCKS_PER_RESERVE_MAX: Final = 2048
"""Blocks with pages that one reserve grants; the writer asks for the others with its next step.
Granting so many, and evicting for each, takes a fraction of REQUEST_TIMEOUT_S."""
PARTS_MAX: Final = 8
RANKS_MAX: Final = 64
LEASES_PER_SESSION_MAX: Final = 65_536
REPLICAS_SHOWN_MAX: Final = 64
"""Replicas, the latest of all that were seen, that a status tells of: each beside each other."""
LINK_PROBLEM_LENGTH_MAX: Final = 256
"""Characters in which a worker says what is wrong with its link."""
REPORTS_KEPT_MAX: Final = 16_384
"""Request reports the daemon remembers; the oldest is dropped first."""

BLOCKS_SHOWN_MAX: Final = 4096
"""Blocks that one answer describes; with eight parts each they fill a frame."""

BLOCK_TOKENS_MIN: Final = 256
"""A Millpond block is the smallest multiple of the engine's block with this many tokens."""
SLOT_ALIGNMENT_BYTES: Final = 4 * KIB
"""Slots start on a page of memory."""
SUMMED_BYTES_MIN: Final = SLOT_ALIGNMENT_BYTES
"""So many bytes of slots have one checksum's room: less of a layer is summed with the next."""
ARENA_HEADER_BYTES: Final = 2 * MIB
"""Bytes before the first slot; one huge page, so that slots may be huge-page aligned."""
REGISTERED_BYTES: Final = GIB
"""What workers register in one call, or an extent if that is larger, and what the daemon gives
to its pool at a time, so that no slot is handed out in a piece that nobody can register yet."""
EXTENT_BYTES_MIN: Final = 4 * MIB
EXTENT_BYTES_MAX: Final = 4 * GIB
EXTENTS_PER_ARENA: Final = 64
POOL_BYTES_MIN: Final = 16 * MIB

REQUEST_TIMEOUT_S: Final = 0.25
"""How long an engine's scheduler waits for the daemon before it goes on with a miss."""
CONNECT_TIMEOUT_S: Final = 2.0
RECONNECT_S: Final = (0.1, 2.0)
"""First and longest pause between attempts to reach the daemon."""
WRITE_LEASE_S_MAX: Final = 120.0
"""After this long without completion a write lease is expired and its slots quarantined."""
HANDSHAKE_S_MAX: Final = 5.0
"""A connection that has not said hello by then is closed."""
