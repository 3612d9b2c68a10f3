"""The workloads as pure generators: a scenario's table and a seed in, requests out."""

from millpond.bench.scenario import Mixed, Moved, Sessions, Workload
from millpond.bench.workloads.moved import mixed, mixed_groups, moved
from millpond.bench.workloads.replay import replay
from millpond.bench.workloads.requests import Piece, Request, Role, token_ids
from millpond.bench.workloads.sessions import session_groups, sessions

__all__ = [
    "Piece",
    "Request",
    "Role",
    "mixed_groups",
    "requests_of",
    "session_groups",
    "token_ids",
]


def requests_of(workload: Workload, *, seed: str, num_replicas: int) -> list[Request]:
    """Return a workload's requests, each after those that it waits for.

    The same seed gives the same requests. Raises ``ConfigError`` for a trace that can't be
    read.
    """
    if isinstance(workload, Moved):
        return moved(workload, seed=seed, num_replicas=num_replicas)
    if isinstance(workload, Sessions):
        return sessions(workload, seed=seed, num_replicas=num_replicas)
    if isinstance(workload, Mixed):
        return mixed(workload, seed=seed, num_replicas=num_replicas)
    return replay(workload, seed=seed, num_replicas=num_replicas)
