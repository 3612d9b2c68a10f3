"""Systems of real engines for tests, one alive at a time, and what tests ask of them.

    shared      a, b  hybrid: gated delta net and attention     blocks of 256
                c, d  sliding windows and attention             blocks of 128    one pool for all
    attention   a, b  full attention, adapters x and y          blocks of 64
                c     the same model in float32                 blocks of 128
    guarded     a, b  hybrid, every page summed and compared
    gated       a, b  hybrid, little memory, copies held back by tests; b waits for a; a router
    parallel    a     hybrid on two ranks, copies held back by tests
    telling     a, b  hybrid, publish what their caches hold
                c     sliding windows and attention, little memory, too
                d     attention, little memory, adapter x, too
    older       a, b  hybrid on vLLM 0.27.1, publish what their caches hold
    as_026      a, b  the same, with the local lookup of 0.26 (engine_026.py)

A system starts when a test first asks for it and ends when a test asks for another one.
"""

import json
import mmap
import os
import random
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from millpond.config import PoolConfig
from millpond.launch.engine_client import Completion, EngineClient
from millpond.launch.front import FrontOptions
from millpond.launch.replica import Replica
from millpond.launch.system import System, SystemOptions
from millpond.launch.tiny import (
    VOCAB_SIZE,
    make_adapter,
    make_attention,
    make_hybrid,
    make_sliding,
)
from millpond.model.limits import ARENA_HEADER_BYTES, MIB
from millpond.service.client import AdminClient
from millpond.service.protocol import Report
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
BLOCK = 256
"""Tokens of a Millpond block in all test systems."""
WINDOW = 512
"""Tokens that the sliding-window model looks back over."""
REQUEST_TIMEOUT_S = 120.0
SETTLE_S = 30.0
START_S = 300.0
NUM_TOKENS = 8
PENDING_WAIT_S = 10.0
"""How long the gated replica b waits for what another one is computing."""
GATES_VARIABLE = "TEST_GATES"
ROUNDING = 0.1
"""vLLM's own difference between two ways to cut one prompt into steps: up to 0.06 was seen."""
EXACT = 1e-6
"""The same steps on the same bytes: the same log-probabilities."""
CHUNK_ARGS = ("--max-num-batched-tokens", str(BLOCK), "--max-num-seqs", "16")
"""Steps of a block: a prompt is cut alike whether its first blocks are loaded or computed."""
SKIP_POOL = MappingProxyType({"kv_transfer_params": {"millpond": "off"}})
"""Fields of a request that leaves the pool alone."""
OLDER_PYTHON = Path(os.environ.get("TEST_PYTHON_027", ROOT / ".venv-0.27" / "bin" / "python"))
HYBRID_ARGS = (
    *("--block-size", str(BLOCK), "--max-model-len", "4096"),
    # Before 0.32 the model's own choice is not seen.
    *("--mamba-ssm-cache-dtype", "float32"),
)


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Return token ids that no other seed begins with."""
    chance = random.Random(seed)
    return [chance.randrange(10, VOCAB_SIZE - 10) for _ in range(num_tokens)]


def full_blocks(num_tokens: int) -> int:
    """Tokens that a request can load: whole blocks, and never its last token."""
    return (num_tokens - 1) // BLOCK * BLOCK


def assert_same(one: Completion, other: Completion, *, tolerance: float = ROUNDING) -> None:
    """Check that both answers are the same tokens, about as probable."""
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)


def differ(one: Completion, other: Completion) -> bool:
    """Return whether two answers differ by more than rounding can explain."""
    pairs = zip(one.logprobs, other.logprobs, strict=True)
    return one.token_ids != other.token_ids or max(abs(x - y) for x, y in pairs) > 2 * ROUNDING


@dataclass(frozen=True)
class Replicas:
    """Two engines that share, in a system that may have more; ``a`` and ``b`` are their names.

    ``tolerance`` is how far log-probabilities may lie apart when prefixes are loaded.
    """

    system: System
    a: str = "a"
    b: str = "b"
    tolerance: float = ROUNDING

    def ask(
        self,
        replica: str,
        ids: Sequence[int],
        *,
        num_tokens: int = NUM_TOKENS,
        model: str | None = None,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[Completion, str]:
        """Return one greedy completion and the name it was asked under."""
        name = f"test-{uuid.uuid4().hex}"
        place = self.system.replica(replica)
        with EngineClient(place.url, model or place.model, timeout_s=REQUEST_TIMEOUT_S) as client:
            answer = client.complete(ids, num_tokens=num_tokens, request_id=name, fields=fields)
            return answer, name

    def mean_error(self, replica: str, ids: Sequence[int], answer: Completion) -> float:
        """Return how far an answer's log-probabilities are from those of a single pass.

        The pass is over ``ids`` and the answer, without the pool. For answers of which another
        run may say something else where two tokens are about as likely, as it is cut into other
        steps: up to 0.07 is vLLM's own difference between decoding and prefill, and with 16
        other tokens in the prompt it is above 1.
        """
        place = self.system.replica(replica)
        body = {
            "model": place.model,
            "prompt": [*ids, *answer.token_ids],
            "max_tokens": 1,
            "prompt_logprobs": 0,
            **SKIP_POOL,
        }
        reply = httpx.post(
            f"{place.url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S, trust_env=False
        )
        odds = reply.raise_for_status().json()["choices"][0]["prompt_logprobs"][len(ids) :]
        errors = [
            abs(odds[i][str(token)]["logprob"] - logprob)
            for i, (token, logprob) in enumerate(
                zip(answer.token_ids, answer.logprobs, strict=True)
            )
        ]
        return sum(errors) / len(errors)

    def assert_right(self, replica: str, ids: Sequence[int], answer: Completion) -> None:
        """Check an answer of a request that ran beside others: see ``mean_error``."""
        assert self.mean_error(replica, ids, answer) < 2 * ROUNDING

    def reset(self, replica: str) -> None:
        """Make one engine forget its local prefixes, once its stores have ended."""
        place = self.system.replica(replica)
        with EngineClient(place.url, place.model, timeout_s=REQUEST_TIMEOUT_S) as client:
            client.reset_prefix_cache()

    @contextmanager
    def admin(self) -> Iterator[AdminClient]:
        with AdminClient.connect(str(self.system.socket), timeout_s=SETTLE_S) as client:
            yield client

    def pool(self) -> dict[str, Any]:
        """Return the pool's statistics."""
        with self.admin() as admin:
            statistics: dict[str, Any] = admin.status()
        return statistics["pool"]

    def bytes_read(self, replica: str) -> int:
        """Return how many bytes a replica has been given to read since the pool started."""
        return self.pool()["replicas"][replica]["num_bytes_read"]

    def clients(self, replica: str) -> list[dict[str, Any]]:
        with self.admin() as admin:
            statistics: dict[str, Any] = admin.status()
        return [c for c in statistics["service"]["clients"] if c["replica"] == replica]

    def settle(self) -> None:
        """Wait until no lease is live, and check that the pool agrees with itself."""
        eventually(
            lambda: self.pool()["num_leases"] == 0, "every lease has ended", timeout_s=SETTLE_S
        )
        with self.admin() as admin:
            admin.check()

    def report(self, name: str) -> Report:
        """Return where a request's tokens came from."""
        with self.admin() as admin:
            eventually(
                lambda: bool(admin.requests_named(name)),
                f"a report of {name}",
                timeout_s=SETTLE_S,
            )
            return admin.requests_named(name)[-1][1]

    def joined(self, *names: str, num_ranks: int = 1) -> None:
        """Wait until these replicas' schedulers and workers are in a session."""
        for name in names:
            eventually(
                lambda name=name: len(self.clients(name)) == 1 + num_ranks,
                f"{name} has joined",
                timeout_s=SETTLE_S,
            )

    def switch(self, *, enabled: bool) -> None:
        with self.admin() as admin:
            admin.switch(enabled=enabled)

    def flush(self) -> None:
        with self.admin() as admin:
            admin.flush()

    def log(self, replica: str) -> str:
        """Return what a replica has logged so far."""
        return self.system.replica(replica).process.spec.log_file.read_text(errors="replace")

    def metric(self, replica: str, name: str) -> float:
        """Return the sum of one of the engine's own metrics over its labels."""
        answer = httpx.get(f"{self.system.replica(replica).url}/metrics", trust_env=False)
        pattern = rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$"
        values = re.findall(pattern, answer.text, re.MULTILINE)
        assert values, f"no metric {name}"
        return sum(map(float, values))


