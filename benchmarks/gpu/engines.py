"""Engines in processes of their own, driven step by step: every token has its time.

    replica = Replica("a", Start(arguments, gpu="0", transfer=millpond_transfer("a", socket)))
    replica.start()
    answer = replica.ask(prompt, max_tokens=16)

An engine takes a list of requests at once: the first one can be decoding while the others come.
It goes on stepping between two lists for as long as its connector has work to end.
"""

import itertools
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracing import Span

ANSWER_S = 1800.0
END_S = 30.0
FORGET_S = 60.0
LOGITS_SEED = 7
LOGITS_STD = 0.05
LOGITS_SPREAD = 0.5
SHARPER: dict[str, Callable[[Any], object]] = {
    # A state forgets over some 600 tokens instead of two.
    ".A_log": lambda weight: weight.fill_(-6.0),
    ".dt_bias": lambda weight: weight.zero_(),
    # Else what comes out of a recurrent layer is smaller than its norm's epsilon.
    ".conv1d.weight": lambda weight: weight.mul_(300.0),
    ".linear_attn.norm.weight": lambda weight: weight.fill_(2.0),
    # Scores of standard deviation 3, and an output of the recurrent layers' size. A weight of
    # 8 bits has a scale of its own.
    ".q_norm.weight": lambda weight: weight.fill_(2.0),
    ".self_attn.o_proj.weight": lambda weight: weight.mul_(30.0),
    ".self_attn.o_proj.weight_scale": lambda weight: weight.mul_(30.0),
}
"""What ``_sharpen_dummies`` does to weights, by how their names end."""


@dataclass(frozen=True)
class Ask:
    """One request. It comes once the list's first one has made ``after_tokens`` tokens."""

    prompt: Sequence[int]
    max_tokens: int = 1
    after_tokens: int = 0
    num_logprobs: int | None = None
    request_id: str | None = None


@dataclass
class Answer:
    """What became of a request; times are those of ``time.perf_counter`` in its engine.

    ``running_s`` is when the request was first seen to be computed (a load is over by then).
    """

    prompt_tokens: int
    arrived_s: float
    running_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    cached_tokens: int | None = None

    @property
    def ttft_s(self) -> float:
        """Seconds from the arrival to the first token."""
        return self.token_s[0] - self.arrived_s

    @property
    def intervals_s(self) -> list[tuple[float, float]]:
        """Begin and end of each wait between two tokens."""
        return list(itertools.pairwise(self.token_s))


@dataclass(frozen=True)
class Start:
    """How to start an engine: arguments of ``vllm.LLM``, its GPU, its connector if any.

    ``environ`` is laid over the parent's environment. ``sharpen`` makes random weights say
    something (see ``_sharpen_dummies``).
    """

    arguments: dict[str, Any]
    gpu: str | None
    transfer: dict[str, Any] | None = None
    environ: dict[str, str] = field(default_factory=dict)
    sharpen: bool = False


@dataclass(frozen=True)
class Facts:
    """What an engine says of itself. ``step_tokens`` is its largest step in whole blocks.

    ``attention_token_bytes`` is what all attention layers keep of a token, ``state_bytes`` one
    state of all recurrent layers, both without padding.
    """

    block_tokens: int
    step_tokens: int
    num_kv_tokens: int
    attention_token_bytes: int
    state_bytes: int
    vllm: str
    torch: str
    device: str

    def attention_bytes(self, num_tokens: int) -> int:
        """Return what the attention pages of a prompt's whole blocks take."""
        whole_blocks = num_tokens // self.block_tokens * self.block_tokens
        return whole_blocks * self.attention_token_bytes


def millpond_transfer(name: str, socket: Path) -> dict[str, Any]:
    """Return the ``kv_transfer_config`` of a replica at a pool."""
    return {
        "kv_connector": "MillpondConnector",
        "kv_connector_module_path": "millpond.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"replica": name, "socket": str(socket)},
    }


def end(process: BaseProcess) -> None:
    """End a process, by force where it does not end within half a minute."""
    process.terminate()
    process.join(END_S)
    if process.is_alive():
        process.kill()
        process.join(END_S)


