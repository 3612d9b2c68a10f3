"""The router of a system: its command, its address, and when it is ready."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from millpond.launch.process import GuardedProcess, ProcessSpec
from millpond.model.errors import ExpectedError
from millpond.router.client import RouterClient

ACCESS_LOG: Final = "router.jsonl"
_HEALTH_TIMEOUT_S: Final = 2.0
_PAGE: Final = "/millpond"
_STOP_MARGIN_S: Final = 7.0
"""Beyond the router's own grace, which counts whole seconds: what it does after its last stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontOptions:
    """A router in front of all replicas of a system.

    ``port`` None takes a free one. ``access_log`` None is ACCESS_LOG beside the other logs.
    Settings that are not here it reads as `millpond router` does: from the environment that
    it is started in, and the file that is named there.
    """

    policy: str
    admin_socket: Path
    host: str = "127.0.0.1"
    port: int | None = None
    access_log: Path | None = None
    stop_grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Front:
    """A started router: the one address of its replicas."""

    url: str
    admin_socket: Path
    access_log: Path
    process: GuardedProcess

    @property
    def api_url(self) -> str:
        """What clients of OpenAI's interface take as their base URL."""
        return f"{self.url}/v1"

    @property
    def page_url(self) -> str:
        """The live page, for people."""
        return f"{self.url}{_PAGE}"

    def is_ready(self) -> bool:
        """Return whether it gives requests to all of its replicas; waits some seconds at most."""
        try:
            with RouterClient(self.admin_socket) as client:
                if any(each["state"] != "ready" for each in client.replicas()):
                    return False
            answer = httpx.get(f"{self.url}/health", timeout=_HEALTH_TIMEOUT_S, trust_env=False)
        except (ExpectedError, httpx.TransportError):
            return False
        return answer.is_success


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontSpec:
    """What a system adds to the options: ``replicas`` are addresses by name."""

    options: FrontOptions
    port: int
    replicas: Mapping[str, str]
    pool_socket: Path
    run_dir: Path
    environ: Mapping[str, str]

    @property
    def access_log(self) -> Path:
        """Where requests are logged."""
        return self.options.access_log or self.run_dir / ACCESS_LOG


def start_front(spec: FrontSpec) -> Front:
    """Start a router."""
    options = spec.options
    process = GuardedProcess(
        ProcessSpec(
            name="router",
            argv=front_argv(spec),
            environ=spec.environ,
            log_file=spec.run_dir / "router.log",
            grace_s=options.stop_grace_s + _STOP_MARGIN_S,
        )
    )
    host = f"[{options.host}]" if ":" in options.host else options.host
    return Front(f"http://{host}:{spec.port}", options.admin_socket, spec.access_log, process)


def front_argv(spec: FrontSpec) -> tuple[str, ...]:
    """Return the command of a router."""
    options = spec.options
    argv = [sys.executable, "-m", "millpond.cli", "router"]
    argv += ["--host", options.host, "--port", str(spec.port), "--policy", options.policy]
    argv += ["--pool-socket", str(spec.pool_socket), "--admin-socket", str(options.admin_socket)]
    argv += ["--access-log", str(spec.access_log), "--stop-grace", str(options.stop_grace_s)]
    for name, url in spec.replicas.items():
        argv += ["--replica", f"{name}={url}"]
    return tuple(argv)
