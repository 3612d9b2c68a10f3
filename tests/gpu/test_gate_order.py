"""The gate on a GPU: our own engine is ordered by every route, and every mutant is caught."""

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

if torch.cuda.is_available():
    from millpond.gate.cuda import CudaGateDevice, open_cuda
    from millpond.gate.device import Where
    from millpond.gate.mutants import run_mutants
    from millpond.gate.order import OrderOptions, check_order
    from millpond.gate.subject import Timing
    from millpond.transfer.routes import Route


@pytest.fixture
def device() -> "Iterator[CudaGateDevice]":
    made = open_cuda()
    yield made
    made.close()


@pytest.mark.timeout(300)
def test_every_route_is_ordered(device: "CudaGateDevice") -> None:
    report = check_order(device, OrderOptions(), lambda _: None)
    assert [f"{each.path} {each.edge} {each.reason}" for each in report.untested()] == []
    assert report.faults() == []
    paths = {each.path for each in report.findings}
    assert {path.partition("(")[2].partition(",")[0] for path in paths} == {*map(str, Route)}


@pytest.mark.timeout(300)
def test_every_mutant_is_caught(device: "CudaGateDevice") -> None:
    results = run_mutants(device, Timing(), lambda _: None)
    assert [(each.mutant.name, each.reason) for each in results if not each.is_caught] == []


def test_streams_do_not_wait_for_a_stream_that_is_held_up(device: "CudaGateDevice") -> None:
    for held in Where:
        with device.on(held):
            hold = device.hold(10.0)
        for other in set(Where) - {held}:
            with device.on(other):
                point = device.point()
            while not point.is_passed():
                assert not hold.is_open(), f"{other} waits for {held}"
        assert not hold.is_open()
        hold.release()
        device.synchronize()
        assert hold.is_open()
