"""Run the measurements of benchmarks/ and write report/bench.json; `make bench`.

    python scripts/bench.py [--quick] [--only lookup_1 leases copies router replicas …]

Each measurement is a script that can be run alone and compares with something that it
measures in the same run. A figure of a script that failed is missing, and the status is 1.
`--quick` is for seeing that everything runs: fewer keys, rounds and pairs. What --only leaves
out is left out of the file too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from millpond.cli.envelope import envelope

FOLDER = Path("benchmarks")
REPORT = Path("report/bench.json")
TIMEOUT_S = 900.0
STOP_S = 60.0

LOOKUP_NAMES = {
    "hit": "lookup_1024_keys",
    "half": "lookup_1024_keys_half_hit",
    "miss": "lookup_1024_keys_miss",
    "echo": "lookup_echo_of_as_many_bytes",
}
TARGETS = {
    "moved_vs_cold_ratio": (">=", 20.0),
    "moved_vs_local_ratio": ("<=", 1.25),
    "cold_on_vs_off_ratio": ("<=", 1.03),
    "lookup_1024_keys_p50_us": ("<=", 150.0),
    "copy_vs_memcpy_ratio": (">=", 0.9),
    "index_mb_per_million_blocks": ("<=", 400.0),
    "router_ttft_16_overhead_ms": ("<=", 2.0),
    "router_throughput_ratio": (">=", 0.95),
    "analysis_1536_samples_s": ("<=", 3.0),
    "analysis_44800_samples_s": ("<=", 30.0),
}

Figures = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One script with its arguments. ``suffix`` ends the names of its figures."""

    name: str
    script: str
    full: tuple[str, ...]
    quick: tuple[str, ...]
    suffix: str = ""


MEASUREMENTS = (
    Measurement("lookup_1", "lookup.py", (), ("--keys", "65536", "--seconds", "2")),
    Measurement(
        "lookup_8",
        "lookup.py",
        ("--clients", "8"),
        ("--keys", "65536", "--seconds", "2", "--clients", "8"),
        suffix="_8_clients",
    ),
    Measurement("leases", "leases.py", (), ("--rounds", "3", "--seconds", "0.2")),
    Measurement("copies", "copies.py", (), ("--mib", "64", "--rounds", "3")),
    Measurement("checksums", "checksums.py", (), ("--mib", "64", "--rounds", "3")),
    Measurement("router", "router.py", (), ("--rounds", "1", "--seconds", "1")),
    Measurement("identity", "identity.py", (), ("--rounds", "1")),
    Measurement("analysis", "analysis.py", (), ("--samples", "800")),
    Measurement("replicas", "replicas.py", (), ("--rounds", "1", "--pairs", "4")),
)


def main() -> int:
    """Measure, store and show; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer keys, rounds and pairs")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in MEASUREMENTS])
    asked = parser.parse_args()
    wanted = [each for each in MEASUREMENTS if asked.only is None or each.name in asked.only]
    load_before = os.getloadavg()[0]
    results: dict[str, Figures] = {}
    for each in wanted:
        found = run(each, is_quick=asked.quick)
        if found is not None:
            results[each.name] = found
    data = merge(results)
    data |= {"is_quick": asked.quick, "load_average_before": round(load_before, 2)}
    failed = [each.name for each in wanted if each.name not in results]
    document = envelope(["make", "bench", *(["QUICK=1"] if asked.quick else [])], data)
    document |= {"failed": failed}
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document, data)
    for name in failed:
        print(f"{name} failed: its figures are missing", file=sys.stderr)
    return 1 if failed else 0


def run(measurement: Measurement, *, is_quick: bool) -> Figures | None:
    """Run one script; return what its last line says, or None if it failed."""
    arguments = measurement.quick if is_quick else measurement.full
    script = FOLDER / measurement.script
    print(f"== {script} {' '.join(arguments)}", file=sys.stderr, flush=True)
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, script, *arguments], stdout=subprocess.PIPE)
    output = b""
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    finally:
        # After Ctrl-C as well, which the script has heard of itself: it ends what it started.
        _wait_ended(process)
    print(f"   {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if process.returncode:
        return None
    return cast("Figures", json.loads(output.splitlines()[-1]))


def _wait_ended(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# ---------------------------------------------------------------- from results to figures


def merge(results: Mapping[str, Figures]) -> dict[str, object]:
    """Return the figures of all measurements, by names that stand by themselves.

    ``ValueError`` where two measurements have a figure of the same name.
    """
    data: dict[str, object] = {}
    for each in MEASUREMENTS:
        if each.name not in results:
            continue
        found = results[each.name]
        figures = lookup_figures(found, each.suffix) if each.script == "lookup.py" else found
        if both := data.keys() & figures.keys():
            raise ValueError(f"{each.name}: {sorted(both)} was measured twice")
        data |= figures
    return data


def lookup_figures(found: Figures, suffix: str) -> dict[str, object]:
    """Return the figures of one run of lookup.py; the memory is that of the first."""
    figures: dict[str, object] = {}
    for case, name in LOOKUP_NAMES.items():
        for figure, value in cast("Figures", found[case]).items():
            # The unit stays last: lookup_1024_keys_8_clients_p99_us.
            figures[f"{name}{suffix}_{figure}"] = value
    figures[f"lookup_hit_vs_echo_ratio{suffix}"] = found["hit_to_echo_ratio"]
    figures[f"lookup_num_each{suffix}"] = found["num_lookups_each"]
    if not suffix:
        num_keys = cast("int", found["num_keys"])
        figures["lookup_num_keys"] = num_keys
        figures["index_mb_per_million_blocks"] = index_mb_per_million(
            cast("int", found["daemon_empty_rss_bytes"]),
            cast("int", found["daemon_rss_bytes"]),
            num_keys,
        )
    return figures


def index_mb_per_million(empty_bytes: int, full_bytes: int, num_keys: int) -> float:
    """Return the daemon's memory in MB when it holds a million keys.

    What it needs without any key is counted once, not scaled.
    """
    return round((empty_bytes + (full_bytes - empty_bytes) * 1e6 / num_keys) / 1e6, 1)


def verdict(name: str, value: object) -> str:
    """Return the target of a figure and whether it is met; nothing for one without."""
    if name not in TARGETS or not isinstance(value, int | float):
        return ""
    comparison, bound = TARGETS[name]
    is_met = value >= bound if comparison == ">=" else value <= bound
    return f"{comparison} {bound:g} {'met' if is_met else 'MISSED'}"


def show(document: Figures, data: Figures) -> None:
    """Print the figures with the machine and the commit that they hold for."""
    table = Table("figure", title=f"commit {document['commit']}")
    table.add_column("value", justify="right")
    table.add_column("target")
    for name, value in ordered(data):
        shown = f"{value:,}" if isinstance(value, int | float) else str(value)
        table.add_row(name, shown, verdict(name, value))
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(document["machine"])
    console.print(f"written to {REPORT}")


def ordered(data: Figures) -> Sequence[tuple[str, object]]:
    """Return those with a target first, in the order of the targets."""
    targeted = [(name, data[name]) for name in TARGETS if name in data]
    return [*targeted, *((name, value) for name, value in data.items() if name not in TARGETS)]


if __name__ == "__main__":
    sys.exit(main())
