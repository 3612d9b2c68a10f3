"""The cases that need control over the processes: a pool and two replicas started for them.

Each copy is held back for a moment on a CPU, so that what is to happen during a copy does, and
the replicas have little memory of their own, so that they preempt. On a GPU copies cannot be
held back; a case that comes too late says so. On a CPU the replicas also add up each token by
itself (``targets.exact_sums``), so that no rounding hides wrong data.
"""

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final, Literal, cast

import httpx

from millpond.config import PoolConfig
from millpond.gate.corruption import corruption
from millpond.gate.service import FAILURES
from millpond.gate.service_cases import Case, moved, wait_for_lease
from millpond.gate.service_pair import (
    A,
    B,
    CannotCheck,
    Mismatch,
    Pair,
    PairOptions,
    Place,
    Rounding,
    new_salt,
)
from millpond.launch.demo import ENGINE_ENVIRON
from millpond.launch.system import Progress, System, SystemOptions
from millpond.launch.tiny import HYBRID_ENGINE_ARGS, make_hybrid
from millpond.model.limits import MIB

BLOCK_TOKENS: Final = 256
COPY_DELAY_S: Final = 0.3
POOL_BYTES: Final = 64 * MIB
_ENGINE_BLOCKS: Final = 48
"""Memory of a replica: some five of eight requests at once."""
_ENGINE_ARGS: Final = (
    *HYBRID_ENGINE_ARGS,
    *("--max-model-len", "4096", "--max-num-seqs", "16"),
    *("--num-gpu-blocks-override", str(_ENGINE_BLOCKS)),
)
_EXACT_SUMS: Final = ("--worker-extension-cls", "millpond.gate.targets.exact_worker.ExactSums")
_TRIED_TOKENS: Final = (BLOCK_TOKENS // 3, BLOCK_TOKENS + 50, 2 * BLOCK_TOKENS + 70)
_TRIED_ANSWER: Final = 24
_TRIED_SEED: Final = "exact sums"
"""No number, as those of the cases are."""
_NUM_PREEMPTED: Final = 8
_PREEMPTED_TOKENS: Final = 60
_JOIN_S_MAX: Final = 120.0
_THREAD_S_MAX: Final = 120.0
_PREEMPTIONS: Final = re.compile(r"^vllm:num_preemptions_total(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


class Launched:
    """A running system of two replicas with the tiny hybrid model, and the pair to ask."""

    def __init__(self, system: System, pair: Pair) -> None:
        self.system = system
        self.pair = pair

    def cases(self) -> Iterator[Case]:
        """Yield the cases that need this."""
        for name, what, run in (
            ("preemption", "more requests at once than the replica has memory for", self._preempt),
            ("killed-store", "a replica killed while it stores", lambda: self._kill("store")),
            ("killed-load", "a replica killed while it loads", lambda: self._kill("load")),
            ("daemon-restart", "the daemon killed under a load, and started anew", self._restart),
            (
                "corruption",
                "one page in the pool overwritten: the output must change",
                lambda: corruption(self.pair),
            ),
        ):
            yield Case(name, what, run)

    def revive(self) -> None:
        """Start what has ended, and wait until all take part; raises ``SetupError``."""
        if self.system.pool_process.status is not None:
            self.system.restart_pool()
        for replica in self.system.replicas:
            if replica.process.status is not None:
                self.system.restart_replica(replica.name)
        self.wait_joined(A, B)

    def wait_joined(self, *names: str) -> None:
        """Wait until these replicas take part in the pool."""
        wanted = {(name, role) for name in names for role in ("scheduler", "worker")}

        def have_joined() -> bool:
            with self.pair.admin() as admin:
                service = cast("Mapping[str, Any]", admin.status()["service"])
            return {(client["replica"], client["role"]) for client in service["clients"]} >= wanted

        self.pair.wait_until(
            have_joined, "a replica has not joined the pool", timeout_s=_JOIN_S_MAX
        )

    # -------------------------------------------------------------- cases

    def _preempt(self) -> int:
        pair = self.pair
        # Each answer crosses the end of a block, for which another one is needed.
        prompts = [pair.prompt(3 * BLOCK_TOKENS - 10 - 5 * i) for i in range(_NUM_PREEMPTED)]
        salts = [new_salt() for _ in prompts]
        for ids, salt in zip(prompts[:3], salts[:3], strict=True):
            pair.ask(B, ids, salt, num_tokens=1)
        pair.settle()
        before = self._num_preemptions(A)
        answers = pair.ask_all(
            A, list(zip(prompts, salts, strict=True)), num_tokens=_PREEMPTED_TOKENS
        )
        if self._num_preemptions(A) == before:
            raise CannotCheck("the replica preempted nothing")
        if not any(pair.report(answer).loaded_tokens for answer in answers):
            raise Mismatch("none of the requests loaded its prefix")
        pair.settle()
        rounding: Rounding | None = None
        if not pair.is_exact:
            # With each token of a batch rounding adds up: the same crowd shows how far, without
            # the pool. If nothing is preempted this time, less is equal.
            rounding = pair.rounding_in_batch(
                prompts, replica=A, alone_at=B, num_tokens=_PREEMPTED_TOKENS
            )
        return sum(
            pair.compare_in_batch(
                ids,
                answer,
                f"request {i} of a crowd ({pair.report(answer).loaded_tokens} tokens loaded)",
                replica=B,
                rounding=rounding,
            )
            for i, (ids, answer) in enumerate(zip(prompts, answers, strict=True))
        )

    def _kill(self, kind: Literal["store", "load"]) -> int:
        pair = self.pair
        ids, salt = pair.prompt(3 * BLOCK_TOKENS + 20), new_salt()
        reference = pair.reference(ids, replica=B)
        if kind == "load":
            pair.ask(B, ids, salt)
            pair.settle()
        asking = _ask_in_vain(pair, ids, salt)
        was_copying = wait_for_lease(pair, kind)
        self.system.kill_replica(A)
        asking.join()
        pair.settle()
        states = pair.pool()["num_slots"]
        if states["reserved"] or states["quarantined"]:
            raise Mismatch(f"a dead replica's slots are not free: {states}")
        num_compared = pair.compare(pair.ask(B, ids, salt), reference, "at the other replica")
        self.revive()
        num_compared += moved(pair, 2 * BLOCK_TOKENS + 30, "after a restart", B, A)
        if not was_copying:
            raise CannotCheck(f"no {kind} was in flight when the replica was killed")
        return num_compared

    def _restart(self) -> int:
        pair = self.pair
        ids, salt = pair.prompt(2 * BLOCK_TOKENS + 20), new_salt()
        reference = pair.reference(ids)
        pair.ask(A, ids, salt)
        pair.settle()
        answers: list[int] = []

        def ask() -> None:
            answers.append(
                pair.compare(pair.ask(B, ids, salt), reference, "while the daemon was killed")
            )

        asking = _Asking(ask)
        was_loading = wait_for_lease(pair, "load")
        self.system.kill_pool()
        asking.join()
        if not answers:
            raise Mismatch("the request under which the daemon was killed has no answer")
        alone = pair.compare(pair.ask(A, ids, new_salt()), reference, "without a daemon")
        self.system.restart_pool()
        self.wait_joined(A, B)
        num_compared = sum(answers) + alone
        for writer, reader in ((A, B), (B, A)):
            num_compared += moved(pair, 2 * BLOCK_TOKENS + 30, "after the restart", writer, reader)
        if not was_loading:
            raise CannotCheck("no load was in flight when the daemon was killed")
        return num_compared

    def _num_preemptions(self, name: str) -> float:
        answer = httpx.get(f"{self.system.replica(name).url}/metrics", trust_env=False)
        found = _PREEMPTIONS.findall(answer.text)
        if not found:
            raise CannotCheck("the replica does not count preemptions")
        return sum(map(float, found))


class _Asking:
    """A request in a thread of its own; ``join`` raises what it raised."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._has_returned = False
        self._thread = threading.Thread(target=self._run, args=(ask,), daemon=True)
        self._thread.start()

    def _run(self, ask: Callable[[], None]) -> None:
        try:
            ask()
        except FAILURES as error:
            self._error = error
        else:
            self._has_returned = True

    def join(self) -> None:
        self._thread.join(_THREAD_S_MAX)
        if self._thread.is_alive():
            raise Mismatch(f"a request was not answered in {_THREAD_S_MAX:g} s")
        if self._error is not None:
            raise self._error
        if not self._has_returned:
            raise Mismatch("a request ended in an error that nobody expects")


def _ask_in_vain(pair: Pair, ids: Sequence[int], salt: str) -> _Asking:
    """Ask a replica that is going to die under the request."""

    def ask() -> None:
        with suppress(httpx.HTTPError, ValueError):
            pair.ask(A, ids, salt, num_tokens=64)

    return _Asking(ask)


def launch(
    folder: Path,
    *,
    device: Literal["cpu", "cuda"],
    environ: Mapping[str, str],
    logs: Path | None,
    on_progress: Progress,
) -> System:
    """Return a system to start, whose model and socket lie in ``folder``, a short path."""
    return System(
        SystemOptions(
            model=str(make_hybrid(folder / "model", seed=1).path),
            num_replicas=2,
            device=device,
            environ={**environ, **ENGINE_ENVIRON},
            pool=PoolConfig(folder / "pool.sock", POOL_BYTES, None),
            engine_args=(*_ENGINE_ARGS, *(_EXACT_SUMS if device == "cpu" else ())),
            connector={"copy_delay_s": COPY_DELAY_S},
            run_dir=logs,
        ),
        on_progress=on_progress,
    )


def inexact_sums(pair: Pair) -> str:
    """Return which way to ask changes a bit of an answer without the pool; empty if none does.

    Alone at either replica, all at once, and with a part of the answer in the prompt. The
    prompts are others than those of the cases.
    """
    chance = Random(_TRIED_SEED)
    prompts = [pair.prompt(num_tokens, chance) for num_tokens in _TRIED_TOKENS]
    try:
        alone = [pair.reference(ids, num_tokens=_TRIED_ANSWER) for ids in prompts]
        half = _TRIED_ANSWER // 2
        cut = [
            pair.reference([*ids, *answer.token_ids[:half]], num_tokens=half)
            for ids, answer in zip(prompts, alone, strict=True)
        ]
        ways = {
            "at the other replica": [
                pair.reference(ids, replica=B, num_tokens=_TRIED_ANSWER) for ids in prompts
            ],
            "beside others": pair.references(prompts, replica=A, num_tokens=_TRIED_ANSWER),
            "with half of its answer in the prompt": [
                replace(
                    late,
                    token_ids=one.token_ids[:half] + late.token_ids,
                    logprobs=one.logprobs[:half] + late.logprobs,
                )
                for one, late in zip(alone, cut, strict=True)
            ],
        }
    except FAILURES as error:
        return f"a request failed: {error}"
    for way, answers in ways.items():
        for ids, one, other in zip(prompts, alone, answers, strict=True):
            if (one.token_ids, one.logprobs) != (other.token_ids, other.logprobs):
                return f"a prompt of {len(ids)} tokens is answered otherwise {way}"
    return ""


def pair_of(system: System, *, tolerance: float, seed: int, on_step: Callable[[str], None]) -> Pair:
    """Return what asks a launched system's replicas."""
    places = {r.name: Place(r.url, r.model, 4096) for r in system.replicas}
    options = PairOptions(
        socket=str(system.socket),
        block_tokens=BLOCK_TOKENS,
        tolerance=tolerance,
        seed=seed,
        is_own=True,
    )
    return Pair(places, options, on_step)
