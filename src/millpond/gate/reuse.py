"""E5: another session wants memory whose owner is gone, or done with, while a copy is in flight.

The pool is the real one, and its slots are the path's rows on the host. One session's copy
waits behind a hold; its lease is ended in some way; a second session reserves all it can get,
writes what it got at once, and commits. Then the hold opens. If the second session was given
a slot of the first, the late copy writes over its bytes, or reads them.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from millpond.gate.device import Hold, Where
from millpond.gate.own import OwnCompletion, OwnPath
from millpond.gate.patterns import Comparison, Epoch, Rows, compare, pattern
from millpond.gate.subject import Subject
from millpond.gate.verdicts import Attempt, Control
from millpond.model.errors import MillpondError
from millpond.model.limits import BLOCKS_PER_RESERVE_MAX, WRITE_LEASE_S_MAX
from millpond.model.names import Coverage
from millpond.model.namespace import Namespace, PartSpec
from millpond.pool.pool import Pool
from millpond.transfer.copies import Direction
from millpond.transfer.engine import Ticket

_KEY_BYTES: Final = 16
_SECOND_LABEL: Final = 20_000
_EXPIRED_NS: Final = int((WRITE_LEASE_S_MAX + 1) * 1e9)


@dataclass(slots=True)
class _Scene:
    """A pool over the rows of the host, its first session, and the leases of the copy."""

    pool: Pool
    page_bytes: int
    num_rows: int
    session: int = 0
    leases: list[int] = field(default_factory=list[int])
    rows: list[int] = field(default_factory=list[int])
    lock: threading.Lock = field(default_factory=threading.Lock)
    """The pool is used by one thread at a time: the test's, or the engine's."""
    faults: list[str] = field(default_factory=list[str])

    def finish(self, *, ok: bool) -> None:
        """End the leases; the caller has the lock."""
        for lease in self.leases:
            try:
                self.pool.finish(self.session, lease, rank=0, ok=ok, now_ns=2)
            except (MillpondError, ValueError) as error:
                self.faults.append(str(error))

    def end_leases(self, *, ok: bool) -> None:
        """End the leases, as the connector does from a completion."""
        with self.lock:
            self.finish(ok=ok)

    def reserve(self, session: int, tag: str, num_blocks: int) -> tuple[list[int], list[int]]:
        """Reserve slots for chains of blocks; return the leases and the rows granted."""
        leases: list[int] = []
        rows: list[int] = []
        for keys in _chains(tag, num_blocks):
            with self.lock:
                granted = self.pool.reserve(
                    session, keys, _KEY_BYTES, first_block=0, parts=((),), now_ns=1
                )
            if granted.lease_id is not None:
                leases.append(granted.lease_id)
            rows += [offset // self.page_bytes for part in granted.offsets for offset in part]
        return leases, rows

    def open_session(self, replica: str) -> int:
        """Open a session of one rank."""
        with self.lock:
            return self.pool.open_session(replica=replica, namespace_id=0, num_ranks=1)


@dataclass(frozen=True, slots=True)
class Reuse:
    """One way to lose a slot: ``end`` ends the first session's right to it.

    ``end_early`` is what ends the lease itself, which may only follow the last byte.
    """

    direction: Direction
    end: Callable[[_Scene], object]
    end_early: Callable[[_Scene], object]


REUSES: Final[dict[str, Reuse]] = {
    "session ends": Reuse(
        Direction.STORE,
        lambda scene: scene.pool.close_session(scene.session),
        lambda scene: scene.pool.drain_rank(scene.session, 0),
    ),
    "lease expires": Reuse(
        Direction.STORE,
        lambda scene: scene.pool.expire(_EXPIRED_NS),
        lambda scene: scene.finish(ok=False),
    ),
    "blocks are forgotten": Reuse(
        Direction.LOAD,
        lambda scene: scene.pool.flush(),
        lambda scene: scene.finish(ok=True),
    ),
}


def reuse(subject: Subject, path: OwnPath, way: Reuse, control: Control) -> Attempt:
    """Run the scenario."""
    scene = _set_scene(subject, way.direction)
    with subject.device.on(Where.WORK):
        hold = subject.device.hold(subject.timing.control_s)
        completion = _submit(subject, path, way.direction, scene)
    try:
        if control is Control.SYNCHRONIZED:
            hold.release()
            completion.wait(subject.timing.done_s)
            path.engine.wait_idle(subject.timing.done_s)
        with scene.lock:
            if control is Control.EDGE_REMOVED:
                way.end_early(scene)
            way.end(scene)
        second = _write_second(subject, scene)
        # The slots had to change hands while the copy was held up.
        is_late = hold.is_open()
    finally:
        fault = _end(subject, path, hold, completion)
    comparison = _compare(subject, way.direction, scene, second)
    if control is Control.NONE:
        fault = fault or _leftover(scene)
    num_copied = len(subject.pairs) * subject.room.page_bytes
    if way.direction is Direction.STORE:
        num_pages = len(set(scene.rows) | set(second))
    else:
        num_pages = len(subject.pairs) + len(second)
    num_bytes = max(num_copied, num_pages * subject.room.page_bytes)
    return Attempt(comparison, num_bytes, late=is_late, fault=fault)


def _set_scene(subject: Subject, direction: Direction) -> _Scene:
    """Make the pool, and the lease under which the first session copies."""
    page_bytes, num_rows = subject.room.page_bytes, subject.room.num_host_pages
    size = page_bytes * num_rows
    pool = Pool(epoch=1, arena_bytes=size, extent_bytes=size)
    pool.add_namespace(_namespace(page_bytes))
    scene = _Scene(pool, page_bytes, num_rows)
    scene.session = scene.open_session("first")
    scene.leases, scene.rows = scene.reserve(scene.session, "first", len(subject.pairs))
    if direction is Direction.STORE:
        subject.prepare(pages=Epoch.NEW, host=Epoch.EMPTY)
    else:
        subject.prepare(pages=Epoch.OLD, host=Epoch.EMPTY)
        subject.host.numpy()[scene.rows] = subject.image(Epoch.NEW)
        scene.end_leases(ok=True)
        scene.leases, scene.rows = _pin(scene, len(subject.pairs))
    if len(scene.rows) != len(subject.pairs):
        raise AssertionError(f"the pool granted {len(scene.rows)} slots of {len(subject.pairs)}")
    return scene


def _pin(scene: _Scene, num_blocks: int) -> tuple[list[int], list[int]]:
    """Pin what the first session has committed; return the leases and the rows."""
    leases: list[int] = []
    rows: list[int] = []
    for keys in _chains("first", num_blocks):
        read = scene.pool.pin(scene.session, keys, _KEY_BYTES, first_block=0, now_ns=1)
        if read.lease_id is not None:
            leases.append(read.lease_id)
            rows += [at // scene.page_bytes for at in read.offsets[0][1::2]]
    return leases, rows


def _submit(subject: Subject, path: OwnPath, direction: Direction, scene: _Scene) -> OwnCompletion:
    def end(ticket: Ticket) -> None:
        scene.end_leases(ok=ticket.error is None)

    pairs = [(page, row) for (page, _), row in zip(subject.pairs, scene.rows, strict=True)]
    return path.submit(direction, pairs, keep_alive=path.arena, on_done=end)


def _write_second(subject: Subject, scene: _Scene) -> list[int]:
    """Let a second session fill whatever it can get; return its rows."""
    session = scene.open_session("second")
    leases, rows = scene.reserve(session, "second", scene.num_rows)
    labels = [_SECOND_LABEL + row for row in rows]
    subject.host.numpy()[rows] = pattern(labels, scene.page_bytes, Epoch.SECOND)
    with scene.lock:
        for lease in leases:
            scene.pool.finish(session, lease, rank=0, ok=True, now_ns=3)
    return rows


def _end(subject: Subject, path: OwnPath, hold: Hold, completion: OwnCompletion) -> str | None:
    hold.release()
    is_done = completion.wait(subject.timing.done_s) and path.engine.wait_idle(
        subject.timing.done_s
    )
    subject.device.synchronize()
    return None if is_done else subject.never_done()


def _compare(
    subject: Subject, direction: Direction, scene: _Scene, second: Sequence[int]
) -> Comparison:
    """Compare what both sessions own: the second one's slots, and what the first copied."""
    host = subject.host.numpy()
    labels = tuple(_SECOND_LABEL + row for row in second)
    parts = [compare(host[list(second)], Rows(labels, Epoch.SECOND))] if second else []
    if direction is Direction.LOAD:
        parts.append(subject.compare_pages(Epoch.NEW))
    else:
        blocks = dict(zip(scene.rows, subject.blocks, strict=True))
        first = [row for row in scene.rows if row not in second]
        if first:
            rows = Rows(tuple(blocks[row] for row in first), Epoch.NEW)
            parts.append(compare(host[first], rows))
    return Comparison.concatenate(parts)


