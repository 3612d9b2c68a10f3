"""Moved requests between two engines, against the floor, in one run.

    python benchmarks/gpu/moved.py --model MODEL [--same-gpu] [--lengths 32768,131072,261900]
                                   [--repeats 7] [--pool 32GiB] [--engine JSON]

Starts a pool and two engines in this machine, one a GPU or both on one (--same-gpu), and sends
random prompts of each length. Replica a computes a prompt; then b, --repeats times: forgets its
own prefixes, asks (moved), asks again (local). With every prompt the pool's way is measured as
well: bytes that b loaded, and the link that b has measured. The floor of a moved request is the
median local hit plus the loaded bytes over that link.

MODEL is a name or a folder, as for vLLM; --engine holds more arguments of vllm.LLM, such as
'{"load_format": "dummy", "quantization": "fp8", "gpu_memory_utilization": 0.46}'. Prints one
line of JSON a length and one for all; progress goes to stderr.
"""

import argparse
import json
import multiprocessing as mp
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from millpond.config import PoolConfig
from millpond.config.values import parse_size
from millpond.launch.system import System, SystemOptions
from millpond.service.client import AdminClient

ANSWER_S = 1800.0
SETTLE_S = 60.0
POLL_S = 0.02
WARM_UP_TOKENS = 9000


@dataclass(frozen=True)
class Row:
    """One prompt length; seconds to the first token."""

    prompt_tokens: int
    cold_s: float
    moved_s: list[float]
    local_s: list[float]
    loaded_bytes: int
    link_gb_s: float | None
    same_tokens: bool

    def figures(self) -> dict[str, object]:
        """Return samples and ratios."""
        moved, local = statistics.median(self.moved_s), statistics.median(self.local_s)
        floor = local + (self.loaded_bytes / self.link_gb_s / 1e9 if self.link_gb_s else 0.0)
        return asdict(self) | {
            "moved_median_s": round(moved, 4),
            "local_median_s": round(local, 4),
            "floor_s": round(floor, 4),
            "moved_vs_floor_ratio": round(moved / floor, 3),
            "cold_vs_moved_ratio": round(self.cold_s / moved, 1),
        }


def register_text_only() -> None:
    """Let vLLM 0.26 load the text part of Qwen3.5 alone, under the name that its config has."""
    from vllm import ModelRegistry
    from vllm.model_executor.models import qwen3_5
    from vllm.model_executor.models.interfaces import IsHybrid

    whole = qwen3_5.Qwen3_5ForConditionalGeneration
    names = ("dtype_from_config", "shape_from_config", "copy_func")
    states = {
        f"get_mamba_state_{name}": classmethod(getattr(whole, f"get_mamba_state_{name}").__func__)
        for name in names
    }
    text_only = type("Qwen35TextForCausalLM", (qwen3_5.Qwen3_5ForCausalLM, IsHybrid), dict(states))
    ModelRegistry.register_model("Qwen35TextForCausalLM", text_only)


