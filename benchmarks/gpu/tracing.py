"""Notes when the parts of a moved request begin and end, on the host and on the GPU.

Runs in an engine's process. GPU times come from events on the streams, laid over the host's
clock by one event that is recorded while the GPU is idle; without a GPU there are none.
"""

# What is timed lies inside of the transfer path and of vLLM.
# ruff: noqa: SLF001

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from millpond.connector.connector import MillpondConnector
from millpond.transfer.copies import Direction
from millpond.transfer.streams import Lane

HOST, COPIES, COMPUTE = "host", "copies", "GPU"


@dataclass(frozen=True)
class Span:
    """Something that took from ``begin_s`` to ``end_s`` of ``time.perf_counter``."""

    track: str
    name: str
    begin_s: float
    end_s: float


class Tracer:
    """Hooks around the path of a request; what they add to it is some microseconds each."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._pairs: list[tuple[str, str, Any, Any]] = []
        self._begun: Any = None
        self._zero: tuple[float, Any] | None = None
        self._wrap(MillpondConnector, "get_num_new_matched_tokens", lambda *_: "lookup")
        self._wrap(MillpondConnector, "update_state_after_alloc", lambda *_: "allocation")
        self._wrap(MillpondConnector, "start_load_kv", _handing_over)
        self._wrap_forward()
        if torch.cuda.is_available():
            self._wrap_copies()

    def begin(self) -> None:
        """Forget what was noted; the engine is idle."""
        self._spans.clear()
        self._pairs.clear()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
            self._zero = time.perf_counter(), event

    def end(self) -> list[Span]:
        """Return what was noted since ``begin``."""
        if self._zero is None:
            return list(self._spans)
        zero_s, zero = self._zero
        torch.cuda.synchronize()
        on_gpu = [
            Span(
                track,
                name,
                zero_s + zero.elapsed_time(begin) / 1e3,
                zero_s + zero.elapsed_time(end) / 1e3,
            )
            for track, name, begin, end in self._pairs
        ]
        return [*self._spans, *on_gpu]

    def _wrap(self, owner: type, name: str, label: Callable[..., str | None]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def traced(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            what = label(*arguments)
            begin_s = time.perf_counter()
            result = original(*arguments, **options)
            if what is not None:
                self._spans.append(Span(HOST, what, begin_s, time.perf_counter()))
            return result

        setattr(owner, name, traced)

    def _wrap_forward(self) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self._wrap(GPUModelRunner, "sample_tokens", lambda *_: "sampling")
        original = GPUModelRunner.execute_model

        @functools.wraps(original)
        def traced(runner: Any, output: Any, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            if not output.total_num_scheduled_tokens:
                return original(runner, output, *arguments, **options)
            begin, begin_s = _event(torch.cuda.is_available()), time.perf_counter()
            result = original(runner, output, *arguments, **options)
            name = f"forward pass of {output.total_num_scheduled_tokens} tokens"
            self._spans.append(Span(HOST, f"{name}: launch", begin_s, time.perf_counter()))
            if begin is not None:
                self._pairs.append((COMPUTE, name, begin, _event(True)))  # noqa: FBT003
            return result

        GPUModelRunner.execute_model = traced

    def _wrap_copies(self) -> None:
        order_behind, mark_end = Lane._order_behind, Lane._mark_end

        def begun(lane: Any, submission: Any) -> None:  # noqa: ANN401
            order_behind(lane, submission)
            if submission.direction is Direction.LOAD:
                self._begun = _event_on(lane._stream._stream)

        def ended(lane: Any, submission: Any) -> Any:  # noqa: ANN401
            end = mark_end(lane, submission)
            if submission.direction is Direction.LOAD:
                name = f"load of {submission.copies.num_bytes / 1e9:.1f} GB"
                self._pairs.append((COPIES, name, self._begun, _event_on(lane._stream._stream)))
            return end

        Lane._order_behind = begun
        Lane._mark_end = ended


def _handing_over(connector: Any, *_: object) -> str | None:  # noqa: ANN401
    return "handing over" if connector._step().loads else None


def _event(is_wanted: bool) -> Any:  # noqa: ANN401, FBT001
    return _event_on(torch.cuda.current_stream()) if is_wanted else None


def _event_on(stream: Any) -> Any:  # noqa: ANN401
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
