"""Asking two replicas of a running system, with the pool's switch and its books at hand."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

from millpond.launch.engine_client import Completion, EngineClient
from millpond.launch.system import System
from millpond.launch.tiny import END_OF_TEXT_ID
from millpond.model.errors import ExpectedError, RequestTimedOut
from millpond.service.client import AdminClient
from millpond.service.protocol import Report

_NUM_TOKENS: Final = 16
_REQUEST_TIMEOUT_S: Final = 600.0
_ADMIN_TIMEOUT_S: Final = 10.0
_SETTLE_S_MAX: Final = 30.0
_POLL_S: Final = 0.01


class Asking:
    """Asks the replicas ``a`` and ``b``. ``on_step`` hears what is next.

    Waiting methods raise ``RequestTimedOut`` after 30 s.
    """

    def __init__(self, system: System, *, on_step: Callable[[str], None]) -> None:
        self._on_step = on_step
        self._a, self._b = (
            self._client(replica.url, replica.model)
            for replica in (system.replica("a"), system.replica("b"))
        )
        self._admin = AdminClient.connect(str(system.socket), timeout_s=_ADMIN_TIMEOUT_S)

    def close(self) -> None:
        """Close the connections to replicas and pool."""
        self._a.close()
        self._b.close()
        self._admin.close()

    @staticmethod
    def _client(url: str, model: str) -> EngineClient:
        return EngineClient(url, model, timeout_s=_REQUEST_TIMEOUT_S)

    def _ask(
        self,
        engine: EngineClient,
        prompt: Sequence[int],
        request_id: str,
        *,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> Completion:
        try:
            return engine.complete(
                prompt, num_tokens=_NUM_TOKENS, request_id=request_id, fields=fields
            )
        except ValueError as error:
            raise ExpectedError(f"a replica failed: {error}") from error

    def _report(self, request_id: str) -> Report:
        self._wait_until(
            lambda: bool(self._admin.requests_named(request_id)),
            f"no report of request {request_id}",
        )
        return self._admin.requests_named(request_id)[-1][1]

    def _wait_joined(self) -> None:
        """Wait until both replicas take part in the pool."""
        self._on_step("waiting for the replicas to join the pool")
        self._wait_until(self._has_both_replicas, "a replica has not joined the pool")

    def _wait_committed(self) -> None:
        """Wait until everything that was computed is readable for others."""
        self._wait_until(
            lambda: self._pool_statistics()["num_write_leases"] == 0,
            "blocks are still being written",
        )

    def _has_both_replicas(self) -> bool:
        service = cast(
            "Mapping[str, Sequence[Mapping[str, object]]]", self._admin.status()["service"]
        )
        joined = {(client["replica"], client["role"]) for client in service["clients"]}
        return joined >= {(name, role) for name in "ab" for role in ("scheduler", "worker")}

    def _wait_until(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + _SETTLE_S_MAX
        while not condition():
            if time.monotonic() > deadline:
                raise RequestTimedOut(f"{otherwise} after {_SETTLE_S_MAX:g} s")
            time.sleep(_POLL_S)

    def _bytes_read_by_b(self) -> int:
        return self._count("b", "num_bytes_read")

    def _count(self, replica: str, name: str) -> int:
        """Return what the pool counts of a replica; 0 before it has heard of it."""
        replicas = cast("Mapping[str, Mapping[str, int]]", self._pool_statistics()["replicas"])
        return replicas[replica][name] if replica in replicas else 0

    def _pool_statistics(self) -> Mapping[str, object]:
        return cast("Mapping[str, object]", self._admin.status()["pool"])


def random_prompt(chance: random.Random, num_tokens: int) -> list[int]:
    """Return token ids of the tiny models, none of which ends the text."""
    return [chance.randrange(END_OF_TEXT_ID) for _ in range(num_tokens)]
