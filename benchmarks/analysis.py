"""How long the figures of a run of a known size take: `python benchmarks/analysis.py`.

The samples are made: eight periods of a trace with as many requests each. The time is that of
what `millpond bench report` does, without reading and writing files.
"""

import argparse
import json
import time

import numpy as np

from millpond.bench.analysis import analyse
from millpond.bench.periods import plan_periods
from millpond.bench.records import Period, Sample
from millpond.bench.scenario import Design

NUM_TOKENS = 8
SIZES = (1_536, 44_800)


def periods(num_samples: int) -> list[Period]:
    """Return A/A and OFF-ON-ON-OFF, with that many samples in all."""
    generator = np.random.default_rng(1)
    plans = plan_periods(Design(rounds=1, aa_rounds=1), ["off", "millpond"])
    found: list[Period] = []
    for plan in plans:
        gain = 0.6 if plan.cache == "millpond" else 1.0
        num = num_samples // len(plans)
        ttfts = gain * 50 * generator.lognormal(0, 0.5, num)
        gaps = 10 * generator.lognormal(0, 0.2, (num, NUM_TOKENS - 1))
        samples = [
            Sample(
                key=f"replay/{i}/0",
                group="replay",
                role="any",
                unit=f"replay/{i}",
                turn=0,
                replica="ab"[i % 2],
                request_id=f"r{i}",
                input_tokens=1000,
                start_ms=50.0 * i,
                ttft_ms=float(ttfts[i]),
                e2el_ms=float(ttfts[i] + gaps[i].sum()),
                itl_ms=gaps[i].tolist(),
                output_tokens=NUM_TOKENS,
            )
            for i in range(num)
        ]
        found.append(
            Period(
                plan=plan,
                started_at="2026-01-01T00:00:00+00:00",
                duration_s=0.05 * num,
                is_complete=True,
                samples=samples,
                warm_up=[],
                traffic={},
            )
        )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, nargs="+", default=SIZES)
    figures: dict[str, float] = {}
    for num_samples in parser.parse_args().samples:
        made = periods(num_samples)
        started_s = time.perf_counter()
        analyse(made)
        figures[f"analysis_{num_samples}_samples_s"] = round(time.perf_counter() - started_s, 2)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
