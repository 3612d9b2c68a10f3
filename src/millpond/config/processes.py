"""What each process needs to know, as frozen values."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millpond.model.retention import DEFAULT_RETENTION, Retention


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """What a daemon needs. ``extent_bytes`` None lets the pool choose."""

    socket: Path
    size_bytes: int
    extent_bytes: int | None
    retention: Retention = DEFAULT_RETENTION


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """What an engine's connector needs.

    ``replica`` None lets the connector make up a name. ``copy_delay_s`` holds back each copy
    on the CPU, for tests of what happens meanwhile. ``pending_wait_s`` is how long a request
    waits for a prefix that another replica is computing; 0 never waits. ``check_ratio`` of
    the loaded slots are compared with their checksums; at 0 stores write none either.
    ``early_loads`` lets an engine with nothing to compute launch the forward pass while a load
    goes on.
    """

    socket: Path
    replica: str | None
    store: bool
    load: bool
    copy_delay_s: float
    pending_wait_s: float
    check_ratio: float
    early_loads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """What a router needs. ``replicas`` maps names to addresses as they were written.

    ``port`` 0 takes a free one. ``access_log`` None keeps none; without ``api_key_file`` keys
    only pass through.
    """

    replicas: Mapping[str, str]
    policy: str
    identity: str
    host: str
    port: int
    pool_socket: Path
    admin_socket: Path
    access_log: Path | None
    api_key_file: Path | None
    affinity_header: str
    affinity_cookie: str
    local_tokens: int
    pool_tokens: int
    first_byte_timeout_s: float
    next_byte_timeout_s: float
    body_bytes_max: int
    stop_grace_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """What ``millpond up`` needs.

    ``replica_port`` None picks free ports for the replicas, else they count up from it.
    ``router`` has no replicas yet; None starts none.
    """

    model: str
    num_replicas: int
    device: str
    replica_port: int | None
    run_dir: Path | None
    start_timeout_s: float
    stop_grace_s: float
    pool: PoolConfig
    router: RouterConfig | None
