"""Which bytes go where: page copies as three arrays, computed without a Python loop a page."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millpond.model.layout import PageGeometry, PartLayout

SKIP_BLOCK = 0
"""The engine's null block: it carries no data and is never copied."""


class Direction(enum.StrEnum):
    """``STORE``: engine to arena. ``LOAD``: arena to engine."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Copies:
    """Independent copies: ``lengths[i]`` bytes from ``sources[i]`` to ``targets[i]``.

    Addresses are absolute; the memory behind them must outlive the copy (E6).
    """

    sources: NDArray[np.uint64]
    targets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        """Bytes that these copies move."""
        return int(self.lengths.sum())

    def distinct_lengths(self) -> list[int]:
        """Return the lengths that occur, in order: one, as a rule."""
        if len(self.lengths) and (self.lengths == self.lengths[0]).all():
            return [int(self.lengths[0])]
        return np.unique(self.lengths).tolist()

    def part(self, some: slice | NDArray[np.bool_]) -> "Copies":
        """Return some of these."""
        return Copies(self.sources[some], self.targets[some], self.lengths[some])

    def within(self, num_bytes: int) -> "Copies":
        """Return the first of these that move no more than so much together, but one at least."""
        num_within = int(np.searchsorted(self.lengths.cumsum(), num_bytes, side="right"))
        return self.part(slice(0, max(1, num_within)))

    @staticmethod
    def concatenate(copies: Sequence["Copies"]) -> "Copies":
        """Return all of ``copies`` as one, in order."""
        if not copies:
            empty = np.empty(0, np.uint64)
            return Copies(empty, empty, empty)
        return Copies(
            np.concatenate([c.sources for c in copies]),
            np.concatenate([c.targets for c in copies]),
            np.concatenate([c.lengths for c in copies]),
        )


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Where a layer's pages are in this process: block 0's address and the geometry."""

    address: int
    geometry: PageGeometry


def plan_copies(
    direction: Direction,
    layout: PartLayout,
    memory: Sequence[LayerMemory],
    tables: Mapping[int, Sequence[Sequence[int]]],
    slots: Sequence[int],
) -> Copies:
    """Return the copies between the pages of some blocks and their slots.

    ``memory[l]`` belongs to ``layout.layers[l]``. ``tables[g][i]`` are the engine blocks of
    group g that make block i, ``slots[i]`` is the address of this rank's slice of its slot.
    Engine block 0 is skipped. ``ValueError`` where a table has the wrong shape.
    """
    slot_addresses = np.asarray(slots, np.uint64)
    planned: list[Copies] = []
    for group, runs in _runs(layout, memory).items():
        table = np.asarray(tables[group], np.uint64)
        if table.shape != (len(slots), layout.blocks[group]):
            wanted = (len(slots), layout.blocks[group])
            raise ValueError(f"group {group}: table {table.shape}, not {wanted}")
        rows, columns = np.nonzero(table != SKIP_BLOCK)
        address, stride, start, page, length = runs[:, :, None]
        engine = address + table[rows, columns] * stride
        slot = start + slot_addresses[rows] + columns.astype(np.uint64) * page
        lengths = np.broadcast_to(length, engine.shape)
        store = direction is Direction.STORE
        source, target = (engine, slot) if store else (slot, engine)
        planned.append(Copies(source.ravel(), target.ravel(), lengths.ravel()))
    return Copies.concatenate(planned)


def _runs(layout: PartLayout, memory: Sequence[LayerMemory]) -> dict[int, NDArray[np.uint64]]:
    """Return the dense runs of bytes that the pages of each group have, as five rows.

    The run's address in block 0 and the stride from block to block; its start in a slot's first
    page of the layer and the stride from page to page; its bytes.
    """
    runs: dict[int, list[tuple[int, ...]]] = {group: [] for group in layout.blocks}
    for layer, place, start in zip(layout.layers, memory, layout.layer_offsets(), strict=True):
        position = start
        for offset_bytes, num_bytes in place.geometry.segments:
            address, stride = place.address + offset_bytes, place.geometry.stride_bytes
            runs[layer.group].append((address, stride, position, layer.page_bytes, num_bytes))
            position += num_bytes
    return {group: np.array(rows, np.uint64).reshape(-1, 5).T for group, rows in runs.items()}
