"""G1 to G3: pages of several geometries, stored and loaded, against bytes counted one by one.

Our code says where a page's bytes lie with a few numbers (stride, segments, offsets). The
oracle knows none of them: it walks over every element of a block by shape and strides, and
says that a slot holds a block's elements in the order of their addresses.
"""

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from millpond.gate.device import GateDevice, Size
from millpond.gate.own import OwnPath
from millpond.gate.paths import Room
from millpond.gate.patterns import WORD_BYTES, Comparison, Wrong
from millpond.gate.verdicts import Edge, Finding, Verdict
from millpond.model import layout
from millpond.model.limits import SLOT_ALIGNMENT_BYTES
from millpond.transfer import copies
from millpond.transfer.copies import Copies, Direction, LayerMemory
from millpond.transfer.engine import Ends, Ticket
from millpond.transfer.routes import Route

_ITEM_BYTES: Final = 2
_DONE_S_MAX: Final = 30.0
_FILL: Final = 0xEE
"""What memory holds that nothing may write to."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One layer's cache: ``shape`` and ``strides`` count items; one dimension is of blocks.

    ``split``: the engine's kernels cut each block into so many, side by side.
    """

    group: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_axis: int
    split: int = 1

    @property
    def num_items(self) -> int:
        """Items from the first to the last, gaps included."""
        ends = ((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        return 1 + sum(ends)

    def items_of(self, block: int) -> NDArray[np.int64]:
        """Return where the items of a block lie, by walking over all of them."""
        ranges = [range(size) for size in self.shape]
        ranges[self.block_axis] = range(block * self.split, (block + 1) * self.split)
        places = [
            sum(i * stride for i, stride in zip(index, self.strides, strict=True))
            for index in itertools.product(*ranges)
        ]
        return np.asarray(sorted(places), np.int64)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers of a part. ``per_block[g]``: engine blocks of group g that make one block."""

    name: str
    edge: Edge
    tensors: tuple[Tensor, ...]
    per_block: dict[int, int]
    num_ranks: int = 1

    @property
    def num_blocks(self) -> int:
        """Engine blocks of each tensor, the null block included."""
        tensor = self.tensors[0]
        return tensor.shape[tensor.block_axis] // tensor.split


def _plain(group: int, *shape: int) -> Tensor:
    strides = tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape)))
    return Tensor(group, shape, strides, block_axis=0)


_BLOCKS: Final = 13
_KEYS_AND_VALUES: Final = Tensor(0, (2, _BLOCKS, 16, 32), (_BLOCKS * 512, 512, 32, 1), 1)

GEOMETRIES: Final = (
    Geometry("plain", Edge.G1, (_plain(0, _BLOCKS, 16, 64),) * 2, {0: 1}),
    Geometry(
        "strided: two layers in one tensor",
        Edge.G1,
        (Tensor(0, (_BLOCKS, 16, 64), (2 * 1024, 64, 1), 0),) * 2,
        {0: 1},
    ),
    Geometry("keys and values apart", Edge.G2, (_KEYS_AND_VALUES,) * 2, {0: 1}),
    Geometry("padded page", Edge.G2, (Tensor(0, (_BLOCKS, 8, 64), (1024, 64, 1), 0),), {0: 1}),
    Geometry(
        "heads apart in a page",
        Edge.G2,
        (Tensor(0, (_BLOCKS, 4, 8, 32), (4 * 512, 512, 32, 1), 0),),
        {0: 1},
    ),
    Geometry("several engine blocks a block", Edge.G3, (_plain(0, _BLOCKS, 16, 32),) * 2, {0: 4}),
    Geometry(
        "kernel pages within a block",
        Edge.G3,
        (Tensor(0, (_BLOCKS * 4, 8, 32), (256, 32, 1), 0, split=4),),
        {0: 1},
    ),
    Geometry(
        "two groups",
        Edge.G3,
        (_plain(0, _BLOCKS, 16, 32), _plain(1, _BLOCKS, 16, 64)),
        {0: 4, 1: 2},
    ),
    Geometry("state", Edge.G2, (Tensor(0, (_BLOCKS, 640), (1024, 1), 0),), {0: 1}),
    Geometry("two ranks", Edge.G3, (_KEYS_AND_VALUES,), {0: 2}, num_ranks=2),
)
"""Each is named for the piece of geometry that it shows most; all are tried for every one."""


def check_geometry(
    device: GateDevice, geometry: Geometry, *, path: str = "millpond", route: Route | None = None
) -> Finding:
    """Store blocks to slots, wipe the pages, load them again; compare every byte there is.

    By the device's first route, or by ``route``; ``path`` is what the finding calls it.
    """
    scene = _Scene(device, geometry, route or device.routes[0][0])
    try:
        wrong, num_bytes = scene.check()
    finally:
        scene.close()
    return Finding(
        geometry.edge,
        path,
        None,
        Verdict.ORDERED if wrong is None else Verdict.NOT_ORDERED,
        geometry.name if wrong is None else f"{geometry.name}: {wrong.describe()}",
        num_bytes,
        wrong,
    )


class _Scene:
    """Tensors of all ranks on the device, and slots on the host."""

    def __init__(self, device: GateDevice, geometry: Geometry, route: Route) -> None:
        self._device = device
        self._geometry = geometry
        self._part = _part_of(geometry)
        self._tables = _tables_of(geometry)
        self._num_slots = len(self._tables[0])
        slot_bytes = self._part.rank_bytes * geometry.num_ranks
        self._slot_bytes = -(-slot_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        self._caches = [
            [
                device.make_pages(Size(1, tensor.num_items * _ITEM_BYTES)).reshape(-1)
                for tensor in geometry.tensors
            ]
            for _ in range(geometry.num_ranks)
        ]
        self._path = OwnPath(geometry.name, lambda: device.copier(route))
        # One slot more, which nobody may touch.
        room = Room(device.make_pages(Size(1, self._slot_bytes)), self._num_slots + 1)
        self._host = self._path.open(room).numpy()

    def close(self) -> None:
        """End the copies."""
        self._path.close()

    def check(self) -> tuple[Comparison | None, int]:
        """Return what is wrong, if anything, and how many bytes were compared."""
        before = [
            [self._fill(cache, rank, layer) for layer, cache in enumerate(caches)]
            for rank, caches in enumerate(self._caches)
        ]
        self._host[:] = _FILL
        self._copy(Direction.STORE)
        expected = np.full_like(self._host, _FILL)
        for slot in range(self._num_slots):
            for rank in range(self._geometry.num_ranks):
                start = rank * self._oracle_bytes()
                packed = self._packed(before[rank], slot)
                expected[slot, start : start + len(packed)] = packed
        stored = _compare(self._host, expected)
        for caches in self._caches:
            for cache in caches:
                self._device.write(cache, np.full(cache.shape, _FILL, np.uint8))
        self._host[:] = expected
        self._copy(Direction.LOAD)
        loaded = self._compare_loaded(before)
        num_bytes = stored.num_bytes + sum(each.num_bytes for each in loaded)
        wrong = next((each for each in (stored, *loaded) if not each.is_right), None)
        return wrong, num_bytes

    def _compare_loaded(self, before: list[list[NDArray[np.uint8]]]) -> list[Comparison]:
        compared: list[Comparison] = []
        for rank, caches in enumerate(self._caches):
            for i, cache in enumerate(caches):
                expected = np.full(cache.shape, _FILL, np.uint8)
                for slot in range(self._num_slots):
                    places = self._bytes_of(i, slot)
                    expected[places] = before[rank][i][places]
                found = self._device.read(cache)
                compared.append(_compare(found[None, :], expected[None, :]))
        return compared

    # ------------------------------------------------------------ the oracle

    def _bytes_of(self, layer: int, slot: int) -> NDArray[np.int64]:
        """Return where the bytes of one block lie in a layer's cache, page after page."""
        tensor = self._geometry.tensors[layer]
        pages = [tensor.items_of(block) for block in self._tables[tensor.group][slot] if block]
        first = np.concatenate(pages) * _ITEM_BYTES
        return (first[:, None] + np.arange(_ITEM_BYTES)).reshape(-1)

    def _packed(self, caches: Sequence[NDArray[np.uint8]], slot: int) -> NDArray[np.uint8]:
        layers = range(len(self._geometry.tensors))
        return np.concatenate([caches[layer][self._bytes_of(layer, slot)] for layer in layers])

    def _oracle_bytes(self) -> int:
        layers = range(len(self._geometry.tensors))
        return sum(len(self._bytes_of(layer, 0)) for layer in layers)

    # ------------------------------------------------------------ our code

    def _fill(self, cache: torch.Tensor, rank: int, layer: int) -> NDArray[np.uint8]:
        chance = np.random.default_rng((rank, layer))
        data = chance.integers(0, 256, len(cache), np.uint8)
        self._device.write(cache, data)
        return data

    def _copy(self, direction: Direction) -> None:
        geometry, arena = self._geometry, self._path.arena
        planned: list[Copies] = []
        for rank, caches in enumerate(self._caches):
            memory = [
                LayerMemory(cache.data_ptr(), _geometry_of(tensor, geometry.num_blocks))
                for cache, tensor in zip(caches, geometry.tensors, strict=True)
            ]
            starts = [
                arena.address + slot * self._slot_bytes + rank * self._part.rank_bytes
                for slot in range(self._num_slots)
            ]
            planned.append(copies.plan_copies(direction, self._part, memory, self._tables, starts))
        done = threading.Event()
        tickets: list[Ticket] = []

        def on_done(ticket: Ticket) -> None:
            tickets.append(ticket)
            done.set()

        self._device.synchronize()
        self._path.engine.submit(
            direction,
            Copies.concatenate(planned),
            after=self._path.engine.fence(),
            keep_alive=arena,
            ends=Ends(on_done),
        )
        if not done.wait(_DONE_S_MAX) or tickets[0].error is not None:
            raise RuntimeError(f"the copies of {geometry.name!r} did not end: {tickets}")


def _geometry_of(tensor: Tensor, num_blocks: int) -> layout.PageGeometry:
    return layout.page_geometry(tensor.shape, tensor.strides, _ITEM_BYTES, num_blocks)


def _part_of(geometry: Geometry) -> layout.PartLayout:
    layers = tuple(
        layout.LayerPages(f"layer {i}", tensor.group, len(tensor.items_of(0)) * _ITEM_BYTES)
        for i, tensor in enumerate(geometry.tensors)
    )
    return layout.PartLayout("part", layers, geometry.per_block)


def _tables_of(geometry: Geometry) -> dict[int, list[list[int]]]:
    """Return engine blocks, scattered, each in one slot; the null block is in none."""
    chance = np.random.default_rng(7)
    num_slots = (geometry.num_blocks - 1) // max(geometry.per_block.values())
    tables: dict[int, list[list[int]]] = {}
    for group, num in geometry.per_block.items():
        ids = chance.permutation(np.arange(1, geometry.num_blocks))[: num_slots * num]
        tables[group] = ids.reshape(num_slots, num).tolist()
    return tables


def _compare(found: NDArray[np.uint8], expected: NDArray[np.uint8]) -> Comparison:
    """Compare bytes; there are no epochs here, so what is wrong is unknown, or overwritten."""
    words = (len(found), -1, WORD_BYTES)
    is_wrong = (found != expected).reshape(words).any(axis=2)
    is_outside = (expected == _FILL).reshape(words).all(axis=2)
    kinds = np.where(is_wrong, np.uint8(Wrong.UNKNOWN), np.uint8(0))
    kinds[is_wrong & is_outside] = Wrong.OVERWRITTEN
    return Comparison(tuple(range(len(found))), kinds)