def lease_of(replicas: Replicas, kind: str) -> Callable[[], bool]:
    """Return what says whether a ``store`` or ``load`` lease is live right now."""

    def is_live() -> bool:
        pool = replicas.pool()
        num_writing = pool["num_write_leases"]
        return bool(num_writing if kind == "store" else pool["num_leases"] - num_writing)

    return is_live


@contextmanager
def arena_of(replicas: Replicas) -> Iterator[memoryview]:
    """Map the daemon's arena, as a bug in some process would have it."""
    with replicas.admin() as admin:
        pid = admin.status()["service"]["pid"]
    folder = Path(f"/proc/{pid}/fd")
    path = next(p for p in folder.iterdir() if "memfd:millpond" in str(p.readlink()))
    with (
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as memory,
        memoryview(memory) as whole,
        whole[ARENA_HEADER_BYTES:] as slots,
    ):
        yield slots


class Gates:
    """Holds back and lets fail the copies of a system with gated connectors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def num_failing(self, kind: str) -> int:
        """Return how many copies have been chosen to fail since the system started."""
        return len(list(self.folder.glob(f"failing-{kind}-*")))

    @contextmanager
    def __call__(self, *names: str) -> Iterator[None]:
        """Keep files of these names, such as ``hold-load``, while the context lasts."""
        for name in names:
            (self.folder / name).touch()
        try:
            yield
        finally:
            for name in names:
                (self.folder / name).unlink(missing_ok=True)


def other_connector(
    module: str, name: str, replica: str, socket: Path, *, pending_wait_s: float = 0.0
) -> tuple[str, ...]:
    """Return the arguments that put a connector of the tests in the place of the real one."""
    config = {
        "kv_connector": name,
        "kv_connector_module_path": f"tests.e2e.{module}",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "replica": replica,
            "socket": str(socket),
            "pending_wait_s": pending_wait_s,
        },
    }
    return ("--kv-transfer-config", json.dumps(config))


def gated_config(replica: str, socket: Path, *, pending_wait_s: float = 0.0) -> tuple[str, ...]:
    """Return the arguments for the connector whose copies tests hold back."""
    return other_connector(
        "gated_connector", "GatedConnector", replica, socket, pending_wait_s=pending_wait_s
    )


def telling_address(socket: Path, replica: str) -> str:
    """Return where a replica of the system ``telling`` publishes, as the router is told."""
    return ",".join(f"{kind}=ipc://{socket}-{replica}-{kind}" for kind in ("events", "replay"))


def telling_args(socket: Path, replica: str) -> tuple[str, ...]:
    """Return the arguments of a replica that publishes what its cache holds."""
    places = dict(place.split("=") for place in telling_address(socket, replica).split(","))
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": places["events"],
        "replay_endpoint": places["replay"],
    }
    return ("--kv-events-config", json.dumps(config))


class Stage:
    """Starts the systems that tests ask for; see the module."""

    def __init__(self, folder: Path, *, keeps_logs: Callable[[], bool]) -> None:
        self._folder = folder
        self._keeps_logs = keeps_logs
        self._gates_folder = folder / "gates"
        self._gates_folder.mkdir()
        self.gates = Gates(self._gates_folder)
        self._name = ""
        self._system: System | None = None

    def system(self, name: str) -> System:
        """Return the running system of that name; another one that runs is stopped first."""
        if name != self._name:
            self.close()
            # Only a system that is whole counts as started.
            self._system = self._start(name)
            self._name = name
        assert self._system is not None
        return self._system

    def close(self) -> None:
        """Stop what runs; its logs stay where they are worth reading."""
        system, self._system, self._name = self._system, None, ""
        if system is None:
            return
        system.stop()
        if self._keeps_logs():
            print(f"\nlogs of the engines: {system.run_dir}")  # noqa: T201
        else:
            shutil.rmtree(system.run_dir, ignore_errors=True)

    def _start(self, name: str) -> System:
        options: Callable[[Path], SystemOptions] = getattr(self, f"_{name}")
        system = System(options(self._folder / f"{name}.sock"))
        system.start()
        try:
            _warm_up(system)
        except BaseException:
            system.stop()
            raise
        return system

    def _options(
        self,
        model: str,
        num_replicas: int,
        socket: Path,
        environ: Mapping[str, str] = MappingProxyType({}),
        **rest: object,
    ) -> SystemOptions:
        merged = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",
            # Replicas import the gated connector by its name.
            "PYTHONPATH": os.pathsep.join(
                filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT)))
            ),
            GATES_VARIABLE: str(self._gates_folder),
            **environ,
        }
        return SystemOptions(
            model=model,
            num_replicas=num_replicas,
            device="cpu",
            environ=merged,
            pool=PoolConfig(socket=socket, size_bytes=64 * MIB, extent_bytes=None),
            start_timeout_s=START_S,
            **rest,  # pyright: ignore[reportArgumentType]
        )

    def model(self, kind: str) -> str:
        """Return the folder of a tiny model, made when it is first asked for."""
        make = {"hybrid": make_hybrid, "attention": make_attention, "sliding": make_sliding}[kind]
        path = self._folder / kind
        if not path.exists():
            make(path, seed=1)
        return str(path)

    def _shared(self, socket: Path) -> SystemOptions:
        hybrid = self.model("hybrid")
        # The system knows one model's name: the other model goes by it too.
        other = ("--model", self.model("sliding"), "--served-model-name", hybrid)
        sliding = (*other, "--block-size", "128", *CHUNK_ARGS)
        return self._options(
            hybrid,
            4,
            socket,
            engine_args=HYBRID_ARGS,
            replica_args={"c": sliding, "d": sliding},
        )

    def _attention(self, socket: Path) -> SystemOptions:
        adapters = [f"{x}={make_adapter(self._folder / x, seed=ord(x))}" for x in ("x", "y")]
        lora = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
        return self._options(
            self.model("attention"),
            3,
            socket,
            engine_args=(
                *("--block-size", "64", "--max-model-len", "4096"),
                *CHUNK_ARGS,
                *lora,
                "--lora-modules",
                *adapters,
            ),
            replica_args={"c": ("--dtype", "float32", "--block-size", "128")},
        )

    def _guarded(self, socket: Path) -> SystemOptions:
        return self._options(
            self.model("hybrid"),
            2,
            socket,
            environ={"MILLPOND_CONNECTOR_CHECK_RATIO": "1"},
            engine_args=HYBRID_ARGS,
        )

    def _gated(self, socket: Path) -> SystemOptions:
        return self._options(
            self.model("hybrid"),
            2,
            socket,
            engine_args=(
                *HYBRID_ARGS,
                *("--num-gpu-blocks-override", "48"),
            ),
            front=FrontOptions(
                policy="round-robin", admin_socket=socket.with_name("gated-router.sock")
            ),
            replica_args={
                "a": gated_config("a", socket),
                "b": gated_config("b", socket, pending_wait_s=PENDING_WAIT_S),
            },
        )

    def _parallel(self, socket: Path) -> SystemOptions:
        return self._options(
            self.model("hybrid"),
            1,
            socket,
            environ={"OMP_NUM_THREADS": "1"},  # of each rank
            engine_args=(*HYBRID_ARGS, "--tensor-parallel-size", "2", *gated_config("a", socket)),
        )

    def _telling(self, socket: Path) -> SystemOptions:
        hybrid = self.model("hybrid")
        small = ("--served-model-name", hybrid, *CHUNK_ARGS)
        adapter = f"x={make_adapter(self._folder / 'x', seed=ord('x'))}"
        others = {
            "c": ("--model", self.model("sliding"), *small, "--block-size", "128"),
            "d": (
                *("--model", self.model("attention"), *small, "--block-size", "64"),
                *("--num-gpu-blocks-override", "80"),
                *("--enable-lora", "--max-lora-rank", "8", "--lora-modules", adapter),
            ),
        }
        return self._options(
            hybrid,
            4,
            socket,
            engine_args=HYBRID_ARGS,
            replica_args={
                name: (*others.get(name, ()), *telling_args(socket, name)) for name in "abcd"
            },
        )

    def _older(self, socket: Path) -> SystemOptions:
        return self._options(
            self.model("hybrid"),
            2,
            socket,
            engine_args=HYBRID_ARGS,
            replica_args={name: telling_args(socket, name) for name in "ab"},
            python=OLDER_PYTHON,
        )

    def _as_026(self, socket: Path) -> SystemOptions:
        names = {"a": "Unmended", "b": "Mended"}
        return self._options(
            self.model("hybrid"),
            2,
            socket,
            engine_args=HYBRID_ARGS,
            python=OLDER_PYTHON,
            replica_args={
                replica: other_connector("engine_026", name, replica, socket)
                for replica, name in names.items()
            },
        )


def _warm_up(system: System) -> None:
    """Wait until all have joined; the first request takes many times longer than the next."""
    replicas = Replicas(system)

    def warm(replica: Replica) -> None:
        num_ranks = 1 + ("--tensor-parallel-size" in system.options.engine_args)
        replicas.joined(replica.name, num_ranks=num_ranks)
        replicas.ask(replica.name, prompt(20, 0))

    with ThreadPoolExecutor() as threads:
        list(threads.map(warm, system.replicas))
