"""Byte arithmetic of pages, segments and slots, against copies made the slow way."""

import ctypes
import itertools

import numpy as np
import pytest

from millpond.model.layout import LayerPages, PageGeometry, PartLayout, Segment, page_geometry
from millpond.transfer.copies import Direction, LayerMemory, plan_copies


def page_of(array: np.ndarray, axis: int, block: int) -> bytes:
    """Return the bytes of one block in the order they lie in memory."""
    taken = np.take(array, [block], axis=axis)
    order = np.argsort([-s for s in array.strides], kind="stable")
    return np.transpose(taken, order).tobytes()


SHAPES = {
    "blocks outermost": ((5, 2, 4, 3), None),
    "keys and values apart": ((2, 5, 4, 3), None),
    "tokens before heads": ((5, 4, 2, 3), (0, 2, 1, 3)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_segments_cover_exactly_the_page(name: str) -> None:
    shape, order = SHAPES[name]
    flat = np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)
    array = flat if order is None else np.transpose(flat, order)
    strides = tuple(s // array.itemsize for s in array.strides)
    geometry = page_geometry(array.shape, strides, array.itemsize, 5)
    raw = flat.tobytes()
    axis = array.shape.index(5)
    for block in range(5):
        start = block * geometry.stride_bytes
        page = b"".join(
            raw[start + s.offset_bytes : start + s.offset_bytes + s.num_bytes]
            for s in geometry.segments
        )
        assert page == page_of(array, axis, block)


def test_padding_between_blocks_is_left_out() -> None:
    geometry = page_geometry((5, 6), (10, 1), 2, 5)
    assert geometry == PageGeometry(20, (Segment(0, 12),))


def test_kernel_blocks_make_up_one_engine_block() -> None:
    geometry = page_geometry((20, 6), (6, 1), 2, 5)
    assert geometry == PageGeometry(48, (Segment(0, 48),))


def test_overlap_and_missing_block_dimension_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        page_geometry((5, 4, 6), (24, 3, 1), 1, 5)
    with pytest.raises(ValueError, match="counts 7 blocks"):
        page_geometry((5, 4), (4, 1), 1, 7)


def two_layers() -> PartLayout:
    return PartLayout("attention", (LayerPages("l0", 0, 48), LayerPages("l1", 1, 16)), {0: 2, 1: 4})


def test_rank_bytes_and_layer_offsets_add_up() -> None:
    layout = two_layers()
    assert layout.rank_bytes == 2 * 48 + 4 * 16
    assert layout.layer_offsets() == (0, 96)


@pytest.mark.parametrize("direction", list(Direction))
def test_planned_copies_move_every_byte_and_no_other(direction: Direction) -> None:
    layout = two_layers()
    rng = np.random.default_rng(7)
    layer0 = rng.integers(0, 255, (9, 60), np.uint8)
    layer1 = rng.integers(0, 255, (2, 9, 8), np.uint8)
    memory = (
        LayerMemory(layer0.ctypes.data, PageGeometry(60, (Segment(0, 48),))),
        LayerMemory(layer1.ctypes.data, PageGeometry(8, (Segment(0, 8), Segment(72, 8)))),
    )
    slots = rng.integers(0, 255, (3, layout.rank_bytes), np.uint8)
    tables = {0: [[3, 1], [0, 8]], 1: [[4, 2, 7, 6], [0, 0, 5, 3]]}
    before = (layer0.copy(), layer1.copy(), slots.copy())
    rows = [2, 0]
    copies = plan_copies(
        direction, layout, memory, tables, [int(slots[row].ctypes.data) for row in rows]
    )
    for source, target, length in zip(
        copies.sources.tolist(), copies.targets.tolist(), copies.lengths.tolist(), strict=True
    ):
        ctypes.memmove(target, source, length)

    want0, want1, want = (a.copy() for a in before)
    num_bytes = 0
    for i, row in enumerate(rows):
        for j, block in enumerate(tables[0][i]):
            if block:
                place = (row, slice(48 * j, 48 * j + 48))
                if direction is Direction.STORE:
                    want[place] = before[0][block, :48]
                else:
                    want0[block, :48] = before[2][place]
                num_bytes += 48
        for (j, block), half in itertools.product(enumerate(tables[1][i]), (0, 1)):
            if block:
                start = 96 + 16 * j + 8 * half
                place = (row, slice(start, start + 8))
                if direction is Direction.STORE:
                    want[place] = before[1][half, block]
                else:
                    want1[half, block] = before[2][place]
                num_bytes += 8
    assert copies.num_bytes == num_bytes
    np.testing.assert_array_equal(layer0, want0)
    np.testing.assert_array_equal(layer1, want1)
    np.testing.assert_array_equal(slots, want)


def test_layers_of_one_group_may_differ_in_all() -> None:
    pages = {"l0": (0, 48), "l1": (1, 16), "l2": (0, 24), "l3": (1, 32)}
    layout = PartLayout(
        "part", tuple(LayerPages(name, *page) for name, page in pages.items()), {0: 2, 1: 1}
    )
    places = [
        LayerMemory(10_000, PageGeometry(64, (Segment(0, 48),))),
        LayerMemory(20_000, PageGeometry(16, (Segment(0, 4), Segment(800, 12)))),
        LayerMemory(30_000, PageGeometry(100, (Segment(8, 8), Segment(24, 16)))),
        LayerMemory(40_000, PageGeometry(32, (Segment(0, 32),))),
    ]
    tables = {0: [[3, 0], [5, 2]], 1: [[7], [0]]}
    slots = [1_000, 2_000]
    wanted: set[tuple[int, int, int]] = set()
    for layer, place, start in zip(layout.layers, places, layout.layer_offsets(), strict=True):
        for slot, row in zip(slots, tables[layer.group], strict=True):
            for page, block in enumerate(row):
                target = slot + start + page * layer.page_bytes
                for segment in place.geometry.segments:
                    source = place.address + block * place.geometry.stride_bytes
                    if block:
                        wanted.add((source + segment.offset_bytes, target, segment.num_bytes))
                    target += segment.num_bytes
    planned = plan_copies(Direction.STORE, layout, places, tables, slots)
    found = list(
        zip(
            planned.sources.tolist(),
            planned.targets.tolist(),
            planned.lengths.tolist(),
            strict=True,
        )
    )
    assert set(found) == wanted
    assert len(found) == len(wanted)


def test_a_table_of_the_wrong_shape_is_refused() -> None:
    layout = PartLayout("attention", (LayerPages("l0", 0, 48),), {0: 2})
    memory = (LayerMemory(0, PageGeometry(48, (Segment(0, 48),))),)
    with pytest.raises(ValueError, match="group 0"):
        plan_copies(Direction.LOAD, layout, memory, {0: [[1]]}, [0])
