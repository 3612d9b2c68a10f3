"""Periods: a round is OFF-ON-ON-OFF, so that a steady drift cancels out.

Several caches share a round's OFF periods: OFF-X-Y-Y-X-OFF. Each cache's two periods lie as far
from the round's middle on one side as on the other, like the two that are OFF.

Before each period caches are switched and everything is flushed; then come the warm-up, kept
apart, another flush, and the workloads one after the other. All periods of a round send the
same prompts; each round has its own.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from millpond.bench.books import since
from millpond.bench.client import Client
from millpond.bench.driving import Sending, drive
from millpond.bench.records import Period, Plan, Sample, write_json
from millpond.bench.scenario import Design, Scenario
from millpond.bench.stages import Scene, Stage
from millpond.bench.workloads import Request, requests_of
from millpond.model.errors import ConfigError, ExpectedError

_SHARE_TOLD_MIN: Final = 0.1


def plan_periods(design: Design, caches: Sequence[str]) -> list[Plan]:
    """Return all periods in order: A/A rounds first, then those that compare all caches.

    The first cache is the base that the others are compared with; alone it has A/A rounds only.
    """
    base, *rest = caches
    others = tuple(rest)
    rounds = [(base,)] * design.aa_rounds + [others] * (design.rounds if others else 0)
    plans: list[Plan] = []
    for number, compared in enumerate(rounds):
        half = (base, *compared)
        for position, cache in enumerate((*half, *reversed(half))):
            plans.append(
                Plan(
                    number=len(plans),
                    base=base,
                    others=compared,
                    round=number,
                    position=position,
                    cache=cache,
                )
            )
    return plans


@dataclass(frozen=True, slots=True)
class Doing:
    """What a run is doing. ``left_s`` is None while nothing is known about it."""

    plan: Plan
    num_periods: int
    what: str
    num_sent: int
    num_requests: int
    left_s: float | None


@dataclass(slots=True)
class Runner:
    """Runs periods and keeps each finished one as a file below ``folder``.

    ``periods`` holds what is done at any time, also after an error or Ctrl-C: the period that
    was interrupted is there with what had been answered, marked as incomplete.
    """

    scenario: Scenario
    num_replicas: int
    folder: Path
    run_id: str
    on_progress: Callable[[Doing], None]
    periods: list[Period] = field(default_factory=list[Period])

    def resume(self, plans: Sequence[Plan]) -> None:
        """Take over the finished periods of an earlier run; raises ``ConfigError``."""
        for plan in plans:
            path = self._file(plan)
            if not path.exists():
                continue
            try:
                period = msgspec.json.decode(path.read_bytes(), type=Period)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path} can't be read: {error}; remove it") from error
            if period.plan != plan:
                raise ConfigError(f"{path} is of another run: give another --out")
            self.periods.append(period)

    def run(self, plans: Sequence[Plan], stage: Stage) -> None:
        """Run all periods that are not done yet."""
        waiting = self.waiting(plans)
        progress = _Progress(self.on_progress, len(plans), len(waiting))
        for plan in waiting:
            requests = self.requests(plan)
            progress.begin(plan, sum(map(len, requests)))
            with stage.scene(plan.cache, plan.number) as scene:
                self._run_one(plan, scene, requests, progress)

    def waiting(self, plans: Sequence[Plan]) -> list[Plan]:
        """Return the plans that are not done yet."""
        done = {period.plan.number for period in self.periods}
        return [plan for plan in plans if plan.number not in done]

    def requests(self, plan: Plan) -> list[list[Request]]:
        """Return the requests of a period, by workload."""
        return self._requests(f"{self.scenario.seed}/round-{plan.round}")

    def _requests(self, seed: str) -> list[list[Request]]:
        return [
            requests_of(workload, seed=seed, num_replicas=self.num_replicas)
            for workload in self.scenario.workload
        ]

    def _run_one(
        self, plan: Plan, scene: Scene, requests: Sequence[list[Request]], progress: "_Progress"
    ) -> None:
        period = Period(
            plan=plan,
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            duration_s=0.0,
            is_complete=False,
            samples=[],
            warm_up=[],
            traffic={},
        )
        num_warm = self.scenario.design.warm_up
        progress.show("settling")
        time.sleep(self.scenario.design.settle_s)
        progress.show("warming up")
        warm_up = [some[:num_warm] for some in self._requests(f"{self.scenario.seed}/warm-up")]
        asyncio.run(self._send(warm_up, scene, period.warm_up.append, f"{plan.number}-warm"))
        _check_some_answered(period.warm_up)
        scene.flush()
        before = {} if scene.books is None else scene.books.traffic()
        self.periods.append(period)
        started_s = time.perf_counter()

        def add(sample: Sample) -> None:
            period.samples.append(sample)
            progress.show("measuring", num_sent=len(period.samples))

        try:
            asyncio.run(self._send(requests, scene, add, str(plan.number)))
        finally:
            period.duration_s = time.perf_counter() - started_s
        if scene.books is not None:
            scene.books.wait_written()
            scene.books.attribute(period.samples)
            period.traffic = since(before, scene.books.traffic())
        if scene.router_log is not None:
            scene.router_log.attribute(period.samples)
        period.is_complete = True
        write_json(self._file(plan), period)

    async def _send(
        self,
        requests: Sequence[list[Request]],
        scene: Scene,
        on_sample: Callable[[Sample], None],
        name: str,
    ) -> None:
        """Send workload after workload."""
        zero_ns = time.perf_counter_ns()
        async with Client(timeout_s=self.scenario.design.request_timeout_s) as client:
            for i, some in enumerate(requests):
                sending = Sending(
                    targets=scene.targets,
                    id_prefix=f"bench-{self.run_id}-{name}-{i}",
                    zero_ns=zero_ns,
                    on_sample=on_sample,
                )
                await drive(some, client, sending)

    def _file(self, plan: Plan) -> Path:
        return self.folder / f"period-{plan.number:03}.json"


def _check_some_answered(warm_up: Sequence[Sample]) -> None:
    errors = [sample.error for sample in warm_up if sample.error is not None]
    if errors and len(errors) == len(warm_up):
        raise ExpectedError(f"no request of the warm-up was answered; the first one: {errors[0]}")


@dataclass(slots=True)
class _Progress:
    """Shows how far a run is; assumes that periods to come are like those before."""

    on_progress: Callable[[Doing], None]
    num_periods: int
    num_waiting: int
    plan: Plan | None = None
    num_requests: int = 0
    begun_s: list[float] = field(default_factory=list[float])
    measuring_s: float = 0.0

    def begin(self, plan: Plan, num_requests: int) -> None:
        """Go on to the next period."""
        self.plan, self.num_requests = plan, num_requests
        self.begun_s.append(time.monotonic())
        self.show("starting")

    def show(self, what: str, *, num_sent: int = 0) -> None:
        """Tell what is going on in this period."""
        if self.plan is None:
            raise ValueError("show() before begin()")
        if num_sent == 0:
            self.measuring_s = time.monotonic()
        self.on_progress(
            Doing(
                self.plan,
                self.num_periods,
                what,
                num_sent,
                self.num_requests,
                self._left_s(num_sent / max(1, self.num_requests)),
            )
        )

    def _left_s(self, share: float) -> float | None:
        """Return the time left by the periods before, or by this one once a tenth is done."""
        now_s, begun_s = time.monotonic(), self.begun_s[-1]
        if len(self.begun_s) > 1:
            period_s = (begun_s - self.begun_s[0]) / (len(self.begun_s) - 1)
        elif share >= _SHARE_TOLD_MIN:
            period_s = (self.measuring_s - begun_s) + (now_s - self.measuring_s) / share
        else:
            return None
        left_s = max(0.0, period_s - (now_s - begun_s))
        return left_s + period_s * (self.num_waiting - len(self.begun_s))
