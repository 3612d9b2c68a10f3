"""Real engines, started once a model and shared by all tests that need it."""

import os
import random
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from millpond.config import PoolConfig
from millpond.launch.engine_client import Completion, EngineClient
from millpond.launch.system import System, SystemOptions
from millpond.launch.tiny import VOCAB_SIZE, make_attention, make_hybrid
from millpond.service.client import AdminClient
from millpond.service.protocol import Report

BLOCK = 256
"""Tokens of a Millpond block in all test systems."""
REQUEST_TIMEOUT_S = 120.0
SETTLE_S = 30.0
NUM_TOKENS = 8
LOGPROB_TOLERANCE = 0.06
"""vLLM's own difference between ways to cut one prompt into chunks: up to 0.05 was seen."""


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Return token ids that no other seed begins with."""
    chance = random.Random(seed)
    return [chance.randrange(10, VOCAB_SIZE - 10) for _ in range(num_tokens)]


def eventually(condition: Callable[[], bool], what: str) -> None:
    """Wait until ``condition`` holds, at most SETTLE_S."""
    deadline = time.monotonic() + SETTLE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {SETTLE_S:.0f} s: {what}"
        time.sleep(0.02)


@dataclass
class Replicas:
    """Two engines and a pool, and what tests ask of them."""

    system: System

    def ask(
        self,
        replica: str,
        ids: Sequence[int],
        *,
        num_tokens: int = NUM_TOKENS,
        skip_pool: bool = False,
    ) -> tuple[Completion, str]:
        """Return one greedy completion and the name it was asked under."""
        name = f"test-{uuid.uuid4().hex}"
        place = self.system.replica(replica)
        with EngineClient(place.url, place.model, timeout_s=REQUEST_TIMEOUT_S) as client:
            answer = client.complete(
                ids, num_tokens=num_tokens, request_id=name, skip_pool=skip_pool
            )
            return answer, name

    def reset(self, replica: str) -> None:
        """Make one engine forget its local prefixes, once its stores have ended."""
        place = self.system.replica(replica)
        with EngineClient(place.url, place.model, timeout_s=REQUEST_TIMEOUT_S) as client:
            client.reset_prefix_cache()

    @contextmanager
    def admin(self) -> Iterator[AdminClient]:
        with AdminClient.connect(str(self.system.socket), timeout_s=5.0) as client:
            yield client

    def pool(self) -> dict[str, Any]:
        """Return the pool's statistics."""
        with self.admin() as admin:
            statistics: dict[str, Any] = admin.status()
        return statistics["pool"]

    def clients(self, replica: str) -> list[dict[str, Any]]:
        with self.admin() as admin:
            statistics: dict[str, Any] = admin.status()
        return [c for c in statistics["service"]["clients"] if c["replica"] == replica]

    def settle(self) -> None:
        """Wait until no lease is live, and check that the pool agrees with itself."""
        eventually(lambda: self.pool()["num_leases"] == 0, "every lease has ended")
        with self.admin() as admin:
            admin.check()

    def report(self, name: str) -> Report:
        """Return where a request's tokens came from."""
        with self.admin() as admin:
            eventually(lambda: bool(admin.requests_named(name)), f"a report of {name}")
            return admin.requests_named(name)[-1][1]

    def joined(self, *names: str) -> None:
        """Wait until these replicas' schedulers and workers are in a session."""
        for name in names:
            eventually(lambda name=name: len(self.clients(name)) == 2, f"{name} has joined")

    def switch(self, *, enabled: bool) -> None:
        with self.admin() as admin:
            admin.switch(enabled=enabled)

    def flush(self) -> None:
        with self.admin() as admin:
            admin.flush()


@contextmanager
def started(
    model: str,
    socket: Path,
    *,
    engine_args: Sequence[str],
    connector: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Replicas]:
    """Start a pool and two replicas of ``model``, warm, and stop them."""
    options = SystemOptions(
        model=model,
        num_replicas=2,
        device="cpu",
        environ={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
        pool=PoolConfig(socket=socket, size_bytes=64 * 2**20, extent_bytes=None),
        engine_args=engine_args,
        connector=connector,
        start_timeout_s=240.0,
    )
    with System(options) as system:
        replicas = Replicas(system)
        replicas.joined("a", "b")
        with ThreadPoolExecutor() as threads:
            # The first request with log-probabilities takes many times longer than the next.
            list(threads.map(lambda name: replicas.ask(name, prompt(20, 0)), ("a", "b")))
        yield replicas


@pytest.fixture(scope="session")
def model_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="millpond-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def hybrid_model(model_dir: Path) -> str:
    return str(make_hybrid(model_dir / "hybrid", seed=1).path)


@pytest.fixture(scope="session")
def hybrid(hybrid_model: str, model_dir: Path) -> Iterator[Replicas]:
    """Gated delta net and attention, blocks of 256 tokens."""
    arguments = ("--block-size", str(BLOCK), "--max-model-len", "4096")
    with started(hybrid_model, model_dir / "h.sock", engine_args=arguments) as replicas:
        yield replicas


@pytest.fixture(scope="session")
def attention(model_dir: Path) -> Iterator[Replicas]:
    """Full attention, four engine blocks of 64 tokens to one of Millpond's."""
    model = str(make_attention(model_dir / "attention", seed=1).path)
    arguments = ("--block-size", "64", "--max-model-len", "4096")
    with started(model, model_dir / "a.sock", engine_args=arguments) as replicas:
        yield replicas


@pytest.fixture(scope="session", params=["hybrid", "attention"])
def replicas(request: pytest.FixtureRequest) -> Replicas:
    """Each kind of model in turn."""
    return request.getfixturevalue(request.param)