def engine(asked: Connection, arguments: dict[str, Any], gpu: str | None) -> None:
    """Be a replica: answer prompts until there are no more."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0"}
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        config = Path(arguments["model"], "config.json")
        if config.is_file() and "Qwen35TextForCausalLM" in config.read_text(encoding="utf-8"):
            register_text_only()
        transfer = KVTransferConfig(**arguments.pop("kv_transfer_config"))
        llm = LLM(kv_transfer_config=transfer, **arguments)
        asked.send("ready")
        one = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
        while (prompt := asked.recv()) is not None:
            if not prompt:
                asked.send(llm.reset_prefix_cache())
                continue
            began_s = time.perf_counter()
            answer = llm.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)[0]
            asked.send((time.perf_counter() - began_s, list(answer.outputs[0].token_ids)))
    except Exception:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        asked.send(RuntimeError(traceback.format_exc()))


class Replica:
    """An engine in a process of its own."""

    def __init__(self, name: str, arguments: dict[str, Any], gpu: str | None, socket: Path) -> None:
        extra = {"replica": name, "socket": str(socket)}
        transfer = {
            "kv_connector": "MillpondConnector",
            "kv_connector_module_path": "millpond.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        whole = {**arguments, "kv_transfer_config": transfer}
        self._process = context.Process(target=engine, args=(theirs, whole, gpu), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Return seconds to the first token, and the token."""
        self._pipe.send(prompt)
        return self._answer()

    def forget(self) -> None:
        """Empty the engine's own cache of prefixes."""
        self._pipe.send([])
        if not self._answer():
            raise RuntimeError("the engine's own cache of prefixes is in use")

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join(30.0)

    def _answer(self) -> Any:  # noqa: ANN401
        if not self._pipe.poll(ANSWER_S):
            raise RuntimeError(f"no answer within {ANSWER_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def settled(admin: AdminClient) -> dict[str, Any]:
    """Wait until nothing is written or read; return the pool's status."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        status: dict[str, Any] = admin.status()
        if not status["pool"]["num_leases"]:
            return status
        if time.monotonic() > deadline:
            raise RuntimeError(f"the pool is still busy after {SETTLE_S:g} s")
        time.sleep(POLL_S)


def loaded_bytes(status: dict[str, Any], name: str) -> int:
    """Return the bytes that a replica has read so far."""
    return int(status["pool"]["replicas"].get(name, {}).get("num_bytes_read", 0))


def link_gb_s(status: dict[str, Any], name: str) -> float | None:
    """Return what a replica's link has given into the GPU; without a GPU there is none."""
    links = [
        client["link"]["h2d_gb_s"]
        for client in status["service"]["clients"]
        if client["replica"] == name and client["link"] and client["link"]["h2d_gb_s"]
    ]
    return round(links[0], 1) if links else None


def measure(a: Replica, b: Replica, admin: AdminClient, prompt: list[int], repeats: int) -> Row:
    """Return the row of one prompt."""
    cold_s, expected = a.ask(prompt)
    before = loaded_bytes(settled(admin), "b")
    answers: dict[str, list[tuple[float, list[int]]]] = {"moved": [], "local": []}
    for _ in range(repeats):
        b.forget()
        answers["moved"].append(b.ask(prompt))
        answers["local"].append(b.ask(prompt))
    after = settled(admin)
    seconds = {what: [round(s, 4) for s, _ in each] for what, each in answers.items()}
    return Row(
        prompt_tokens=len(prompt),
        cold_s=round(cold_s, 4),
        moved_s=seconds["moved"],
        local_s=seconds["local"],
        loaded_bytes=(loaded_bytes(after, "b") - before) // repeats,
        link_gb_s=link_gb_s(after, "b"),
        same_tokens=all(tokens == expected for each in answers.values() for _, tokens in each),
    )


def options() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", default="32768,131072,261900")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pool", default="32GiB")
    parser.add_argument("--same-gpu", action="store_true")
    parser.add_argument("--engine", type=json.loads, default={})
    parser.add_argument("--token-ids", type=int, default=20_000, help="random ones are smaller")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    asked = options()
    lengths = [int(length) for length in asked.lengths.split(",")]
    arguments = {
        "model": asked.model,
        "skip_tokenizer_init": True,
        "max_model_len": max(lengths) + 256,
        "enable_prefix_caching": True,
        **asked.engine,
    }
    has_gpu = bool(list(Path("/dev").glob("nvidia[0-9]*")))
    gpus = {"a": "0", "b": "0" if asked.same_gpu else "1"} if has_gpu else dict.fromkeys("ab")
    chance = random.Random(asked.seed)

    def prompt(num_tokens: int) -> list[int]:
        return [chance.randrange(asked.token_ids) for _ in range(num_tokens)]

    with tempfile.TemporaryDirectory(prefix="millpond-") as folder:
        socket = Path(folder, "pool.sock")
        system = SystemOptions(
            model=asked.model,
            num_replicas=0,
            device="cuda" if has_gpu else "cpu",
            environ=dict(os.environ),
            pool=PoolConfig(socket, parse_size(asked.pool), extent_bytes=None),
        )
        with System(system), AdminClient.connect(str(socket)) as admin:
            replicas: list[Replica] = []
            try:
                for name in "ab":
                    print(f"starting {name}", file=sys.stderr)
                    replicas.append(Replica(name, arguments, gpus[name], socket))
                a, b = replicas
                warm_up = prompt(min(WARM_UP_TOKENS, max(lengths)))
                for replica in replicas:
                    replica.ask(warm_up)
                rows: list[Row] = []
                for length in lengths:
                    print(f"{length} tokens", file=sys.stderr)
                    rows.append(measure(a, b, admin, prompt(length), asked.repeats))
                    print(json.dumps(rows[-1].figures()), flush=True)
            finally:
                for replica in replicas:
                    replica.close()
    print(json.dumps({"rows": [row.figures() for row in rows], "engine": arguments}))
    if not all(row.same_tokens for row in rows):
        sys.exit("the outputs differ")


if __name__ == "__main__":
    main()
