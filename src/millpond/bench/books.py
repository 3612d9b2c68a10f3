"""The pool's books: what a period's requests got from it, and what replicas moved."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self, cast

from millpond.bench.records import Sample, Sources, Traffic
from millpond.model.errors import RequestTimedOut
from millpond.service.client import AdminClient

_ADMIN_TIMEOUT_S: Final = 10.0
_SETTLE_S_MAX: Final = 60.0
_REPORTS_S_MAX: Final = 10.0
_POLL_S: Final = 0.02

_Tree = Mapping[str, object]


class Books:
    """Reads and switches a running pool. Waits raise ``RequestTimedOut`` after a minute."""

    def __init__(self, socket: str) -> None:
        self._admin = AdminClient.connect(socket, timeout_s=_ADMIN_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._admin.close()

    def switch(self, *, enabled: bool) -> None:
        """Turn the pool on or off for all replicas."""
        self._admin.switch(enabled=enabled)

    def flush(self) -> None:
        """Forget every block, once all that was computed is written."""
        self.wait_written()
        self._admin.flush()

    def wait_joined(self, replicas: Iterable[str]) -> None:
        """Wait until these take part: each one's scheduler and a worker."""
        wanted = {(name, role) for name in replicas for role in ("scheduler", "worker")}
        _wait_until(lambda: wanted <= self._clients(), "a replica has not joined the pool")

    def wait_written(self) -> None:
        """Wait until everything that was computed can be read by others."""
        _wait_until(lambda: self._pool()["num_write_leases"] == 0, "blocks are still being written")

    def traffic(self) -> dict[str, Traffic]:
        """Return what each replica has moved since the daemon started."""
        links = {
            str(client["replica"]): cast("dict[str, object]", client["link"])
            for client in self._service_clients()
            if client.get("link") is not None
        }
        replicas = cast("Mapping[str, Mapping[str, int]]", self._pool()["replicas"])
        return {
            name: Traffic(
                bytes_read=counts["num_bytes_read"],
                blocks_read=counts["num_blocks_read"],
                blocks_written=counts["num_blocks_written"],
                link=links.get(name),
            )
            for name, counts in replicas.items()
        }

    def attribute(self, samples: Sequence[Sample]) -> None:
        """Set the ``sources`` of all samples that the pool has one report of.

        Reports come a moment after the answers: waits for ten seconds at most.
        """
        deadline = time.monotonic() + _REPORTS_S_MAX
        waiting = [sample for sample in samples if sample.error is None]
        while True:
            waiting = [sample for sample in waiting if not self._attributed(sample)]
            if not waiting or time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _attributed(self, sample: Sample) -> bool:
        reports = self._admin.requests_named(sample.request_id)
        if len(reports) != 1:
            return False
        _, report = reports[0]
        sample.sources = Sources(
            computed_tokens=report.computed_tokens,
            local_tokens=report.local_tokens,
            loaded_tokens=report.loaded_tokens,
            writers=dict(report.writers),
        )
        return True

    def _pool(self) -> _Tree:
        return cast("_Tree", self._admin.status()["pool"])

    def _service_clients(self) -> Sequence[_Tree]:
        service = cast("Mapping[str, Sequence[_Tree]]", self._admin.status()["service"])
        return service["clients"]

    def _clients(self) -> set[tuple[str, str]]:
        return {(str(client["replica"]), str(client["role"])) for client in self._service_clients()}


def since(before: Mapping[str, Traffic], after: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """Return what was moved between two moments."""
    zero = Traffic(bytes_read=0, blocks_read=0, blocks_written=0)
    moved: dict[str, Traffic] = {}
    for name, late in after.items():
        early = before.get(name, zero)
        moved[name] = Traffic(
            bytes_read=late.bytes_read - early.bytes_read,
            blocks_read=late.blocks_read - early.blocks_read,
            blocks_written=late.blocks_written - early.blocks_written,
            link=late.link,
        )
    return moved


def _wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + _SETTLE_S_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise RequestTimedOut(f"{otherwise} after {_SETTLE_S_MAX:g} s")
        time.sleep(_POLL_S)
