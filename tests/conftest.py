"""What all tests share: markers by folder, and a loud count of what needs a GPU or a browser."""

import os
import shutil
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


def chromium() -> str | None:
    """Return a browser that Playwright can drive: its own, else the system's; None without one."""
    place = os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or "~/.cache/ms-playwright"
    programs = ("chrome", "chrome-headless-shell", "headless_shell")
    files = sorted(Path(place).expanduser().glob("chromium*/chrome*/*"), reverse=True)
    own = [path for path in files if path.name in programs]
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = [str(path) for path in own if path.is_file() and os.access(path, os.X_OK)]
    found += filter(None, map(shutil.which, names))
    return next(iter(found), None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without_gpu = pytest.mark.skip(reason="needs a CUDA device and there is none")
    without_browser = pytest.mark.skip(reason="needs Chromium and there is none")
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)
        if item.get_closest_marker("gpu") is not None and num_gpus() == 0:
            item.add_marker(without_gpu)
        if item.get_closest_marker("browser") is not None and chromium() is None:
            item.add_marker(without_browser)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    for marker, why in (("gpu", "there is no CUDA device"), ("browser", "there is no Chromium")):
        num_skipped = sum(marker in report.keywords for report in skipped)
        if num_skipped:
            terminalreporter.write_sep(
                "=", f"{marker.upper()}: {num_skipped} tests NOT RUN, {why}", yellow=True
            )
