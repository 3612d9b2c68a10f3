"""Run the measurements of benchmarks/ and write report/bench.json; `make bench`.

Arguments go to benchmarks/lookup.py: `make bench ARGS="--keys 1000000 --clients 8"`. Without
any, a pool of 320 MiB holds 65,536 keys and one client asks.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

from rich.console import Console
from rich.table import Table

from millpond.cli.envelope import envelope

LOOKUP = Path("benchmarks/lookup.py")
REPORT = Path("report/bench.json")
TIMEOUT_S = 600.0
PREFIXES = {
    "hit": "lookup_1024_keys",
    "half": "lookup_1024_keys_half_hit",
    "miss": "lookup_1024_keys_miss",
    "echo": "echo_of_as_many_bytes",
}


def main() -> int:
    """Measure, store and show; return the exit status."""
    arguments = sys.argv[1:] or ["--keys", "65536"]
    done = subprocess.run(
        [sys.executable, LOOKUP, *arguments],
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        return done.returncode
    data = flat(cast("dict[str, object]", json.loads(done.stdout.splitlines()[-1])))
    document = envelope(["make", "bench", *arguments], data)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document, data)
    return 0


def flat(result: dict[str, object]) -> dict[str, object]:
    """Return the figures under names that stand by themselves."""
    figures: dict[str, object] = {}
    for name, value in result.items():
        if isinstance(value, dict):
            prefix = PREFIXES[name]
            for figure, number in cast("dict[str, object]", value).items():
                figures[f"{prefix}_{figure}"] = number
        else:
            figures[name] = value
    return figures


def show(document: dict[str, object], data: dict[str, object]) -> None:
    """Print the figures with the machine and the commit that they hold for."""
    table = Table(title=f"commit {document['commit']}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in data.items():
        table.add_row(name, f"{value:,}" if isinstance(value, int | float) else str(value))
    console = Console(soft_wrap=True)
    console.print(table)
    console.print(document["machine"])
    console.print(f"written to {REPORT}")


if __name__ == "__main__":
    sys.exit(main())
