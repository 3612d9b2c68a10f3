"""What ``millpond pool`` was told to keep reaches the pool, and so does who offers a block."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from millpond.service.client import AdminClient, SchedulerClient, WorkerClient
from tests.faults.engine import PLAIN
from tests.faults.world import KEY_BYTES, keys

START_S = 30.0
NORTH, SOUTH = PLAIN.identity("north", "n"), PLAIN.identity("south", "s")


@contextlib.contextmanager
def pool(socket_path: str, *flags: str) -> Iterator[None]:
    argv = [sys.executable, "-m", "millpond.cli", "pool", "--socket", socket_path, *flags]
    environ = {**os.environ, "MILLPOND_POOL_ADMISSION": "second-touch"}
    with subprocess.Popen(
        argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(b"serving")
            yield
        finally:
            process.terminate()
            process.wait(START_S)


def test_second_request_for_a_block_has_it_stored_and_a_second_step_has_not(
    socket_path: str,
) -> None:
    prefix = keys("p", 4)
    with pool(socket_path, "--size", "32MiB", "--eviction", "arc", "--state-ratio", "0.25"):
        with (
            SchedulerClient.connect(socket_path, NORTH) as north,
            SchedulerClient.connect(socket_path, SOUTH) as south,
            WorkerClient.connect(socket_path, NORTH, rank=0) as north_worker,
            WorkerClient.connect(socket_path, SOUTH, rank=0) as south_worker,
        ):

            def offer(client: SchedulerClient, num_blocks: int, request_id: str) -> str:
                lease = client.reserve(
                    prefix[: num_blocks * KEY_BYTES],
                    KEY_BYTES,
                    first_block=0,
                    parts=[()],
                    request_id=request_id,
                )
                return lease.reason or f"{len(lease.offsets[0])} blocks"

            reasons = [
                offer(north, 2, "first"),
                offer(north, 4, "first"),
                offer(north, 3, "second"),
                offer(south, 4, "first"),
            ]
            north_worker.arena.close()
            south_worker.arena.close()
        assert reasons == ["not-admitted", "not-admitted", "3 blocks", "1 blocks"]
        with AdminClient.connect(socket_path) as admin:
            statistics = admin.status()["pool"]
    assert isinstance(statistics, dict)
    assert statistics["retention"] == {
        "eviction": "arc",
        "admission": "second-touch",
        "state_ratio": 0.25,
        "state_bytes_max": 8 * 2**20,
    }
