"""Sending a workload: each request at its time, whatever becomes of the others.

A request with an arrival time is sent then; one that follows another is sent a while after its
end. How late each was is recorded: the harness can be a bottleneck too.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from millpond.bench.client import Answer, Target, request_body
from millpond.bench.records import Sample
from millpond.bench.workloads import Request, token_ids

_NS_PER_S: Final = 1_000_000_000
_NS_PER_MS: Final = 1e6


class Asks(Protocol):
    """Asks one endpoint; a failure is part of the answer."""

    async def ask(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Return the answer to ``body`` of the endpoint at ``url``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How to send: to the ``targets``, under ids that begin with ``id_prefix``.

    ``on_sample`` gets each sample as soon as its answer has ended; its times count from
    ``zero_ns`` of ``time.perf_counter_ns``.
    """

    targets: Sequence[Target]
    id_prefix: str
    zero_ns: int
    on_sample: Callable[[Sample], None]

    def target_of(self, request: Request) -> Target:
        """Return where a request goes."""
        return self.targets[request.replica % len(self.targets)]


async def drive(requests: Sequence[Request], client: Asks, sending: Sending) -> None:
    """Send all requests and return when all answers have ended.

    All bodies are made first, about 5 bytes for each token of a prompt: making a long one
    takes milliseconds, in which no arriving token would be seen. ``ValueError`` for a request
    that follows one that is not among those before it.
    """
    loop = asyncio.get_running_loop()
    ends: dict[str, asyncio.Future[int]] = {}
    waiting: list[_One] = []
    for i, request in enumerate(requests):
        if request.after is not None and request.after not in ends:
            raise ValueError(f"{request.key} follows {request.after!r}, which is not before it")
        model = sending.target_of(request).model
        one = _One(
            request=request,
            request_id=f"{sending.id_prefix}-{i}",
            body=request_body(model, token_ids(request.pieces), request.output_tokens),
            before=None if request.after is None else ends[request.after],
            end=loop.create_future(),
        )
        ends[request.key] = one.end
        waiting.append(one)
    begin_ns = time.perf_counter_ns()
    async with asyncio.TaskGroup() as group:
        for one in waiting:
            group.create_task(_send(one, begin_ns, client, sending))


@dataclass(frozen=True, slots=True)
class _One:
    """One request on its way. ``before`` and ``end`` hold when answers ended."""

    request: Request
    request_id: str
    body: bytes
    before: asyncio.Future[int] | None
    end: asyncio.Future[int]


async def _send(one: _One, begin_ns: int, client: Asks, sending: Sending) -> None:
    request = one.request
    target = sending.target_of(request)
    headers = {"X-Request-Id": one.request_id, "X-Session-Id": request.unit}
    due_ns = await _due(one, begin_ns)
    remaining_ns = due_ns - time.perf_counter_ns()
    if remaining_ns > 0:
        await asyncio.sleep(remaining_ns / _NS_PER_S)
    answer = await client.ask(target.url, one.body, headers)
    one.end.set_result(time.perf_counter_ns())
    sample = _sample(one, answer, target)
    sample.start_ms = (answer.started_ns - sending.zero_ns) / _NS_PER_MS
    sample.late_ms = (answer.started_ns - due_ns) / _NS_PER_MS
    sending.on_sample(sample)


async def _due(one: _One, begin_ns: int) -> int:
    request = one.request
    due_ns = begin_ns + int((request.arrival_s or 0.0) * _NS_PER_S)
    if one.before is None:
        return due_ns
    return max(due_ns, await one.before + int(request.wait_s * _NS_PER_S))


def _sample(one: _One, answer: Answer, target: Target) -> Sample:
    request = one.request
    return Sample(
        key=request.key,
        group=request.group,
        role=request.role,
        unit=request.unit,
        turn=request.turn,
        replica=answer.replica or target.name,
        request_id=one.request_id,
        input_tokens=request.num_tokens,
        start_ms=0.0,
        ttft_ms=answer.ttft_ms,
        e2el_ms=answer.e2el_ms,
        itl_ms=answer.itl_ms,
        output_tokens=answer.num_tokens,
        cached_tokens=answer.cached_tokens,
        error=answer.error,
    )
