"""How a router is configured, and its limits: values only, quick to import."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from millpond.router.placement.chosen import Policy
from millpond.router.prompts import Affinity

METRICS_PATH: Final = "/millpond/metrics"


class Identity(enum.StrEnum):
    """What prompts are named by.

    ``AUTO``: their tokens as soon as a replica publishes its cache's events, else their text.
    """

    TEXT = "text"
    TOKENS = "tokens"
    AUTO = "auto"


class Waits(enum.Enum):
    """Whom an exchange is waiting for."""

    FIRST_BYTE = "first-byte"
    NEXT_BYTE = "next-byte"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Limits:
    """How long an exchange waits, and how much it takes in.

    ``first_byte_s`` has room for the longest prefill and its queue; ``next_byte_s`` for the
    pauses of a stream; ``client_s`` for a client that does not read, or send.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    next_byte_s: float = 300.0
    client_s: float = 120.0
    body_bytes_max: int = 64 * 2**20
    head_bytes_max: int = 64 * 2**10

    def seconds(self, waits: Waits) -> float:
        """Return the limit of a wait."""
        return {
            Waits.FIRST_BYTE: self.first_byte_s,
            Waits.NEXT_BYTE: self.next_byte_s,
            Waits.CLIENT: self.client_s,
        }[waits]


@dataclass(frozen=True, slots=True)
class HealthOptions:
    """``failures_max`` checks in a row may fail before a replica is down.

    An engine that computes a long prompt may answer late; a refused connection counts at once.
    """

    every_s: float = 2.0
    timeout_s: float = 5.0
    failures_max: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How a router places, what it takes for granted, and how long it waits.

    ``local_tokens`` is what a replica's own cache is thought to hold, ``pool_tokens`` what the
    pool is; both only decide when the router forgets a prefix.
    """

    policy: Policy = Policy.COST
    identity: Identity = Identity.AUTO
    api_key: str | None = None
    affinity: Affinity = field(default_factory=Affinity)
    limits: Limits = field(default_factory=Limits)
    health: HealthOptions = field(default_factory=HealthOptions)
    local_tokens: int = 1_000_000
    pool_tokens: int = 16_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to serve where. ``port`` 0 takes a free one; ``pool_socket`` may lead nowhere.

    Streams that still run ``stop_grace_s`` after a signal are cut off.
    """

    host: str
    port: int
    replicas: Mapping[str, str]
    admin_socket: Path
    pool_socket: Path | None
    access_log: Path | None = None
    stop_grace_s: float = 10.0
    router: RouterOptions = field(default_factory=RouterOptions)


@dataclass(frozen=True, slots=True)
class Serving:
    """A router that accepts requests."""

    url: str
    admin_socket: Path