def _leftover(scene: _Scene) -> str | None:
    """Return what is wrong with the pool when everything has ended, or None."""
    if scene.faults:
        return "; ".join(scene.faults)
    try:
        scene.pool.check_invariants()
    except MillpondError as error:
        return str(error)
    scene.pool.flush()
    _, rows = scene.reserve(scene.open_session("third"), "third", scene.num_rows)
    if len(rows) != scene.num_rows:
        return f"only {len(rows)} of {scene.num_rows} slots came back when all copies had ended"
    return None


def _chains(tag: str, num_blocks: int) -> list[bytes]:
    """Return the keys of so many blocks, in prefixes that one reserve can grant."""
    keys = [
        hashlib.sha256(f"{tag} {block}".encode()).digest()[:_KEY_BYTES]
        for block in range(num_blocks)
    ]
    starts = range(0, num_blocks, BLOCKS_PER_RESERVE_MAX)
    return [b"".join(keys[start : start + BLOCKS_PER_RESERVE_MAX]) for start in starts]


def _namespace(page_bytes: int) -> Namespace:
    return Namespace(
        model="gate",
        revision="",
        weights="",
        dtype="",
        kv_cache_dtype="",
        quantization="",
        block_tokens=256,
        engine_block_tokens=256,
        tensor_parallel_size=1,
        attention_backend="",
        layout="",
        hash_algorithm="",
        hash_seed="",
        engine="",
        engine_version="",
        parts=(PartSpec("pages", Coverage.EVERY, page_bytes),),
    )
