"""Our own code with one order, or one piece of geometry, broken: each must be noticed.

A mutant replaces one small function for as long as it is in force. That the whole code passes
the same test comes first: a test that fails anyway catches nothing.
"""

# A mutant is inside of what it breaks.
# ruff: noqa: SLF001
# pyright: reportPrivateUsage=false

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest.mock import patch

from millpond.gate import early, portions
from millpond.gate.device import GateDevice, Where
from millpond.gate.geometry import GEOMETRIES, check_geometry
from millpond.gate.ordering import FAILURES, Show, Test, check_edge, untested
from millpond.gate.own import OwnPath
from millpond.gate.subject import Subject, Timing
from millpond.gate.verdicts import Edge, Finding, Verdict
from millpond.model import layout
from millpond.model.layout import PageGeometry, PartLayout, Segment
from millpond.pool.store import Store
from millpond.transfer import copies
from millpond.transfer.copies import Copies, Direction, LayerMemory
from millpond.transfer.device import Event, Fence
from millpond.transfer.engine import Ends, Ticket
from millpond.transfer.streams import Handover, InFlight, Lane, StreamCopyEngine, Submission

DELAY_S_MIN: Final = 1.0
"""A mutant is caught as soon as it goes ahead, so this is spent on none that is caught."""

Break = Callable[[GateDevice], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Mutant:
    """``test`` must not pass while ``broken`` is in force; None: any geometry must be wrong."""

    edge: Edge
    name: str
    test: Test | None
    broken: Break


@dataclass(frozen=True, slots=True)
class Caught:
    """What became of a mutant. ``num_bytes`` were compared while it was in force."""

    mutant: Mutant
    is_caught: bool
    reason: str
    num_bytes: int

    def as_json(self) -> dict[str, object]:
        """Return it as plain values."""
        return {
            "edge": self.mutant.edge.value,
            "name": self.mutant.name,
            "caught": self.is_caught,
            "reason": self.reason,
        }


# ---------------------------------------------------------------- orders


def _no_wait(direction: Direction) -> Break:
    def broken(device: GateDevice) -> AbstractContextManager[object]:
        del device
        original = Lane._order_behind

        def mutated(lane: Lane, submission: Submission) -> None:
            if submission.direction is not direction:
                original(lane, submission)

        return patch.object(Lane, "_order_behind", mutated)

    return broken


def _fence_on_legacy_stream(device: GateDevice) -> AbstractContextManager[object]:
    original = StreamCopyEngine.fence

    def mutated(engine: StreamCopyEngine) -> Fence:
        with device.on(Where.LEGACY):
            return original(engine)

    return patch.object(StreamCopyEngine, "fence", mutated)


class _PassedEvent:
    """Says that the end is there before it is."""

    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        """Wait for nothing."""


def _done_when_enqueued(direction: Direction) -> Break:
    def broken(device: GateDevice) -> AbstractContextManager[object]:
        del device
        original = Lane._mark_end

        def mutated(lane: Lane, submission: Submission) -> Event:
            if submission.direction is direction:
                return _PassedEvent()
            return original(lane, submission)

        return patch.object(Lane, "_mark_end", mutated)

    return broken


def _end_on_another_stream(direction: Direction) -> Break:
    def broken(device: GateDevice) -> AbstractContextManager[object]:
        original = Lane._mark_end

        def mutated(lane: Lane, submission: Submission) -> Event:
            if submission.direction is not direction:
                return original(lane, submission)
            with device.on(Where.OTHER):
                fence: Any = lane._device.fence()
                return fence

        return patch.object(Lane, "_mark_end", mutated)

    return broken


def _landed_unasked(device: GateDevice) -> AbstractContextManager[object]:
    del device

    def mutated(lane: Lane, item: InFlight) -> bool:
        del lane, item
        return True

    return patch.object(Lane, "_has_landed", mutated)


def _over_after_a_portion(device: GateDevice) -> AbstractContextManager[object]:
    del device
    is_over = property(lambda item: item.error is not None or item.num_copies > 0)
    return patch.object(Handover, "is_over", is_over)


def _told_early_unordered(device: GateDevice) -> AbstractContextManager[object]:
    del device

    def mutated(lane: Lane) -> None:
        del lane

    return patch.object(Lane, "hold_back", mutated)


def _held_back_on_another_stream(device: GateDevice) -> AbstractContextManager[object]:
    original = Lane.hold_back

    def mutated(lane: Lane) -> None:
        with device.on(Where.OTHER):
            original(lane)

    return patch.object(Lane, "hold_back", mutated)


def _early_end_on_another_stream(device: GateDevice) -> AbstractContextManager[object]:
    def mutated(lane: Lane, item: InFlight) -> Event:
        del item
        with device.on(Where.LEGACY):
            fence: Any = lane._device.fence()
            return fence

    return patch.object(Lane, "_end_for_early", mutated)


def _lease_ends_at_submission(device: GateDevice) -> AbstractContextManager[object]:
    del device
    original = Lane.put

    def mutated(lane: Lane, submission: Submission) -> None:
        on_done = submission.ends.on_done
        ticket = Ticket(submission.direction, submission.copies.num_bytes, 0, None)
        # Not in this thread, which is the caller's: the engine never calls back there.
        early = threading.Thread(target=on_done, args=(ticket,))
        early.start()
        early.join()
        original(lane, replace(submission, ends=Ends(_ignore)))

    return patch.object(Lane, "put", mutated)


def _ignore(_ticket: Ticket) -> None:
    """Take no notice of the end."""


def _no_quarantine(device: GateDevice) -> AbstractContextManager[object]:
    """Let slots that leave the index be free at once, whoever still copies."""
    del device
    detach, release = Store._detach, Store.release
    stack = ExitStack()

    def detached(store: Store, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
        part, index, node = arguments[:3]
        part.table.num_holds[index.slots[part.number][node]] = 0
        detach(store, *arguments, **options)

    def released(store: Store, *arguments: Any) -> None:  # noqa: ANN401
        part, index, slots = arguments
        held = [slot for slot in slots if part.table.num_holds[slot]]
        release(store, part, index, type(slots)(slots.typecode, held))

    def cleared(store: Store) -> int:
        for table in store.allocator.tables:
            table.num_holds[:] = type(table.num_holds)("I", [0] * len(table.num_holds))
        return clear(store)

    clear = Store.clear
    stack.enter_context(patch.object(Store, "_detach", detached))
    stack.enter_context(patch.object(Store, "release", released))
    stack.enter_context(patch.object(Store, "clear", cleared))
    return stack


def _mapping_not_kept(direction: Direction) -> Break:
    def broken(device: GateDevice) -> AbstractContextManager[object]:
        del device
        original = Lane.put

        def mutated(lane: Lane, submission: Submission) -> None:
            is_meant = submission.direction is direction
            original(lane, replace(submission, keep_alive=None) if is_meant else submission)

        return patch.object(Lane, "put", mutated)

    return broken


def _tables_not_kept(device: GateDevice) -> AbstractContextManager[object]:
    del device

    def mutated(
        lane: Lane, submission: Submission, end: Event | None, error: str | None, staged: object
    ) -> InFlight:
        del lane, staged
        return InFlight(submission, end, error, None)

    return patch.object(Lane, "_hold", mutated)


# ---------------------------------------------------------------- geometry


def _with_geometry(change: Callable[[PageGeometry, int], PageGeometry]) -> Break:
    """Break where pages lie; ``change`` is told into how many kernel pages a block is split."""

    def broken(device: GateDevice) -> AbstractContextManager[object]:
        del device
        original = layout.page_geometry

        def mutated(
            shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int, num_blocks: int
        ) -> PageGeometry:
            right = original(shape, strides, item_bytes, num_blocks)
            split = 1 if num_blocks in shape else max(shape) // num_blocks
            return change(right, split)

        return patch.object(layout, "page_geometry", mutated)

    return broken


def _packed_stride(right: PageGeometry, split: int) -> PageGeometry:
    del split
    return PageGeometry(min(right.stride_bytes, right.page_bytes), right.segments)


def _one_piece(right: PageGeometry, split: int) -> PageGeometry:
    del split
    return PageGeometry(right.stride_bytes, (Segment(0, right.page_bytes),))


def _pieces_at_the_start(right: PageGeometry, split: int) -> PageGeometry:
    del split
    segments = tuple(Segment(0, segment.num_bytes) for segment in right.segments)
    return PageGeometry(right.stride_bytes, segments)


def _one_kernel_page(right: PageGeometry, split: int) -> PageGeometry:
    segments = tuple(Segment(s.offset_bytes, s.num_bytes // split) for s in right.segments)
    return PageGeometry(right.stride_bytes, segments)


def _one_engine_block(device: GateDevice) -> AbstractContextManager[object]:
    del device
    original = copies.plan_copies

    def mutated(
        direction: Direction,
        part: PartLayout,
        memory: Sequence[LayerMemory],
        tables: Mapping[int, Sequence[Sequence[int]]],
        slots: Sequence[int],
    ) -> Copies:
        first = {
            group: [[row[0], *[copies.SKIP_BLOCK] * (len(row) - 1)] for row in table]
            for group, table in tables.items()
        }
        return original(direction, part, memory, first, slots)

    return patch.object(copies, "plan_copies", mutated)


# ---------------------------------------------------------------- all of them

_STORE, _LOAD = Direction.STORE, Direction.LOAD
_E1, _E3 = Test(Edge.E1, _STORE), Test(Edge.E3, _LOAD)
_E2, _E4 = Test(Edge.E2, _STORE), Test(Edge.E4, _LOAD)
_EARLY = Test(Edge.E4, _LOAD, early.NAME)
_PORTIONS = Test(Edge.E4, _LOAD, portions.NAME)

MUTANTS: Final = (
    Mutant(Edge.E1, "store-without-fence", _E1, _no_wait(_STORE)),
    Mutant(Edge.E1, "store-fence-on-legacy-stream", _E1, _fence_on_legacy_stream),
    Mutant(Edge.E2, "store-done-when-enqueued", _E2, _done_when_enqueued(_STORE)),
    Mutant(Edge.E2, "store-end-on-another-stream", _E2, _end_on_another_stream(_STORE)),
    Mutant(Edge.E3, "load-without-fence", _E3, _no_wait(_LOAD)),
    Mutant(Edge.E3, "load-fence-on-legacy-stream", _E3, _fence_on_legacy_stream),
    Mutant(Edge.E4, "load-done-when-enqueued", _E4, _done_when_enqueued(_LOAD)),
    Mutant(Edge.E4, "load-end-on-another-stream", _E4, _end_on_another_stream(_LOAD)),
    Mutant(Edge.E4, "load-landed-without-asking", _E4, _landed_unasked),
    Mutant(Edge.E4, "load-done-after-a-portion", _PORTIONS, _over_after_a_portion),
    Mutant(Edge.E4, "load-told-early-unordered", _EARLY, _told_early_unordered),
    Mutant(Edge.E4, "load-early-on-another-stream", _EARLY, _held_back_on_another_stream),
    Mutant(Edge.E4, "load-early-end-elsewhere", _EARLY, _early_end_on_another_stream),
    Mutant(
        Edge.E5,
        "slots-of-an-ended-session-not-quarantined",
        Test(Edge.E5, _STORE, "session ends"),
        _no_quarantine,
    ),
    Mutant(
        Edge.E5,
        "slots-of-an-expired-lease-not-quarantined",
        Test(Edge.E5, _STORE, "lease expires"),
        _no_quarantine,
    ),
    Mutant(
        Edge.E5,
        "slots-under-a-reader-not-quarantined",
        Test(Edge.E5, _LOAD, "blocks are forgotten"),
        _no_quarantine,
    ),
    Mutant(
        Edge.E5,
        "write-lease-ends-at-submission",
        Test(Edge.E5, _STORE, "session ends"),
        _lease_ends_at_submission,
    ),
    Mutant(
        Edge.E5,
        "read-lease-ends-at-submission",
        Test(Edge.E5, _LOAD, "blocks are forgotten"),
        _lease_ends_at_submission,
    ),
    Mutant(Edge.E6, "store-mapping-not-kept", Test(Edge.E6, _STORE), _mapping_not_kept(_STORE)),
    Mutant(Edge.E6, "load-mapping-not-kept", Test(Edge.E6, _LOAD), _mapping_not_kept(_LOAD)),
    Mutant(Edge.E6, "store-tables-not-kept", Test(Edge.E6, _STORE), _tables_not_kept),
    Mutant(Edge.E6, "load-tables-not-kept", Test(Edge.E6, _LOAD), _tables_not_kept),
    Mutant(Edge.G1, "stride-of-a-packed-page", None, _with_geometry(_packed_stride)),
    Mutant(Edge.G2, "pieces-read-as-one", None, _with_geometry(_one_piece)),
    Mutant(Edge.G2, "pieces-all-at-the-start", None, _with_geometry(_pieces_at_the_start)),
    Mutant(Edge.G3, "one-engine-block-of-several", None, _one_engine_block),
    Mutant(Edge.G3, "one-kernel-page-of-several", None, _with_geometry(_one_kernel_page)),
)


def run_mutants(device: GateDevice, timing: Timing, show: Show) -> list[Caught]:
    """Test each mutant on the device's first route; docs/ORDERING.md has them in a table."""
    results: list[Caught] = []
    whole: dict[Test | None, Finding] = {}
    patient = replace(timing, delay_s=max(timing.delay_s, DELAY_S_MIN))
    for mutant in MUTANTS:
        show(f"{mutant.edge} {mutant.name}")
        before = whole.get(mutant.test)
        if before is None:
            before = whole[mutant.test] = _test(device, mutant.test, timing)
        if not before.is_good:
            reason = f"the code as it is does not pass: {before.verdict}: {before.reason}"
            results.append(Caught(mutant, is_caught=False, reason=reason, num_bytes=0))
            continue
        with mutant.broken(device):
            found = _test(device, mutant.test, patient)
        results.append(
            Caught(
                mutant,
                is_caught=found.verdict is Verdict.NOT_ORDERED,
                reason=f"{found.verdict}: {found.reason}",
                num_bytes=found.num_bytes,
            )
        )
    return results


def _test(device: GateDevice, test: Test | None, timing: Timing) -> Finding:
    if test is None:
        return _test_geometries(device)
    route, size = device.routes[0]
    path = OwnPath("mutant", lambda: device.copier(route))
    try:
        subject = Subject(device, path, size, timing)
    except FAILURES as error:
        return untested(test, path.name, error)
    try:
        subject.warm_up()
        return check_edge(subject, test)
    except FAILURES as error:
        return untested(test, path.name, error)
    finally:
        subject.close()


def _test_geometries(device: GateDevice) -> Finding:
    """Return the first finding that is not good, or the last one; bytes of all that were tried."""
    num_bytes = 0
    finding: Finding | None = None
    for geometry in GEOMETRIES:
        finding = check_geometry(device, geometry)
        num_bytes += finding.num_bytes
        if not finding.is_good:
            break
    if finding is None:
        raise AssertionError("there are no geometries")
    return replace(finding, num_bytes=num_bytes)
