"""Every slot under lease: a store is skipped, by name, and nobody meets an error or waits."""

from millpond.model.names import Outcome
from tests.faults.engine import Engine
from tests.faults.world import NUM_SLOTS, Daemon, eventually


def test_every_slot_is_being_written(daemon: Daemon) -> None:
    with Engine(daemon.socket_path, "writer") as writer, Engine(daemon.socket_path, "b") as other:
        lease = writer.reserve("everything", NUM_SLOTS)
        assert lease.lease_id is not None
        for engine in (other, writer):
            refused = engine.reserve("more", 1)
            assert (refused.lease_id, refused.reason) == (None, "full")
            assert engine.lookup("more", 1).outcome is Outcome.MISS
            assert engine.pin("everything", NUM_SLOTS).reason == "miss"
        assert daemon.status()["pool"]["reserves"]["full"] == 2
        writer.finish(lease.lease_id, ok=False)
        eventually(lambda: daemon.footprint()["leases"] == 0, "the lease has ended")
        other.store("more", 1)
        other.verify("more", 1)


def test_every_slot_is_being_read(daemon: Daemon) -> None:
    with Engine(daemon.socket_path, "reader") as reader, Engine(daemon.socket_path, "b") as other:
        reader.store("everything", NUM_SLOTS)
        lease = reader.pin("everything", NUM_SLOTS)
        assert lease.lease_id is not None
        assert other.reserve("more", 5).reason == "full"
        # Readers share.
        other.verify("everything", NUM_SLOTS)
        reader.verify("everything", NUM_SLOTS)
        reader.finish(lease.lease_id)
        eventually(lambda: daemon.footprint()["leases"] == 0, "the lease has ended")
        other.store("more", 5)
        other.verify("more", 5)


def test_what_fits_is_taken_and_the_rest_left(daemon: Daemon) -> None:
    with Engine(daemon.socket_path, "a") as engine:
        lease = engine.reserve("long", 2 * NUM_SLOTS)
        assert lease.lease_id is not None
        assert len(lease.offsets[0]) == NUM_SLOTS
        engine.finish(lease.lease_id)
        engine.wait_found("long", NUM_SLOTS)
        assert engine.lookup("long", 2 * NUM_SLOTS).num_blocks == NUM_SLOTS
