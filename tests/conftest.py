"""What all tests share: markers by folder, and a loud count of what needs a GPU."""

import signal
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MARKED_FOLDERS = ("e2e", "faults", "gpu")
"""Tests in these folders carry the marker of the folder's name without saying so."""

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def num_gpus() -> int:
    """Return how many CUDA devices there are, without importing torch."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without_gpu = pytest.mark.skip(reason="needs a CUDA device and there is none")
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if item.get_closest_marker("gpu") is not None and num_gpus() == 0:
            item.add_marker(without_gpu)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if "gpu" in report.keywords
    ]
    if skipped:
        terminalreporter.write_sep(
            "=", f"GPU: {len(skipped)} tests NOT RUN, there is no CUDA device", yellow=True
        )
