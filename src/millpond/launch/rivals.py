"""Other caches that replicas can share, to be measured beside Millpond's pool.

    lmcache   LMCache's multiprocess server, one for all replicas, which join it by vLLM's
              LMCacheMPConnector. It copies pages from and to their GPUs itself, by CUDA IPC.
    vllm-fs   vLLM's own tiering: pages go to host memory of the replica, and from there to
              files of one folder, where the other replicas find them.

Both are set up as their own documentation says: https://docs.lmcache.ai (multiprocess mode,
recipes) and vLLM's guide to KV offloading.
"""

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import httpx

from millpond.launch.resources import pick_ports, visible_gpus
from millpond.model.errors import SetupError
from millpond.model.limits import GIB

RivalName = Literal["lmcache", "vllm-fs"]
LMCACHE: Final[RivalName] = "lmcache"
VLLM_FS: Final[RivalName] = "vllm-fs"
RIVALS: Final[tuple[RivalName, ...]] = (LMCACHE, VLLM_FS)
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - it is meant

_HEALTH_TIMEOUT_S: Final = 2.0
_CHUNK_TOKENS: Final = 256
"""What is kept together: LMCache's default, and as many tokens as a block of Millpond has."""
_EQUAL_HASHES: Final = {"PYTHONHASHSEED": "0"}
"""Without it every process begins its hashes of prefixes with random bytes of its own."""
_NO_TELEMETRY: Final = {"LMCACHE_TRACK_USAGE": "false"}
_NEEDS_GPU: Final[Mapping[RivalName, str]] = {
    LMCACHE: "LMCache's server copies pages by CUDA IPC",
    VLLM_FS: "vLLM's OffloadingConnector does not start with its CPU engine",
}
_NEEDED_FILES: Final[Mapping[RivalName, Sequence[tuple[str, str, str]]]] = {
    LMCACHE: (
        ("lmcache", "v1/multiprocess/http_server.py", "a multiprocess server"),
        (
            "vllm",
            "distributed/kv_transfer/kv_connector/v1/lmcache_mp_connector.py",
            "an LMCacheMPConnector",
        ),
    ),
    VLLM_FS: (
        (
            "vllm",
            "v1/kv_offload/tiering/fs/manager.py",
            "a TieringOffloadingSpec with a file-system tier",
        ),
    ),
}
"""Package, a file that only versions with the feature have, and the feature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalOptions:
    """Which other cache, and how large.

    ``size_bytes`` is host memory: of LMCache's server, or of all replicas together for vllm-fs,
    whose files come on top and have no limit. ``hybrid_block_tokens`` is the size of vLLM's
    blocks where the model has recurrent layers, and None where it has attention alone.
    ``files_in`` is where vllm-fs makes its folder.
    """

    name: RivalName
    size_bytes: int
    hybrid_block_tokens: int | None = None
    files_in: Path = SHARED_MEMORY


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What one replica is started with to take part in a cache.

    ``transfer`` is its --kv-transfer-config. ``engine_args`` come after all others, so they
    count. ``leftovers``, whose names may be patterns, are removed when it has ended, whichever way.
    """

    transfer: Mapping[str, object]
    engine_args: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    leftovers: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Lmcache:
    """LMCache's server: it listens to replicas at ``port`` and to us at ``http_port``."""

    options: RivalOptions
    num_replicas: int
    port: int
    http_port: int

    @property
    def url(self) -> str:
        """Where it is asked how it is, and told to forget."""
        return f"http://127.0.0.1:{self.http_port}"

    def membership(self, replica: str) -> Membership:  # noqa: ARG002 - as VllmFs has it
        """Return what a replica needs; it is the same for all."""
        block = self.options.hybrid_block_tokens
        # A state is there at the end of a step only, and LMCache wants one for every block: its
        # recipe for hybrids has steps of one block, which are those below two.
        one_block_a_step = () if block is None else ("--max-num-batched-tokens", f"{2 * block - 1}")
        return Membership(
            transfer={
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": self.port,
                },
            },
            engine_args=() if block is None else ("--mamba-cache-mode", "align", *one_block_a_step),
            environ=_EQUAL_HASHES | _NO_TELEMETRY,
        )

    def server_argv(self, python: Path) -> tuple[str, ...]:
        """Return the command of the server."""
        argv = [str(python), "-m", "lmcache.v1.multiprocess.http_server"]
        argv += ["--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--http-host", "127.0.0.1", "--http-port", str(self.http_port)]
        argv += ["--l1-size-gb", f"{self.options.size_bytes / GIB:g}", "--eviction-policy", "LRU"]
        argv += ["--max-workers", str(self.num_replicas)]  # one copies for each replica
        argv += ["--shm-name", ""]  # for engines without CUDA, and would outlive a killed server
        block = self.options.hybrid_block_tokens
        argv += ["--chunk-size", str(block or _CHUNK_TOKENS)]
        return (*argv, *(() if block is None else ("--separate-object-groups",)))

    def server_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the server, which sees the GPUs of all replicas."""
        # Replicas may share a GPU, which is then named twice; CUDA sees none in such a list.
        gpus = ",".join(dict.fromkeys(visible_gpus(environ)))
        return {**environ, **_EQUAL_HASHES, **_NO_TELEMETRY, "CUDA_VISIBLE_DEVICES": gpus}

    def is_ready(self) -> bool:
        """Return whether replicas can join; waits some seconds at most."""
        try:
            answer = httpx.get(
                f"{self.url}/healthcheck", timeout=_HEALTH_TIMEOUT_S, trust_env=False
            )
        except httpx.TransportError:
            return False
        return answer.is_success


@dataclass(frozen=True, slots=True)
class VllmFs:
    """vLLM's tiering over ``files``, a folder of this system's own."""

    options: RivalOptions
    num_replicas: int
    files: Path

    def membership(self, replica: str) -> Membership:
        """Return what a replica needs."""
        engine_id = f"{self.files.name}-{replica}"
        extra: dict[str, object] = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": self.options.size_bytes // self.num_replicas,
            "secondary_tiers": [{"type": "fs", "root_dir": str(self.files)}],
        }
        if self.options.hybrid_block_tokens is None:
            extra["block_size"] = _CHUNK_TOKENS  # else a file for every 16 tokens
        return Membership(
            transfer={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "engine_id": engine_id,
                "kv_connector_extra_config": extra,
            },
            environ=_EQUAL_HASHES,
            # Beside the files: the replica's own tier, or that of each of its engines, which
            # killed ones leave behind.
            leftovers=(
                self.files,
                SHARED_MEMORY / f"vllm_offload_{engine_id}.mmap",
                SHARED_MEMORY / f"vllm_offload_{engine_id}_dp*.mmap",
            ),
        )


Rival = Lmcache | VllmFs


def make_rival(options: RivalOptions, num_replicas: int, *, without: Collection[int] = ()) -> Rival:
    """Return the cache for a system that is about to start; nothing is started or created.

    ``without`` are ports that are about to be taken.
    """
    if options.name == LMCACHE:
        return Lmcache(options, num_replicas, *pick_ports(2, None, without=without))
    return VllmFs(options, num_replicas, options.files_in / f"millpond-{uuid.uuid4().hex[:12]}")


def check_rival(options: RivalOptions, device: str) -> None:
    """Raise ``SetupError`` where this cache can't run here, with the reason and what to do."""
    name = options.name
    if device != "cuda":
        raise SetupError(
            f"cache {name} needs a GPU, and the replicas here would run on the {device}: "
            f"{_NEEDS_GPU[name]}; leave {name} out of --caches, or run this where there is one"
        )
    for package, file, feature in _NEEDED_FILES[name]:
        folder = _folder_of(package)
        if folder is None:
            raise SetupError(
                f"cache {name} needs {package}, which is not installed for {sys.executable}: "
                f"`pip install {package}` there, or leave {name} out of --caches"
            )
        if not (folder / file).is_file():
            raise SetupError(
                f"cache {name} needs {feature}, and {package} {_version(package)} has none: "
                f"upgrade it, or leave {name} out of --caches"
            )
    if name == VLLM_FS:
        _check_folder(options.files_in)


def _check_folder(folder: Path) -> None:
    """Try what vLLM's tier does: without O_DIRECT it would fail at each file, and go on."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="millpond-") as probe:
            os.close(os.open(probe.name, os.O_RDWR | os.O_DIRECT))
    except OSError as error:
        raise SetupError(
            f"cache {VLLM_FS} can't keep files in {folder} ({error.strerror}): give another "
            "--files-in, on a file system where O_DIRECT is possible (tmpfs from Linux 6.6 on)"
        ) from error


def _folder_of(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(of an unknown version)"
