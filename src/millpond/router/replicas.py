"""The replicas behind the router: their state, their load, and who is to get nothing new."""

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from millpond.router.placement.base import ReplicaLoad

_SOCKET_PATH_BYTES_MAX: Final = 107


class State(enum.StrEnum):
    """What the last health checks say."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"


class Address(NamedTuple):
    """Where a replica answers, where it publishes its cache's events, and where it repeats them."""

    url: str
    events: str | None = None
    replay: str | None = None


@dataclass(slots=True)
class Replica:
    """One engine. ``queued_tokens`` belong to requests without a first byte yet.

    ``is_cache_known``: its events tell all that its own cache holds.
    """

    name: str
    address: Address
    state: State = State.STARTING
    is_draining: bool = False
    is_cache_known: bool = False
    num_running: int = 0
    queued_tokens: int = 0
    num_requests: int = 0
    num_failed_checks: int = field(default=0, repr=False)

    @property
    def url(self) -> str:
        """Where it answers."""
        return self.address.url

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
            "is_cache_known": self.is_cache_known,
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

    def add(self, name: str, address: str) -> Replica:
        """Take a replica in; one that is draining comes back, also under another address.

        Raises ``ValueError`` for a bad address (see ``parse_address``), and for a name in use.
        """
        parsed = parse_address(address)
        known = self._by_name.get(name)
        if known is None or (known.is_draining and known.address != parsed):
            if known is not None and known.num_running:
                raise ValueError(f"replica {name} still has {known.num_running} requests")
            self._by_name[name] = Replica(name, parsed)
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


def parse_address(written: str) -> Address:
    """Return what ``URL[,events=ADDRESS[,replay=ADDRESS]]`` means; raises ``ValueError``."""
    url, *rest = written.split(",")
    named = dict(part.split("=", 1) for part in rest if "=" in part)
    if len(named) != len(rest) or not set(named) <= {"events", "replay"}:
        raise ValueError(f"{written!r} is not URL[,events=ADDRESS[,replay=ADDRESS]]")
    if "replay" in named and "events" not in named:
        raise ValueError("who repeats events publishes them: give events= as well")
    for place in named.values():
        _check_place(place)
    return Address(_check_url(url), named.get("events"), named.get("replay"))


def _check_place(place: str) -> None:
    """Raise ``ValueError`` for what cannot be connected to as ZeroMQ does."""
    scheme, _, rest = place.partition("://")
    host, _, port = rest.rpartition(":")
    is_tcp = scheme == "tcp" and host not in {"", "*"} and port.isdigit() and 0 < int(port) < 2**16
    is_ipc = scheme == "ipc" and 0 < len(rest.encode()) <= _SOCKET_PATH_BYTES_MAX
    if not is_tcp and not is_ipc:
        raise ValueError(f"{place!r} is no address such as tcp://127.0.0.1:5557 or ipc:///run/a")


def _check_url(url: str) -> str:
    """Return an address without a slash at its end; raises ``ValueError``."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is no address such as http://127.0.0.1:8001")
    if "@" in parts.netloc:  # not shown again: it may be a password
        raise ValueError("an address has no user or password: what clients send is passed on")
    _ = parts.port, parts.hostname.encode("idna")  # raise for what cannot be connected to
    return url.rstrip("/")
