"""What the benchmark reads from a real pool, and how it switches and empties one."""

import pytest

from millpond.bench import books as module
from millpond.bench.books import Books, since
from millpond.bench.records import Sources
from millpond.model.errors import RequestTimedOut
from millpond.service.protocol import Report
from tests.faults.engine import Engine
from tests.faults.world import SLOT_BYTES, Daemon
from tests.unit.bench_values import sample

pytestmark = pytest.mark.usefixtures("daemon")
NUM_BLOCKS = 4


def report(request_id: str, *, loaded_tokens: int) -> Report:
    return Report(
        request_id=f"cmpl-{request_id}-0-0123abcd",
        prompt_tokens=100,
        computed_tokens=90 - loaded_tokens,
        local_tokens=10,
        loaded_tokens=loaded_tokens,
        writers={"a": loaded_tokens} if loaded_tokens else {},
    )


def test_bytes_are_counted_from_one_moment_to_another(daemon: Daemon, socket_path: str) -> None:
    with Books(socket_path) as books, Engine(socket_path, "a") as a, Engine(socket_path, "b") as b:
        books.wait_joined(["a", "b"])
        a.store("one", NUM_BLOCKS)
        b.verify("one", NUM_BLOCKS)
        before = books.traffic()
        b.verify("one", NUM_BLOCKS)
        a.store("two", 1)
        found = since(before, books.traffic())
    assert found["b"].bytes_read == NUM_BLOCKS * SLOT_BYTES
    assert (found["b"].blocks_read, found["b"].blocks_written) == (NUM_BLOCKS, 0)
    assert (found["a"].bytes_read, found["a"].blocks_written) == (0, 1)


def test_a_flushed_pool_and_one_that_is_off_have_nothing(daemon: Daemon, socket_path: str) -> None:
    with Books(socket_path) as books, Engine(socket_path, "a") as a:
        a.store("one", NUM_BLOCKS)
        books.switch(enabled=False)
        assert a.lookup("one", NUM_BLOCKS).num_blocks == 0
        books.switch(enabled=True)
        assert a.lookup("one", NUM_BLOCKS).num_blocks == NUM_BLOCKS
        books.flush()
        assert a.lookup("one", NUM_BLOCKS).num_blocks == 0


def test_nothing_is_flushed_while_blocks_are_being_written(
    daemon: Daemon, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLE_S_MAX", 0.2)
    with Books(socket_path) as books, Engine(socket_path, "a") as a:
        lease = a.reserve("one", NUM_BLOCKS)
        assert lease.lease_id is not None
        with pytest.raises(RequestTimedOut, match="being written"):
            books.flush()
        a.finish(lease.lease_id)
        books.flush()


def test_a_replica_that_is_missing_is_waited_for(
    daemon: Daemon, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SETTLE_S_MAX", 0.2)
    with Books(socket_path) as books, Engine(socket_path, "a"):
        books.wait_joined(["a"])
        with pytest.raises(RequestTimedOut, match="not joined"):
            books.wait_joined(["a", "b"])


def test_samples_get_their_own_reports_and_no_others(
    daemon: Daemon, socket_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_REPORTS_S_MAX", 0.2)
    samples = [sample(0, 5.0), sample(1, 5.0), sample(2, 5.0), sample(3, None)]
    with Books(socket_path) as books, Engine(socket_path, "a") as a:
        a.scheduler.report(report("r0", loaded_tokens=64))
        # Two of one name are of nobody knows which request.
        a.scheduler.report(report("r1", loaded_tokens=64))
        a.scheduler.report(report("r1", loaded_tokens=0))
        a.scheduler.report(report("r3", loaded_tokens=0))
        books.attribute(samples)
    assert [each.sources is not None for each in samples] == [True, False, False, False]
    assert samples[0].sources == Sources(
        computed_tokens=26, local_tokens=10, loaded_tokens=64, writers={"a": 64}
    )
