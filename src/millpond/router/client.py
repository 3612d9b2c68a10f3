"""An operator's side of the admin socket."""

import socket
from pathlib import Path
from typing import Final, Self, cast

import httpx
import msgspec

from millpond.model.errors import ConfigError, DaemonGone

_TIMEOUT_S: Final = 10.0
_BASE: Final = "http://router"


class RouterClient:
    """An operator of a running router. Calls block for at most ten seconds.

    They raise ``DaemonGone`` where no router serves the socket, and ``ConfigError`` for what
    it refuses.
    """

    def __init__(self, path: Path) -> None:
        _refuse_if_away(path)
        transport = httpx.HTTPTransport(uds=str(path))
        self._http = httpx.Client(transport=transport, base_url=_BASE, timeout=_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.close()

    def replicas(self) -> list[dict[str, object]]:
        """Return what the router knows of each replica."""
        return cast("list[dict[str, object]]", self._call("GET", "/replicas")["replicas"])

    def drain(self, name: str) -> dict[str, object]:
        """Give a replica nothing new; what runs there goes on."""
        return self._call("POST", "/drain", {"name": name})

    def add(self, name: str, url: str) -> dict[str, object]:
        """Take a replica in, or a drained one back."""
        return self._call("POST", "/add", {"name": name, "url": url})

    def _call(self, method: str, path: str, body: object = None) -> dict[str, object]:
        answer = self._http.request(method, path, content=msgspec.json.encode(body))
        fields = cast("dict[str, object]", answer.json())
        if answer.is_client_error:
            raise ConfigError(str(fields["error"]))
        return fields


def _refuse_if_away(path: Path) -> None:
    # httpx forgets to close a Unix socket that it cannot connect.
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            raise DaemonGone(f"no router serves {path} ({error.strerror or error})") from error
