"""Made periods: samples whose times a test decides."""

from collections.abc import Callable, Sequence

import numpy as np

from millpond.bench.effects import Effect
from millpond.bench.periods import plan_periods
from millpond.bench.records import Period, Plan, Sample
from millpond.bench.scenario import Design, Moved, Scenario
from millpond.bench.workloads import Role

PLANS = plan_periods(Design(rounds=1, aa_rounds=1), ["off", "millpond"])
SCENARIO = Scenario(name="s", description="d", workload=(Moved(name="g", lengths=(1,), prompts=1),))
Times = Callable[[Plan, int], float]
"""TTFT in milliseconds of prompt i in a period."""


def sample(number: int, ttft_ms: float | None, **fields: object) -> Sample:
    """Return one request of group ``g``; ``fields`` stand above the rest."""
    role: Role = "moved"
    given: dict[str, object] = {
        "key": f"g/{number}",
        "group": "g",
        "role": role,
        "unit": f"g/{number}",
        "turn": 0,
        "replica": "a",
        "request_id": f"r{number}",
        "input_tokens": 100,
        "start_ms": 1000.0 * number,
        "ttft_ms": ttft_ms,
        "e2el_ms": None if ttft_ms is None else ttft_ms + 30.0,
        "itl_ms": [10.0, 10.0, 10.0],
        "output_tokens": 4,
        "error": "lost" if ttft_ms is None else None,
    }
    return Sample(**(given | fields))  # pyright: ignore[reportArgumentType]


def period(plan: Plan, samples: Sequence[Sample]) -> Period:
    """Return a finished period of a minute."""
    return Period(
        plan=plan,
        started_at="2026-01-01T00:00:00+00:00",
        duration_s=60.0,
        is_complete=True,
        samples=list(samples),
        warm_up=[],
        traffic={},
    )


def periods(plans: Sequence[Plan], times: Times, *, num_prompts: int = 30) -> list[Period]:
    """Return finished periods of ``num_prompts`` requests each."""
    return [period(plan, [sample(i, times(plan, i)) for i in range(num_prompts)]) for plan in plans]


def noisy(times: Times, *, share: float, seed: int) -> Times:
    """Return ``times`` with a spread of that share, drawn anew for each value."""
    generator = np.random.default_rng(seed)
    return lambda plan, i: times(plan, i) * float(generator.lognormal(0.0, share))


def base_ms(i: int) -> float:
    """Prompts differ a hundredfold: only pairing sees an effect of a few percent."""
    return 10.0 * (1 + 10 * i)


def planted(ratio: float) -> Times:
    """Return times that the cache divides by ``ratio``."""
    return lambda plan, i: base_ms(i) / (ratio if plan.cache == "millpond" else 1.0)


def ttft(effects: list[Effect], part: str = "moved") -> Effect:
    """Return the one effect on TTFT."""
    (found,) = [each for each in effects if (each.part, each.metric) == (part, "ttft_ms")]
    return found
