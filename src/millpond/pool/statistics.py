"""The pool's figures, as plain values for status pages, metrics and records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from millpond.model.limits import REPLICAS_SHOWN_MAX
from millpond.model.names import Outcome
from millpond.pool.allocator import STATES
from millpond.pool.evicting import Evictor
from millpond.pool.reserving import Refused
from millpond.pool.sessions import Replica, Sessions


def _outcomes() -> dict[str, int]:
    return {outcome.value: 0 for outcome in Outcome}


def _pin_results() -> dict[str, int]:
    return dict.fromkeys(("granted", "miss", "off", "limit"), 0)


def _reserve_results() -> dict[str, int]:
    reasons = ("granted", "present", "hole", "full", "not-admitted", "off", "limit")
    return dict.fromkeys(reasons, 0)


EVICTION_REASONS: Final = ("victim", "spare", "budget", "extent")
"""Why a slot was evicted: the policy chose it; it served nobody any more; states had reached
their budget; its extent was needed for another size."""


@dataclass(slots=True)
class Counts:
    """What requests got, since the pool was made."""

    lookups: dict[str, int] = field(default_factory=_outcomes)
    pins: dict[str, int] = field(default_factory=_pin_results)
    reserves: dict[str, int] = field(default_factory=_reserve_results)
    num_blocks_not_admitted: int = 0
    num_blocks_without_room: int = 0
    num_blocks_beyond_limit: int = 0
    num_tails_without_room: int = 0
    num_write_leases_expired: int = 0
    num_slots_checked: int = 0
    num_slots_damaged: int = 0

    def note_refused(self, refused: Refused) -> None:
        """Add what one reserve did not get."""
        self.num_blocks_not_admitted += refused.not_admitted
        self.num_blocks_without_room += refused.no_room
        self.num_blocks_beyond_limit += refused.beyond_limit
        self.num_tails_without_room += refused.tails


def pool_statistics(evictor: Evictor, sessions: Sessions, counts: Counts) -> dict[str, object]:
    """Return all figures; costs a pass over one byte a slot."""
    store = evictor.store
    allocator = store.allocator
    sizes: list[dict[str, object]] = []
    num_slots = dict.fromkeys((state.value for state in STATES), 0)
    bytes_by_state = dict.fromkeys((state.value for state in STATES), 0)
    for table in allocator.tables:
        by_state = {state.value: 0 for state in STATES}
        extents = list(table.assigned())
        for extent in extents:
            states = table.state[extent.first_slot : extent.slots.stop]
            for byte, state in enumerate(STATES):
                by_state[state.value] += states.count(byte)
        for state, count in by_state.items():
            num_slots[state] += count
            bytes_by_state[state] += count * table.slot_bytes
        sizes.append(
            {
                "slot_bytes": table.slot_bytes,
                "holds_states": table.holds_states,
                "num_extents": len(extents),
                "num_slots": by_state,
                "num_evictable": len(table.policy) + len(table.spares),
                "num_spare": len(table.spares),
                "num_evictions": table.num_evictions.total(),
                "policy": table.policy.statistics(),
            }
        )
    replicas = sessions.latest_replicas(REPLICAS_SHOWN_MAX)
    bytes_by_state["unassigned"] = len(allocator.unassigned) * allocator.extent_bytes
    return {
        "epoch": allocator.epoch,
        "extent_bytes": allocator.extent_bytes,
        "num_extents": len(allocator.extents),
        "num_extents_unassigned": len(allocator.unassigned),
        "num_extents_reclaimed": evictor.num_extents_reclaimed,
        "num_slots": num_slots,
        "bytes": bytes_by_state,
        "slot_sizes": sizes,
        "num_blocks": sum(len(index.rows) for index in store.indexes),
        "num_blocks_by_namespace": [len(index.rows) for index in store.indexes],
        "num_evictions": sum(table.num_evictions.total() for table in allocator.tables),
        "evictions": {
            reason: sum(table.num_evictions[reason] for table in allocator.tables)
            for reason in EVICTION_REASONS
        },
        "lookups": dict(counts.lookups),
        "pins": dict(counts.pins),
        "reserves": dict(counts.reserves),
        "refused": {
            "num_blocks_not_admitted": counts.num_blocks_not_admitted,
            "num_blocks_without_room": counts.num_blocks_without_room,
            "num_blocks_beyond_limit": counts.num_blocks_beyond_limit,
            "num_tails_without_room": counts.num_tails_without_room,
        },
        "checks": {
            "num_slots_checked": counts.num_slots_checked,
            "num_slots_damaged": counts.num_slots_damaged,
        },
        "num_sessions": len(sessions.by_id),
        "num_write_leases": len(sessions.writing),
        "num_leases": sessions.num_leases(),
        "num_write_leases_expired": counts.num_write_leases_expired,
        "num_replicas": len(sessions.replicas),
        "replicas": _replicas(replicas),
        "blocks_by_writer_reader": _blocks_by_writer_reader(replicas),
    }


def _replicas(replicas: list[Replica]) -> dict[str, dict[str, object]]:
    return {
        replica.name: {
            "num_sessions": replica.num_sessions,
            "num_read_leases": replica.num_read_leases,
            "num_write_leases": replica.num_write_leases,
            "num_write_leases_aborted": replica.num_write_leases_aborted,
            "num_reserves_refused": dict(replica.num_reserves_refused),
            "num_blocks_read": replica.num_blocks_read,
            "num_bytes_read": replica.num_bytes_read,
            "num_blocks_written": replica.num_blocks_written,
            "num_slots_checked": replica.num_slots_checked,
            "num_slots_damaged": replica.num_slots_damaged,
        }
        for replica in replicas
    }


def _blocks_by_writer_reader(replicas: list[Replica]) -> dict[str, dict[str, int]]:
    """Return blocks read, by the name of the replica that wrote and of the one that read."""
    names = {replica.name for replica in replicas}
    matrix: dict[str, dict[str, int]] = {}
    for reader in replicas:
        for writer, count in reader.num_blocks_read_by_writer.items():
            if writer in names:
                matrix.setdefault(writer, {})[reader.name] = count
    return matrix
