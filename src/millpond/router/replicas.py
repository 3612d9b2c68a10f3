"""The replicas behind the router: their state, their load, and who is to get nothing new."""

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from millpond.router.placement.base import ReplicaLoad


class State(enum.StrEnum):
    """What the last health checks say."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"


@dataclass(slots=True)
class Replica:
    """One engine. ``queued_tokens`` belong to requests without a first byte yet."""

    name: str
    url: str
    state: State = State.STARTING
    is_draining: bool = False
    num_running: int = 0
    queued_tokens: int = 0
    num_requests: int = 0
    num_failed_checks: int = field(default=0, repr=False)

    @property
    def is_available(self) -> bool:
        """Whether it may get a request."""
        return self.state is State.READY and not self.is_draining

    def statistics(self) -> dict[str, object]:
        """Return what an operator wants to know of it."""
        return {
            "name": self.name,
            "url": self.url,
            "state": self.state.value,
            "is_draining": self.is_draining,
            "num_running": self.num_running,
            "queued_tokens": self.queued_tokens,
            "num_requests": self.num_requests,
        }


class Replicas:
    """All replicas by name, in the order in which they were added."""

    def __init__(self) -> None:
        self._by_name: dict[str, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter(tuple(self._by_name.values()))

    def __getitem__(self, name: str) -> Replica:
        return self._by_name[name]

    def add(self, name: str, url: str) -> Replica:
        """Take a replica in; one that is draining comes back, also under another address.

        Raises ``ValueError`` for a bad address, and for a name that is in use.
        """
        url = check_url(url)
        known = self._by_name.get(name)
        if known is None or (known.is_draining and known.url != url):
            if known is not None and known.num_running:
                raise ValueError(f"replica {name} still has {known.num_running} requests")
            self._by_name[name] = Replica(name, url)
        elif known.is_draining:
            known.is_draining = False
        else:
            raise ValueError(f"replica {name} is there already, at {known.url}")
        return self._by_name[name]

    def drain(self, name: str) -> Replica:
        """Give a replica nothing new; raises ``ValueError`` for an unknown name."""
        if name not in self._by_name:
            raise ValueError(f"no replica {name!r}; there are {', '.join(self._by_name)}")
        self._by_name[name].is_draining = True
        return self._by_name[name]

    def loads(self, *, without: Collection[str] = ()) -> list[ReplicaLoad]:
        """Return what a policy sees, leaving out those that this request has tried."""
        return [
            ReplicaLoad(
                each.name,
                each.is_available and each.name not in without,
                each.num_running,
                each.queued_tokens,
            )
            for each in self._by_name.values()
        ]


def check_url(url: str) -> str:
    """Return an address without a slash at its end; raises ``ValueError``."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address such as http://127.0.0.1:8001")
    if "@" in parts.netloc:  # not shown again: it may be a password
        raise ValueError("an address has no user or password: what clients send is passed on")
    _ = parts.port, parts.hostname.encode("idna")  # raise for what cannot be connected to
    return url.rstrip("/")
