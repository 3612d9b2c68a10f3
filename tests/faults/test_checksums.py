"""A byte that changes in the real daemon's arena: seen with checksums, served without."""

from dataclasses import dataclass

import pytest

from millpond.model.layout import LayerPages, PartLayout
from millpond.model.leases import NO_SLOT
from millpond.service.protocol import Finish
from millpond.transfer.checksums import Checked, Checksums, Summed
from tests.faults.engine import HYBRID, PLAIN, TWO_RANKS, Engine, Kind, pieces_to_write
from tests.faults.world import SLOT_BYTES, Daemon, block_key, eventually

NUM_BLOCKS = 4
PAGE_BYTES = SLOT_BYTES // 16


def layouts(kind: Kind) -> list[PartLayout]:
    """Return parts of small pages that fill the slots of a kind."""
    return [
        PartLayout(
            part.name,
            (LayerPages(part.name, 0, PAGE_BYTES),),
            {0: part.slot_bytes // kind.num_ranks // PAGE_BYTES},
        )
        for part in kind.parts
    ]


def seed_of(prefix: str, block: int) -> int:
    return int.from_bytes(block_key(prefix, block)[:8], "little")


@dataclass
class Guarded(Engine):
    """An engine that sums what it writes, and compares ``check_ratio`` of what it reads."""

    check_ratio: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sums = [
            Checksums(layouts(self.kind), rank, self.check_ratio)
            for rank in range(self.kind.num_ranks)
        ]

    def store(self, prefix: str, num_blocks: int) -> None:
        lease = self.reserve(prefix, num_blocks)
        assert lease.lease_id is not None, lease.reason
        for piece in pieces_to_write(self.kind, lease, prefix):
            self.write(piece)
        slots = [
            Summed(part, offset, seed_of(prefix, block))
            for part, offsets in enumerate(lease.offsets)
            for block, offset in enumerate(offsets, lease.first_block)
            if offset != NO_SLOT
        ]
        for sums in self.sums:
            sums.write(self.mapping, slots)
        self.finish(lease.lease_id)
        self.wait_found(prefix, num_blocks)

    def load(self, prefix: str, num_blocks: int) -> list[Checked]:
        """Read a prefix as a worker does; return what each rank found."""
        lease = self.pin(prefix, num_blocks)
        assert lease.lease_id is not None
        slots = [
            Summed(part, offset, seed_of(prefix, block))
            for part, pairs in enumerate(lease.offsets)
            for block, offset in zip(pairs[0::2], pairs[1::2], strict=True)
        ]
        found = [sums.check(self.mapping, slots) for sums in self.sums]
        for worker, checked in zip(self.workers, found, strict=True):
            worker.finish_checked(
                lease.lease_id, num_checked=checked.num_slots, damaged=checked.damaged
            )
        return found

    def slot(self, prefix: str, block: int, part: int = 0) -> int:
        """Return where a block lies, from a lease that is given back."""
        lease = self.pin(prefix, NUM_BLOCKS)
        assert lease.lease_id is not None
        self.finish(lease.lease_id)
        pairs = lease.offsets[part]
        return dict(zip(pairs[0::2], pairs[1::2], strict=True))[block]

    def flip(self, offset_bytes: int) -> None:
        with self.mapping.view(offset_bytes, 1) as byte:
            byte[0] ^= 0x10


def checks(daemon: Daemon) -> dict[str, int]:
    return daemon.status()["pool"]["checks"]


def damaged_lines(daemon: Daemon) -> list[str]:
    return [line for line in daemon.errors().splitlines() if "damaged block" in line]


def stays_apart(daemon: Daemon, num_slots: int) -> None:
    """Expect that so many slots are in quarantine when all clients have left."""
    daemon.baseline["quarantined"] += num_slots


@pytest.mark.parametrize("kind", [PLAIN, HYBRID, TWO_RANKS], ids=lambda kind: kind.name)
def test_a_flipped_byte_is_a_miss_from_then_on(daemon: Daemon, kind: Kind) -> None:
    path = daemon.socket_path
    with Guarded(path, "a", kind) as a, Guarded(path, "b", kind) as b:
        a.store("x", NUM_BLOCKS)
        a.store("y", NUM_BLOCKS)
        assert not any(found.damaged for found in b.load("x", NUM_BLOCKS))
        offset = a.slot("x", 1)
        a.flip(offset + kind.parts[0].slot_bytes - 1)  # in the last rank's slice
        *others, last = b.load("x", NUM_BLOCKS)
        assert last.damaged == (offset,)
        assert not any(found.damaged for found in others)
        num_left = 0 if kind is HYBRID else 1  # the only state has left with what followed
        eventually(lambda: b.lookup("x", NUM_BLOCKS).num_blocks == num_left, "the block is a miss")
        # Others are served as before, and the block can be had again, from another place.
        assert not any(found.damaged for found in b.load("y", NUM_BLOCKS))
        a.store("x", NUM_BLOCKS)
        b.verify("x", NUM_BLOCKS)
        assert a.slot("x", 1) != offset
        assert checks(daemon)["num_slots_damaged"] == 1
        (line,) = damaged_lines(daemon)
        rank = kind.num_ranks - 1
        for word in ("writer=a", "reader=b", f"rank={rank}", f"offset={offset}", "part=pages"):
            assert word in line
        assert f"block={block_key('x', 1).hex()}" in line
    stays_apart(daemon, 1)


def test_without_checksums_the_byte_is_served(daemon: Daemon) -> None:
    """The control: nothing else would have noticed."""
    path = daemon.socket_path
    with Guarded(path, "a", check_ratio=0.0) as a, Guarded(path, "b", check_ratio=0.0) as b:
        a.store("x", NUM_BLOCKS)
        a.flip(a.slot("x", 1))
        assert b.load("x", NUM_BLOCKS) == [Checked()]
        assert b.lookup("x", NUM_BLOCKS).num_blocks == NUM_BLOCKS
        with pytest.raises(AssertionError, match="other bytes"):
            b.verify("x", NUM_BLOCKS)
    assert checks(daemon) == {"num_slots_checked": 0, "num_slots_damaged": 0}


def test_replicas_with_and_without_checksums_share(daemon: Daemon) -> None:
    path = daemon.socket_path
    with Guarded(path, "a") as a, Guarded(path, "b", check_ratio=0.0) as b:
        a.store("x", NUM_BLOCKS)
        b.verify("x", NUM_BLOCKS)
        # b writes into slots that a had summed: a must not take a's sums for b's blocks.
        with daemon.admin() as admin:
            admin.flush()
        for i in range(3):
            b.store(f"y{i}", NUM_BLOCKS)
            assert a.load(f"y{i}", NUM_BLOCKS) == [Checked()]
    assert checks(daemon)["num_slots_damaged"] == 0


def test_two_readers_find_the_same_damage(daemon: Daemon) -> None:
    path = daemon.socket_path
    with Guarded(path, "a") as a, Guarded(path, "b") as b:
        a.store("x", NUM_BLOCKS)
        offset = a.slot("x", 0)
        a.flip(offset)
        lease = a.pin("x", NUM_BLOCKS)
        assert b.load("x", NUM_BLOCKS)[0].damaged == (offset,)
        eventually(lambda: b.lookup("x", NUM_BLOCKS).num_blocks == 0, "the prefix is a miss")
        assert lease.lease_id is not None
        a.workers[0].finish_checked(lease.lease_id, num_checked=1, damaged=[offset])
        eventually(lambda: daemon.status()["pool"]["num_leases"] == 0, "the lease has ended")
        assert len(damaged_lines(daemon)) == checks(daemon)["num_slots_damaged"] == 1
    stays_apart(daemon, 1)


def test_neither_flush_nor_a_full_pool_brings_the_slot_back(daemon: Daemon) -> None:
    with Guarded(daemon.socket_path, "a") as a:
        a.store("x", NUM_BLOCKS)
        offset = a.slot("x", 2)
        a.flip(offset)
        assert a.load("x", NUM_BLOCKS)[0].damaged == (offset,)
        with daemon.admin() as admin:
            admin.flush()
        for i in range(2):
            lease = a.reserve(f"fill{i}", 300)  # more than there are slots
            assert lease.lease_id is not None
            assert offset not in lease.offsets[0]
            assert len(lease.offsets[0]) == daemon.num_slots("reserved")
            assert daemon.num_slots("free") == 0
            a.finish(lease.lease_id, ok=False)
            eventually(lambda: daemon.num_slots("reserved") == 0, "the slots are free again")
    stays_apart(daemon, 1)


@pytest.mark.parametrize(
    ("num_checked", "offsets", "leases"),
    [(1, (12345,), 1), (99, (), 1), (-1, (), 1), (1, (), 2), (2**63, (), 1), (0, (-1,), 1)],
)
def test_a_client_that_makes_it_up_is_dropped(
    daemon: Daemon, num_checked: int, offsets: tuple[int, ...], leases: int
) -> None:
    with Guarded(daemon.socket_path, "b") as b:
        b.store("x", NUM_BLOCKS)
        with Guarded(daemon.socket_path, "a") as a:
            held = [a.pin("x", NUM_BLOCKS).lease_id for _ in range(leases)]
            a.workers[0]._connection.send(
                Finish(
                    leases=tuple(lease for lease in held if lease is not None),
                    ok=True,
                    rank=0,
                    num_checked=num_checked,
                    damaged=offsets,
                ),
                1.0,
            )
            eventually(a.workers[0].poll_closed, "the liar is dropped")
            session = a.workers[0].session
        assert b.lookup("x", NUM_BLOCKS).num_blocks == NUM_BLOCKS
        assert daemon.status()["service"]["bad_frames"] == 1
        assert checks(daemon) == {"num_slots_checked": 0, "num_slots_damaged": 0}
        with Guarded(daemon.socket_path, "a", drained=(session,)):
            pass  # says that the copies of those leases have ended


def test_damage_under_a_lease_that_has_ended_is_ignored(daemon: Daemon) -> None:
    with Guarded(daemon.socket_path, "a") as a:
        a.store("x", NUM_BLOCKS)
        offset = a.slot("x", 0)
        a.workers[0].finish_checked(10**9, num_checked=1, damaged=[offset])
        eventually(
            lambda: daemon.status()["service"]["unknown_leases"] == 1, "the message was counted"
        )
        assert a.lookup("x", NUM_BLOCKS).num_blocks == NUM_BLOCKS
