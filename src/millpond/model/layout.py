"""Byte arithmetic: where the pages of a block lie in an engine's tensor and in a slot.

    slot of one part, one block of Millpond, R ranks
    ┌──────────── rank 0 ────────────┬──────────── rank 1 ───────────┬─ …
    │ layer 0        │ layer 1       │
    │ page 0 page 1… │ page 0 page 1…│          page j: engine block j of this block
    └────────────────┴───────────────┴─ …

Pages are packed: only bytes that carry data, no padding of the engine's unified page.
Their checksums lie elsewhere in the arena: see ``summed_segments``.
"""

from dataclasses import dataclass
from typing import NamedTuple

from millpond.model.limits import SUMMED_BYTES_MIN


class Segment(NamedTuple):
    """A dense run of bytes of a page, from the start of the engine block's region.

    Or of a rank's slice of a slot, from its start.
    """

    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Where the page of engine block b lies: ``base + b * stride + segment.offset``."""

    stride_bytes: int
    segments: tuple[Segment, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of data in one page, padding excluded."""
        return sum(segment.num_bytes for segment in self.segments)


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages in a part: its group's block table names the engine blocks."""

    layer: str
    group: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class PartLayout:
    """How one rank's slice of a slot is filled.

    ``blocks[g]`` is how many engine blocks of group g are kept of one block of Millpond, its
    last ones: all of them for full attention, 1 for a recurrent state, and as many as can be
    looked back at for a sliding window.
    """

    name: str
    layers: tuple[LayerPages, ...]
    blocks: dict[int, int]

    @property
    def rank_bytes(self) -> int:
        """Bytes of one rank's slice."""
        return sum(layer.page_bytes * self.blocks[layer.group] for layer in self.layers)

    def layer_offsets(self) -> tuple[int, ...]:
        """Return where each layer's first page lies in a rank's slice, in bytes."""
        offsets: list[int] = []
        position = 0
        for layer in self.layers:
            offsets.append(position)
            position += layer.page_bytes * self.blocks[layer.group]
        return tuple(offsets)


def summed_segments(layout: PartLayout) -> tuple[Segment, ...]:
    """Return the runs of a rank's slice that have a checksum each: all of it, layer by layer.

    Layers of less than SUMMED_BYTES_MIN are summed together with their neighbours, so that
    there is room in the arena for the sums of all ranks. A slice of fewer bytes has none.
    """
    segments: list[Segment] = []
    start = end = 0
    for layer in layout.layers:
        end += layer.page_bytes * layout.blocks[layer.group]
        if end - start >= SUMMED_BYTES_MIN:
            segments.append(Segment(start, end - start))
            start = end
    if segments and end > start:
        last = segments.pop()
        segments.append(Segment(last.offset_bytes, end - last.offset_bytes))
    return tuple(segments)


def page_geometry(
    shape: tuple[int, ...], strides: tuple[int, ...], item_bytes: int, num_blocks: int
) -> PageGeometry:
    """Return the geometry of a tensor that holds one page for each of ``num_blocks`` blocks.

    ``strides`` are in items, as torch gives them. The block dimension is the one of length
    ``num_blocks``, or of a whole multiple k of it where the engine's kernels split each block
    into k; of several candidates, the outermost in memory. ``ValueError`` where there is none
    or where the bytes of a page overlap.
    """
    axis = _block_axis(shape, strides, num_blocks)
    split = shape[axis] // num_blocks
    dims = [
        (stride * item_bytes, size)
        for i, (size, stride) in enumerate(zip(shape, strides, strict=True))
        if i != axis and size > 1
    ]
    if split > 1:
        dims.append((strides[axis] * item_bytes, split))
    return PageGeometry(strides[axis] * split * item_bytes, _dense_runs(dims, item_bytes))


def _block_axis(shape: tuple[int, ...], strides: tuple[int, ...], num_blocks: int) -> int:
    exact = [i for i, size in enumerate(shape) if size == num_blocks]
    split = [i for i, size in enumerate(shape) if size > num_blocks and size % num_blocks == 0]
    candidates = exact or split
    if not candidates:
        raise ValueError(f"no dimension of shape {shape} counts {num_blocks} blocks")
    return max(candidates, key=lambda i: strides[i])


def _dense_runs(dims: list[tuple[int, int]], item_bytes: int) -> tuple[Segment, ...]:
    """Merge dimensions (stride in bytes, size) from the inside out into dense runs."""
    run = item_bytes
    outer: list[tuple[int, int]] = []
    for stride, size in sorted(dims):
        if not outer and stride == run:
            run *= size
        elif stride < run:
            raise ValueError(f"bytes of a page overlap: stride {stride} within a run of {run}")
        else:
            outer.append((stride, size))
    offsets = [0]
    for stride, size in reversed(outer):
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return tuple(Segment(offset, run) for offset in offsets)