def receive(pipe: Connection, timeout_s: float, *, of: str) -> Any:  # noqa: ANN401
    """Return what the other process sends; ``EOFError`` where it has ended."""
    if not pipe.poll(timeout_s):
        raise RuntimeError(f"no answer of {of} within {timeout_s:g} s")
    return pipe.recv()


class Replica:
    """An engine in a process of its own. The process is there at once, and imports vLLM.

    Every call blocks until the engine has done it; the first one is ``start``. An engine
    that dies without a word is an ``EOFError`` or ``OSError``, one that fails a ``RuntimeError``.
    """

    facts: Facts

    def __init__(self, name: str, start: Start) -> None:
        self.name = name
        context = mp.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_be_an_engine, args=(theirs, start), daemon=True)
        self._process.start()
        theirs.close()

    def start(self) -> None:
        """Start the engine; wait until it serves, and take what it says of itself."""
        self._pipe.send("start")
        self.facts = self._answer()

    def ask(self, prompt: Sequence[int], max_tokens: int = 1) -> Answer:
        """Ask one request alone."""
        return self.serve([Ask(prompt, max_tokens)])[0]

    def serve(self, asks: Sequence[Ask], *, tail_tokens: int | None = None) -> list[Answer]:
        """Ask several requests at once.

        With ``tail_tokens`` the first one is aborted when the others are over and it has made
        so many tokens more.
        """
        return self._call("serve", list(asks), tail_tokens)

    def begin(self, asks: Sequence[Ask]) -> Callable[[], list[Answer]]:
        """Ask several requests; return what waits for the answers. Meanwhile ask nothing else."""
        self._pipe.send(("serve", (list(asks), None)))
        return self._answer

    def forget(self, *, with_connector: bool = False) -> None:
        """Empty the engine's own cache of prefixes, and nothing else.

        ``with_connector`` empties what its connector keeps for this engine alone as well.
        """
        self._call("forget", with_connector)

    def is_registered(self, num_bytes: int) -> bool:
        """Say whether the engine can copy from and to the first ``num_bytes`` of its pool."""
        return self._call("is_registered", num_bytes)

    def mend(self, *, enabled: bool) -> bool:
        """Turn the connector's remedy for diverging local hits on or off.

        Returns False where the engine's version needs none, and nothing is changed.
        """
        return self._call("mend", enabled)

    def tell_early(self, *, enabled: bool) -> None:
        """Let the forward pass of a moved request be launched before its load has landed."""
        self._call("tell_early", enabled)

    def refresh_mirror(self) -> None:
        """Copy the pool's memory to the second GPU that the engine sees (see ``peer.py``)."""
        self._call("refresh_mirror")

    def read_mirror(self, *, enabled: bool) -> int:
        """Let loads come from that copy, or from the pool again; return how many have so far."""
        return self._call("read_mirror", enabled)

    def trace_begin(self) -> None:
        """Note from now on when the parts of a request begin and end."""
        self._call("trace_begin")

    def trace_end(self) -> list["Span"]:
        """Return what was noted."""
        return self._call("trace_end")

    def close(self) -> None:
        """End the process, by force where it does not."""
        end(self._process)

    def _call(self, operation: str, *arguments: object) -> Any:  # noqa: ANN401
        self._pipe.send((operation, arguments))
        return self._answer()

    def _answer(self) -> Any:  # noqa: ANN401
        answer = receive(self._pipe, ANSWER_S, of=self.name)
        if isinstance(answer, Exception):
            raise answer
        return answer


# ---------------------------------------------------------------- in the engine's process


