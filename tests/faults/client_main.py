"""A client in a process of its own, which a test tells what to do and then kills or freezes.

Reads commands as lines of JSON, ``{"do": NAME, ...}``, and answers each with one line: either
``{"ok": RESULT}`` or ``{"error": TYPE, "message": TEXT}``.
"""

import json
import os
import sys
from array import array
from collections.abc import Callable

from millpond.arena.arena import Arena
from millpond.model.errors import MillpondError
from millpond.model.leases import ReadLease, WriteLease
from millpond.service.client import SchedulerClient, WorkerClient
from tests.faults.world import KEY_BYTES, identity, keys


class Client:
    """The verbs a test may use; one scheduler and one worker at most."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self.scheduler: SchedulerClient | None = None
        self.worker: WorkerClient | None = None
        self.arena: Arena | None = None

    def open(self, replica: str, session_key: str, num_ranks: int = 1) -> int:
        me = identity(replica, session_key, num_ranks)
        self.scheduler = SchedulerClient.connect(self.socket_path, me)
        return self.scheduler.session

    def join(
        self,
        replica: str,
        session_key: str,
        num_ranks: int = 1,
        rank: int = 0,
        drained: tuple[int, ...] = (),
    ) -> int:
        self.worker = WorkerClient.connect(
            self.socket_path,
            identity(replica, session_key, num_ranks),
            rank=rank,
            drained=drained,
            arena=self.arena,
        )
        self.arena = self.worker.arena
        return self.worker.session

    def reserve(self, prefix: str, num_blocks: int) -> dict[str, object]:
        assert self.scheduler is not None
        wanted = keys(prefix, num_blocks)
        lease = self.scheduler.reserve(wanted, KEY_BYTES, first_block=0, parts=[()])
        return described(lease)

    def pin(self, prefix: str, num_blocks: int) -> dict[str, object]:
        assert self.scheduler is not None
        return described(self.scheduler.pin(keys(prefix, num_blocks), KEY_BYTES, first_block=0))

    def lookup(self, prefix: str, num_blocks: int) -> tuple[int, str]:
        assert self.scheduler is not None
        found = self.scheduler.lookup(keys(prefix, num_blocks), KEY_BYTES)
        return found.num_blocks, found.outcome

    def usable(self) -> int:
        """Return how much of the arena is there, as this process sees it."""
        assert self.arena is not None
        return self.arena.usable_bytes

    def write(self, offset: int, text: str) -> None:
        assert self.arena is not None
        self.arena.view(offset, len(text))[:] = text.encode()

    def read(self, offset: int, num_bytes: int) -> str:
        assert self.arena is not None
        return bytes(self.arena.view(offset, num_bytes)).decode()

    def finish(self, lease: int, ok: bool = True) -> None:
        assert self.worker is not None
        self.worker.finish([lease], ok=ok)

    def close(self) -> None:
        for client in (self.scheduler, self.worker):
            if client is not None:
                client.close()

    def fork(self) -> int:
        """Leave a child behind that keeps the sockets open; return its pid."""
        child = os.fork()
        if child == 0:
            sys.stdin.read()  # until the test closes our input
            os._exit(0)
        return child

    def child_maps_arena(self) -> bool:
        """Return whether a forked child has the arena in its memory."""
        child = os.fork()
        if child == 0:
            with open("/proc/self/maps") as maps:  # noqa: PTH123
                os._exit(int("millpond-arena" in maps.read()))
        _, status = os.waitpid(child, 0)
        return bool(os.waitstatus_to_exitcode(status))


def described(lease: ReadLease | WriteLease) -> dict[str, object]:
    """Return a lease as JSON can carry it."""
    offsets: list[array[int]] = list(lease.offsets)
    return {
        "lease": lease.lease_id,
        "reason": lease.reason,
        "offsets": [list(part) for part in offsets],
    }


def main() -> None:
    """Answer commands until the input ends."""
    client = Client(sys.argv[1])
    for line in sys.stdin:
        command = json.loads(line)
        verb: Callable[..., object] = getattr(client, command.pop("do"))
        try:
            answer: dict[str, object] = {"ok": verb(**command)}
        except MillpondError as error:
            code = getattr(error, "code", None)
            answer = {"error": type(error).__name__, "code": code, "message": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
