"""The one JSON envelope: what ran, where, at which commit, and its data."""

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from millpond import __version__

_GIT_TIMEOUT_S: Final = 5.0
_SMI_TIMEOUT_S: Final = 20.0


def envelope(command: Sequence[str], data: Mapping[str, object]) -> dict[str, object]:
    """Return ``data`` with version, command, machine and commit around it."""
    return {
        "version": __version__,
        "command": " ".join(command),
        "machine": describe_machine(),
        "commit": commit(),
        "data": dict(data),
    }


def describe_machine() -> dict[str, object]:
    """Return what figures depend on, without a name that tells whose machine it is."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Return the commit of the checkout this runs from, with a plus if changed; None if none."""
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gpus() -> list[str]:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ["unknown GPU"]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
