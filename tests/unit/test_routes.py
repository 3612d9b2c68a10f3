"""Which way pages go follows from what was measured."""

import itertools
from pathlib import Path

import pytest

from millpond.model.limits import GIB, KIB, MIB
from millpond.transfer import Direction
from millpond.transfer.link import LinkSpeed, pcie_link
from millpond.transfer.registration import PIECE_BYTES, pieces_of
from millpond.transfer.routes import Route, Routes, fallback, pick

LOAD, STORE = Direction.LOAD, Direction.STORE


def picked(direction: Direction, **gb_s: float) -> Route:
    figures = {Route(name): speed for name, speed in gb_s.items()}
    return pick({direction: {64 * KIB: figures}}).of(direction, 64 * KIB)


def test_the_copy_engines_alone_are_used_unless_the_buffer_leads_by_much() -> None:
    assert picked(STORE, batch=50.0, staged=55.0) is Route.BATCH
    assert picked(STORE, batch=20.0, staged=41.0) is Route.STAGED
    assert picked(STORE, loop=54.9, staged=55.0) is Route.LOOP


def test_the_kernel_must_lead_by_much_and_only_loads_use_it() -> None:
    assert picked(LOAD, batch=20.0, staged=41.0, kernel=45.0) is Route.STAGED
    assert picked(LOAD, batch=20.0, staged=41.0, kernel=52.0) is Route.KERNEL
    assert picked(STORE, batch=20.0, staged=41.0, kernel=52.0) is Route.STAGED


def test_a_page_goes_as_the_next_larger_measured_one() -> None:
    table = {64 * KIB: Route.KERNEL, MIB: Route.BATCH}
    routes = Routes({LOAD: table, STORE: table})
    assert [routes.of(LOAD, n) for n in (1, 64 * KIB, 64 * KIB + 1, MIB, 9 * MIB)] == [
        Route.KERNEL,
        Route.KERNEL,
        Route.BATCH,
        Route.BATCH,
        Route.BATCH,
    ]


@pytest.mark.parametrize(("has_batch", "large"), [(True, Route.BATCH), (False, Route.LOOP)])
def test_large_pages_use_what_the_driver_has(has_batch: bool, large: Route) -> None:
    routes = fallback(has_batch=has_batch)
    assert routes.of(STORE, 4 * MIB) is large
    assert routes.of(LOAD, 16 * KIB) is Route.STAGED


@pytest.mark.parametrize("extent", [64 * MIB, GIB, 3 * GIB])
@pytest.mark.parametrize("size", [64 * MIB, 5 * GIB, 256 * GIB])
def test_pieces_cover_the_arena_and_end_with_extents(size: int, extent: int) -> None:
    pieces = pieces_of(size, extent)
    assert pieces[0][0] == 0
    assert [start + n for start, n in pieces][-1] == size
    assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(pieces)), (
        "one piece begins where the one before it ends"
    )
    assert all(n <= max(PIECE_BYTES, extent) for _, n in pieces)
    assert all((start + n) % extent == 0 for start, n in pieces[:-1])


def test_copies_can_begin_after_a_small_first_piece() -> None:
    assert pieces_of(256 * GIB, 64 * MIB)[0] == (0, GIB)


@pytest.mark.parametrize(
    ("h2d", "d2h", "is_slow"), [(55.4, 55.2, False), (34.0, 55.0, True), (55.0, 30.0, True)]
)
def test_a_link_below_its_generation_is_slow(h2d: float, d2h: float, is_slow: bool) -> None:
    assert LinkSpeed(h2d, d2h, generation=5, width=16).is_slow is is_slow


def test_an_unknown_link_is_not_called_slow() -> None:
    assert not LinkSpeed(3.0, 3.0).is_slow
    assert LinkSpeed(3.0, 3.0).allowed_gb_s is None


def test_gen_5_by_16_allows_what_is_known_of_it() -> None:
    # 32 GT/s x 16 lanes / 8 bits, less the line code and packet headers; 55.4 were measured.
    assert LinkSpeed(1.0, 1.0, generation=5, width=16).allowed_gb_s == pytest.approx(57.6, abs=0.2)


def test_generation_and_width_come_from_the_system(tmp_path: Path) -> None:
    assert pcie_link("0000:1B:00.0", tmp_path) == (None, None)
    device = tmp_path / "0000:1b:00.0"
    device.mkdir()
    (device / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (device / "current_link_width").write_text("16\n")
    assert pcie_link("0000:1B:00.0", tmp_path) == (5, 16)
    (tmp_path / "max_link_speed").write_text("16.0 GT/s PCIe\n")  # the bridge above it
    assert pcie_link("0000:1b:00.0", tmp_path) == (4, 16)
    (tmp_path / "max_link_speed").unlink()
    (device / "max_link_speed").write_text("Unknown\n")
    (device / "current_link_width").write_text("0\n")
    assert pcie_link("0000:1b:00.0", tmp_path) == (None, None)
