"""What a CUDA stream of ours enqueues, in order (torch's streams and kernels are seams)."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from millpond.model.limits import KIB
from millpond.transfer.copies import Copies, Direction
from millpond.transfer.device import CopyFailed
from millpond.transfer.packing import HostRegion
from millpond.transfer.routes import Route, Routes
from millpond.transfer.threads import ThreadEvent

PAGE = 16 * KIB
BY_TRITON = ("kernel", "staging", "cuda", "measuring")


class Played:
    """Streams and events that note what is enqueued; nothing is ever passed."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.num_marks = 0
        self.num_streams = 0
        self.tables_until_full = 10**6

    def stream(self, **_: object) -> Any:  # noqa: ANN401
        name = ("lane", "side")[self.num_streams % 2]
        self.num_streams += 1
        return SimpleNamespace(
            name=name,
            priority=0,
            cuda_stream=0,
            wait_event=lambda event: self.log.append(f"{name} waits for {event.mark}"),
        )

    def event(self, **_: object) -> Any:  # noqa: ANN401
        made = SimpleNamespace(mark="nothing", query=lambda: False)

        def record(stream: Any) -> None:  # noqa: ANN401
            self.num_marks += 1
            made.mark = f"{stream.name} {self.num_marks}"
            self.log.append(f"mark {made.mark}")

        made.record = record
        return made

    def table(self, *arguments: Any) -> Any:  # noqa: ANN401
        self.tables_until_full -= 1
        if self.tables_until_full < 0 and arguments[3].name == "side":
            raise torch.OutOfMemoryError("full")
        return SimpleNamespace(copy=lambda _, stream, __: self.log.append(f"{stream.name} kernel"))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    triton: Any = ModuleType("triton")
    language: Any = ModuleType("triton.language")
    triton.jit = lambda **_: lambda function: function
    language.constexpr, triton.language = int, language
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    for name in BY_TRITON:
        monkeypatch.delitem(sys.modules, f"millpond.transfer.{name}", raising=False)
    importlib.import_module("millpond.transfer.cuda")  # with torch's own types
    world = Played()
    monkeypatch.setattr(torch.cuda, "Stream", world.stream)
    monkeypatch.setattr(torch.cuda, "Event", world.event)
    yield world
    for name in BY_TRITON:
        sys.modules.pop(f"millpond.transfer.{name}", None)


@pytest.fixture
def stream(played: Played, monkeypatch: pytest.MonkeyPatch) -> Any:  # noqa: ANN401
    from millpond.transfer import cuda, cudart, feed, staging

    monkeypatch.setattr(staging, "PageTable", played.table)
    monkeypatch.setattr(cuda, "PageTable", played.table)
    monkeypatch.setattr(staging.torch, "empty", lambda *_, **__: torch.zeros(1))
    monkeypatch.setattr(cudart, "has_batch_copy", lambda: True)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(feed.Feed, "copy", lambda *_, **__: played.log.append("lane copy"))
    made = cuda.CudaStream(
        torch.device("cpu"),
        Direction.LOAD,
        routes=lambda: Routes.only(Route.STAGED),
        region=lambda: HostRegion(0, 1 << 40),
    )
    fence = played.event()
    fence.mark = "the fence"
    made.wait_for(cuda.CudaEvent(fence))
    return made


def test_what_waits_for_an_early_load_is_the_current_stream(
    played: Played,
    stream: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from millpond.transfer import cuda

    monkeypatch.setattr(torch.cuda, "current_stream", played.stream)  # the next is a "lane"
    device = cuda.CudaDevice(torch.device("cpu"), routes=Routes.only(Route.BATCH))
    stream.copy(pages(1))
    end = stream.record()
    device.hold_back(end)
    assert played.log[-1].endswith(f"waits for {end.event.mark}")
    assert end.event.mark.startswith("lane")
    with pytest.raises(CopyFailed, match="not of this device"):
        device.hold_back(ThreadEvent())

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(torch.cuda, "current_stream", fail)
    with pytest.raises(CopyFailed, match="the device is gone"):
        device.hold_back(end)


def pages(num: int) -> Copies:
    at = np.arange(num, dtype=np.uint64) * np.uint64(PAGE)
    return Copies(at, at, np.full(num, PAGE, np.uint64))


def last(played: Played, what: str) -> int:
    return max(i for i, entry in enumerate(played.log) if entry.startswith(what))


@pytest.mark.usefixtures("stream")
def test_both_streams_of_the_staged_route_wait_for_the_fence(played: Played) -> None:
    assert {"lane waits for the fence", "side waits for the fence"} <= set(played.log)


def test_the_end_of_staged_pages_is_behind_the_last_kernel(stream: Any, played: Played) -> None:  # noqa: ANN401
    stream.copy(pages(4096))
    stream.record()
    side = last(played, "mark side")
    assert last(played, "side kernel") < side
    assert last(played, f"lane waits for {played.log[side].removeprefix('mark ')}") > side
    assert last(played, "mark lane") == len(played.log) - 1


def test_memory_that_runs_out_between_portions_leaves_the_end_behind_the_earlier_ones(
    stream: Any,  # noqa: ANN401
    played: Played,
) -> None:
    """E4: or pages would be used that a kernel on the other stream has not written yet."""
    played.tables_until_full = 1
    stream.copy(pages(4096))
    with pytest.raises(CopyFailed, match="memory"):
        stream.copy(pages(4096))
    stream.record()
    side = last(played, "mark side")
    assert last(played, "side kernel") < side
    assert last(played, f"lane waits for {played.log[side].removeprefix('mark ')}") > side


def test_pages_that_cannot_be_staged_any_more_go_another_way_in_its_portions(
    stream: Any,  # noqa: ANN401
    played: Played,
) -> None:
    by_buffer = stream.portion(pages(8192))
    played.tables_until_full = 0
    with pytest.raises(CopyFailed):
        stream.copy(pages(by_buffer))
    played.log.clear()
    stream.copy(pages(8192))
    assert played.log == ["lane kernel"]
    odd = pages(8192)
    odd.sources[0] += np.uint64(1)  # no kernel can
    assert stream.portion(odd) == 1024
    stream.copy(odd)
    assert played.log == ["lane kernel", "lane copy"]


@pytest.mark.parametrize(
    ("route", "portion"),
    [(Route.BATCH, 1024), (Route.LOOP, 256), (Route.STAGED, 4096), (Route.KERNEL, 4096)],
)
def test_portions_are_what_a_route_takes_in_a_moment(
    stream: Any,  # noqa: ANN401
    route: Route,
    portion: int,
) -> None:
    stream._routes = lambda: Routes.only(route)
    assert stream.portion(pages(100_000)) == portion


def test_a_driver_without_batches_gets_few_calls_at_a_time(
    stream: Any,  # noqa: ANN401
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millpond.transfer.cudart.has_batch_copy", lambda: False)
    stream._routes = lambda: Routes.only(Route.BATCH)
    assert stream.portion(pages(100_000)) == 256
