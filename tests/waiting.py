"""Waiting in tests: for a condition, and never for a time."""

import threading
import time
from collections.abc import Callable


def eventually(condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
    """Wait until ``condition`` holds, asking often; fail with ``what`` when it is late."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        pause.wait(0.01)