def _be_an_engine(asked: Connection, start: Start) -> None:
    """Start, then do what is asked until there is no more."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONHASHSEED": "0"} | start.environ
    if start.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = start.gpu
    try:
        import vllm.v1.worker.gpu_worker  # noqa: F401 - beside the start of another engine

        asked.recv()
        engine = _Engine(start)
        asked.send(engine.facts())
        while True:
            engine.step_while_idle(asked)
            operation, arguments = asked.recv()
            asked.send(getattr(engine, operation)(*arguments))
    except EOFError:
        return
    except Exception:  # noqa: BLE001 - whatever it is, the parent has to hear of it
        asked.send(RuntimeError(traceback.format_exc()))


class _Engine:
    """The engine itself, in this process: its scheduler can be looked at between two steps."""

    def __init__(self, start: Start) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

        config = Path(start.arguments["model"], "config.json")
        if config.is_file() and "Qwen35TextForCausalLM" in config.read_text(encoding="utf-8"):
            _register_text_only()
        if start.sharpen and "DUMMIES_AS_SHIPPED" not in os.environ:
            _sharpen_dummies()
        self._coordinator: Any = HybridKVCacheCoordinator
        self._as_shipped = getattr(self._coordinator, "find_longest_cache_hit_per_group", None)
        transfer = None if start.transfer is None else KVTransferConfig(**start.transfer)
        self._llm = LLM(kv_transfer_config=transfer, **start.arguments)
        self._mended = getattr(self._coordinator, "find_longest_cache_hit_per_group", None)
        self._engine: Any = self._llm.llm_engine
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._num_asked = 0
        self._tells_early: Any = None
        self._tracer: Any = None
        self._mirror: Any = None

    def facts(self) -> Facts:
        import torch
        import vllm

        config: Any = self._engine.vllm_config
        cache = config.cache_config
        block = int(cache.block_size)
        has_gpu = torch.cuda.is_available()
        return Facts(
            block_tokens=block,
            step_tokens=config.scheduler_config.max_num_batched_tokens // block * block,
            num_kv_tokens=int(cache.num_gpu_blocks) * block,
            **self._bytes_kept(),
            vllm=vllm.__version__,
            torch=str(torch.__version__),
            device=torch.cuda.get_device_name() if has_gpu else "cpu",
        )

    def step_while_idle(self, asked: Connection) -> None:
        """Let the connector end its work, as a serving engine would, until something is asked."""
        while not asked.poll(0.0 if self._scheduler.has_requests() else None):
            self._engine.step()

    def _bytes_kept(self) -> dict[str, int]:
        from vllm.v1.kv_cache_interface import MambaSpec

        from millpond.connector.versions import layer_spec, page_bytes

        attention = state = 0
        for group in self._scheduler.kv_cache_config.kv_cache_groups:
            for layer in group.layer_names:
                spec = layer_spec(group.kv_cache_spec, layer)
                if isinstance(spec, MambaSpec):
                    state += page_bytes(spec)
                else:
                    attention += page_bytes(spec) // spec.block_size
        return {"attention_token_bytes": attention, "state_bytes": state}

    def is_registered(self, num_bytes: int) -> bool:
        return _connectors_worker()._copy_engine.is_ready(num_bytes)  # noqa: SLF001

    def forget(self, with_connector: bool) -> None:  # noqa: FBT001 - comes over the pipe
        deadline_s = time.monotonic() + FORGET_S
        while not self._llm.reset_prefix_cache(reset_connector=with_connector):
            if time.monotonic() > deadline_s:
                raise RuntimeError("the engine's own cache of prefixes is in use")
            self._engine.step()

    def mend(self, enabled: bool) -> bool:  # noqa: FBT001 - comes over the pipe by position
        if self._as_shipped is self._mended:
            return False
        mend = self._mended if enabled else self._as_shipped
        self._coordinator.find_longest_cache_hit_per_group = mend
        return True

    def tell_early(self, enabled: bool) -> None:  # noqa: FBT001 - comes over the pipe
        from millpond.transfer.streams import Lane

        if self._tells_early is None:
            self._tells_early = Lane._tell_early  # noqa: SLF001
        never: Any = lambda *_: None  # noqa: E731
        Lane._tell_early = self._tells_early if enabled else never  # noqa: SLF001

    def refresh_mirror(self) -> None:
        from peer import Mirror

        if self._mirror is None:
            self._mirror = Mirror(_connectors_worker())
        self._mirror.refresh()

    def read_mirror(self, enabled: bool) -> int:  # noqa: FBT001 - comes over the pipe
        self._mirror.read(enabled=enabled)
        return self._mirror.num_loads

    def trace_begin(self) -> None:
        from tracing import Tracer

        if self._tracer is None:
            self._tracer = Tracer()
        self._tracer.begin()

    def trace_end(self) -> list["Span"]:
        return self._tracer.end()

    def serve(self, asks: list[Ask], tail_tokens: int | None) -> list[Answer]:
        served = _Served(self._engine, self._scheduler, asks, self._num_asked)
        self._num_asked += len(asks)
        stops_at: int | None = None
        while True:
            served.let_come()
            served.step()
            if tail_tokens is None:
                if served.num_left == 0:
                    return served.answers
                continue
            first = served.answers[0]
            if stops_at is None and served.num_left == 1 and not served.is_over(0):
                stops_at = len(first.tokens) + tail_tokens
            if served.num_left == 0 or (stops_at is not None and len(first.tokens) >= stops_at):
                served.abort_first()
                return served.answers


class _Served:
    """One list of requests on their way through the engine."""

    def __init__(self, engine: Any, scheduler: Any, asks: list[Ask], number: int) -> None:  # noqa: ANN401
        self._engine = engine
        self._scheduler = scheduler
        self._asks = asks
        self._names = [ask.request_id or f"ask-{number + i}" for i, ask in enumerate(asks)]
        self._index = {name: i for i, name in enumerate(self._names)}
        self._coming = list(range(len(asks)))
        self._inside: dict[int, str] = {}
        self._not_running: set[int] = set()
        self.answers = [Answer(len(ask.prompt), 0.0) for ask in asks]

    @property
    def num_left(self) -> int:
        """How many are still to come or to finish."""
        return len(self._coming) + len(self._inside)

    def is_over(self, i: int) -> bool:
        return i not in self._inside and i not in self._coming

    def let_come(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        made = len(self.answers[0].tokens)
        for i in [i for i in self._coming if self._asks[i].after_tokens <= made]:
            ask = self._asks[i]
            params = SamplingParams(
                max_tokens=ask.max_tokens,
                temperature=0,
                logprobs=ask.num_logprobs,
                detokenize=False,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            prompt = {"type": "token", "prompt_token_ids": list(ask.prompt)}
            self.answers[i].arrived_s = time.perf_counter()
            self._inside[i] = self._engine.add_request(self._names[i], prompt, params)
            self._coming.remove(i)
            self._not_running.add(i)

    def step(self) -> None:
        outputs = self._engine.step()
        now_s = time.perf_counter()
        for i in list(self._not_running):
            request = self._scheduler.requests.get(self._inside[i])
            if request is None or request.status.name == "RUNNING":
                self._not_running.remove(i)
                self.answers[i].running_s = now_s
        for output in outputs:
            i = self._index[output.request_id]
            answer, new = self.answers[i], output.outputs[0]
            answer.tokens += new.token_ids
            answer.token_s += [now_s] * len(new.token_ids)
            if new.logprobs:
                answer.logprobs += [
                    {token: entry.logprob for token, entry in position.items()}
                    for position in new.logprobs
                ]
            if output.num_cached_tokens is not None:
                answer.cached_tokens = output.num_cached_tokens
            if output.finished:
                del self._inside[i]

    def abort_first(self) -> None:
        if 0 in self._inside:
            self._engine.abort_request([self._names[0]])
            del self._inside[0]


def _connectors_worker() -> Any:  # noqa: ANN401
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker  # noqa: SLF001


def _register_text_only() -> None:
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


def _sharpen_dummies() -> None:
    """Make vLLM's dummy weights tell right from wrong.

    As they come, the answer to any prompt is its last token: equal shapes get equal weights, so
    the output layer is the embedding, and next to that the layers add nothing. Here the output
    layer is drawn anew, with rows of different sizes, so that the first choice is far from the
    second one; recurrent layers remember for hundreds of tokens, attention looks at few, and
    both outweigh the embedding. No shape and no work changes.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    # Not once the model is there: a CPU engine has packed its weights elsewhere by then.
    loader: Any = DummyModelLoader
    load_weights = loader.load_weights

    def load_sharp_weights(self: Any, model: Any, model_config: Any) -> None:  # noqa: ANN401
        load_weights(self, model, model_config)
        _sharpen(model)

    loader.load_weights = load_sharp_weights


def _sharpen(model: Any) -> None:  # noqa: ANN401
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("lm_head.weight"):
                chance = torch.Generator(device=weight.device).manual_seed(LOGITS_SEED)
                weight.normal_(0.0, LOGITS_STD, generator=chance)
                rows = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)
                weight.mul_(rows.log_normal_(0.0, LOGITS_SPREAD, generator=chance))
            for ending, change in SHARPER.items():
                if name.endswith(ending) and weight.dtype.itemsize > 1:
                    change(weight)
