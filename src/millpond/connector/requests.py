"""What the scheduler's side remembers of one request."""

import hashlib
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request

from millpond.model.leases import ReadLease
from millpond.model.names import Outcome


@dataclass(frozen=True, slots=True)
class Pinned:
    """A read lease that no worker has been told of, and what it was asked for."""

    lease: ReadLease
    lease_id: int
    session: int
    first_block: int


@dataclass(slots=True)
class RequestState:
    """One request from its first lookup to the last copy of its blocks.

    ``adapter`` is the digest of its LoRA adapter, empty without one.
    ``tables[g]`` is group g's block table as scheduled so far (0: the null block).
    ``num_offered`` blocks have been offered to the pool, ``num_reached`` have been computed
    when some step was planned: states and windows of blocks before that may be recycled.
    ``start_blocks`` were there when the first step was planned, and ``num_inner_states`` of
    steps that ended within the prompt have been offered since.
    ``store_jobs`` are in flight. ``outcome`` is that of the last lookup; the times, of
    ``time.monotonic``, belong to waiting for a prefix that another replica is computing.
    """

    request: Request
    skips_pool: bool
    adapter: bytes = b""
    keys: bytearray = field(default_factory=bytearray)
    key_bytes: int = 0
    tables: list[list[int]] = field(default_factory=list[list[int]])
    num_offered: int = 0
    num_reached: int = 0
    start_blocks: int | None = None
    num_inner_states: int = 0
    pinned: Pinned | None = None
    outcome: Outcome = Outcome.MISS
    waits_since_s: float | None = None
    pending_seen_s: float = 0.0
    ask_again_s: float = 0.0
    is_loading: bool = False
    load_failed: bool = False
    local_tokens: int = 0
    loaded_tokens: int = 0
    writers: dict[str, int] = field(default_factory=dict[str, int])
    store_jobs: set[int] = field(default_factory=set[int])
    is_finished: bool = False

    def extend_keys(self, block_tokens: int, hash_tokens: int) -> int:
        """Append the keys of blocks that have become hashable; return how many there are."""
        per_block = block_tokens // hash_tokens
        hashes = self.request.block_hashes
        num_known = len(self.keys) // self.key_bytes if self.key_bytes else 0
        num_blocks = len(hashes) // per_block
        for block in range(num_known, num_blocks):
            # The hash is chained: the last one of a block names the whole prefix up to there.
            key = hashes[(block + 1) * per_block - 1]
            if self.adapter:
                key = hashlib.sha256(key + self.adapter).digest()
            self.keys += key
            self.key_bytes = len(key)
        return max(num_known, num_blocks)

    def checksum_seed(self, block: int) -> int:
        """Return the first 8 bytes of a block's key as a number."""
        start = block * self.key_bytes
        return int.from_bytes(self.keys[start : start + 8], "little")

    def prefix(self, num_blocks: int) -> bytes:
        """Return the keys of the first ``num_blocks`` blocks, packed."""
        return bytes(self.keys[: num_blocks * self.key_bytes])


SKIP_PARAMETER = "millpond"
SKIP_VALUE = "off"


def skips_pool(request: Request) -> bool:
    """Say whether this request leaves the pool alone.

    Because its user asked for it, by ``"kv_transfer_params": {"millpond": "off"}`` in the body
    of a completion request; or because its prompt comes in pieces (``resumable``), between
    which the engine takes back tokens, and with them hashes that were given out before.
    """
    if request.resumable:
        return True
    parameters: dict[str, Any] | None = request.kv_transfer_params
    return bool(parameters) and parameters.get(SKIP_PARAMETER) == SKIP_VALUE
