"""What a workload is made of: requests with their prompts, places and times."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

Role = Literal["cold", "moved", "local", "any"]
"""``cold``: nobody has seen the prompt. ``moved``: another replica than the one asked holds its
longest prefix. ``local``: the one asked does. ``any``: a trace does not say."""

_TOKEN_IDS: Final = (256, 2000)
"""Ids that every vocabulary has, and none of which ends a text in the tiny models."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a prompt: equal seeds give equal tokens."""

    seed: str
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request. Equal ``key`` in two periods means the same prompt: they are paired by it.

    ``group`` is the row of a report it belongs to. ``unit`` is what is summed up: a session
    or the requests of one prompt. It is sent ``wait_s`` after the end of request ``after``,
    and not before ``arrival_s`` of the period, whatever other requests do. ``replica`` counts
    the targets from 0.
    """

    key: str
    group: str
    role: Role
    unit: str
    pieces: tuple[Piece, ...]
    output_tokens: int
    replica: int
    turn: int = 0
    after: str | None = None
    wait_s: float = 0.0
    arrival_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return sum(piece.num_tokens for piece in self.pieces)


def token_ids(pieces: Iterable[Piece]) -> list[int]:
    """Return the tokens of a prompt; the seeds alone decide them."""
    ids: list[int] = []
    for piece in pieces:
        digest = hashlib.blake2b(piece.seed.encode(), digest_size=16).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "big"))
        ids += generator.integers(*_TOKEN_IDS, piece.num_tokens).tolist()
    return ids


def in_lanes(units: Sequence[Sequence[Request]], num_lanes: int) -> list[Request]:
    """Return all requests so that ``num_lanes`` units are under way at once.

    Each unit's first request follows the last one of the unit before it in its lane.
    """
    requests: list[Request] = []
    for i, unit in enumerate(units):
        first, *rest = unit
        if i >= num_lanes:
            first = replace(first, after=units[i - num_lanes][-1].key)
        requests += (first, *rest)
    return requests
