"""Which arguments vLLM needs for a model beside a pool: chosen, with the reason for each.

    config.json -> ModelShape ┐
    what the user gave        ├-> Choice: arguments, what cannot work, what is worth knowing
    version, GPUs, memory     ┘

Nothing here looks at the machine. Two things are left as they are on purpose: the engine's step
size (--max-num-batched-tokens), because smaller steps would keep more recurrent states and compute
cold prompts slower, and --tensor-parallel-size, because more ranks than the weights need cost a
small model speed, do not fit every quantization, and copy latent pages.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from millpond.launch.given import GivenArguments
from millpond.launch.shape import Kind, ModelShape, RecurrentShape
from millpond.model.limits import BLOCK_TOKENS_MIN, GIB, KIB, MIB

ENGINE_VERSIONS: Final = ((0, 26), (0, 33))
"""The oldest and the newest minor version of vLLM that Millpond's connector was made for."""

_UNNUMBERED: Final = ((0, 0), (0, 1))
"""What a build from source calls itself where git's tags were not at hand."""
_ALIGNED: Final = (0, 32)
"""From here on the engine keeps a hybrid's states on block boundaries, and in the type that the
model's configuration asks for, without being told to."""
_CPU_BLOCK_TOKENS: Final = 128
_GPU_BLOCK_TOKENS: Final = 16
_FILE: Final = "--config"
_ENGINE_BYTES: Final = 4 * GIB
"""Host memory of one engine, about: 2.5 GB of a process on a CPU, and a small cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What arguments depend on beside the model. ``engine_version`` is vLLM's, as it says it.

    ``available_bytes`` is what the pool and the engines could take of this machine's memory.
    """

    device: Literal["cpu", "cuda"]
    engine_version: str
    num_replicas: int
    num_gpus: int
    pool_bytes: int
    state_ratio: float
    available_bytes: int

    @property
    def version(self) -> tuple[int, int] | None:
        """The engine's minor version; None for one that is not numbered, or not as a release."""
        found = re.match(r"(\d+)\.(\d+)", self.engine_version)
        version = None if found is None else (int(found[1]), int(found[2]))
        return None if version in _UNNUMBERED else version

    def is_before(self, version: tuple[int, int]) -> bool:
        """Return whether the engine is known to be older."""
        return self.version is not None and self.version < version


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of ours. ``value`` None stands alone."""

    name: str
    value: str | None
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        """The argument as it is given to vLLM."""
        return (self.name,) if self.value is None else (self.name, self.value)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the pool has to hold for a model, all ranks together; None where it is not known.

    ``block_tokens`` is Millpond's block, about: the engine has the last word.
    """

    num_ranks: int
    block_tokens: int
    token_bytes: int | None
    state_bytes: int
    max_tokens: int | None

    def request_bytes(self, num_tokens: int) -> int | None:
        """Return the bytes of pages and of one state that such a prompt needs."""
        if self.token_bytes is None:
            return None
        return num_tokens * self.token_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """Our arguments for every replica, and what is worth knowing about them."""

    arguments: tuple[Argument, ...]
    sizes: Sizes
    notes: tuple[str, ...]

    @property
    def argv(self) -> tuple[str, ...]:
        """All arguments as they are given to vLLM, before the user's own."""
        return tuple(word for argument in self.arguments for word in argument.words)


def choose_arguments(shape: ModelShape, given: GivenArguments, situation: Situation) -> Choice:
    """Return what vLLM needs to be told. What the user gave is never chosen a second time.

    Arguments count before what a file says that vLLM gets as --config, which is not read here:
    beside one only what every engine gets is chosen.
    """
    chosen = common_arguments(situation.device, given)
    if shape.kind is Kind.HYBRID and not given.has(_FILE):
        chosen += _open(_hybrid_arguments(shape, given, situation), given)
    told = GivenArguments([*(word for each in chosen for word in each.words), *given.argv])
    sizes = request_sizes(shape, told, situation)
    return Choice(tuple(chosen), sizes, tuple(_notes(shape, given, situation, sizes)))


def common_arguments(device: Literal["cpu", "cuda"], given: GivenArguments) -> list[Argument]:
    """Return what every engine is told, beside a pool or not, where the user left it open."""
    wanted = [
        Argument(
            "--enable-prefix-caching",
            None,
            "off by default for hybrids: without it no state is kept that a request could resume "
            "from, and what is local is loaded from the pool",
        )
    ]
    if device == "cpu":
        why = "compiling takes a minute on CPUs, for nothing"
        wanted.append(Argument("--enforce-eager", None, why))
    return _open(wanted, given)


def num_gpus_needed(given: GivenArguments) -> int:
    """Return how many GPUs one replica takes with the sizes that the user gave."""
    return math.prod(given.count(name) for name in _PARALLEL_SIZES)


_PARALLEL_SIZES: Final = (
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
)


# ---------------------------------------------------------------- arguments


def _open(wanted: Iterable[Argument], given: GivenArguments) -> list[Argument]:
    """Return those that the user has not settled either way."""
    return [
        each for each in wanted if not given.has(each.name, "--no-" + each.name.removeprefix("--"))
    ]


def _hybrid_arguments(
    shape: ModelShape, given: GivenArguments, situation: Situation
) -> Iterator[Argument]:
    if situation.is_before(_ALIGNED):
        yield Argument(
            "--mamba-cache-mode",
            "align",
            "keeps states on block boundaries; before vLLM 0.32 some models keep one at every "
            "block, which Millpond does not share",
        )
    recurrent = shape.recurrent
    if recurrent is None:
        return
    wanted = recurrent.dtype or _default_state_dtype(situation)
    if situation.is_before(_ALIGNED) and wanted is not None:
        why = (
            "what the model's configuration asks for, which vLLM reads by itself from 0.32 on"
            if recurrent.dtype is not None
            else "the kernels for CPUs need it before vLLM 0.32"
        )
        yield Argument("--mamba-ssm-cache-dtype", wanted, why)
    engine_block = _engine_block_tokens(shape, given, situation)
    if situation.device == "cpu" and engine_block > _CPU_BLOCK_TOKENS:
        why = (
            f"a state needs {engine_block} tokens of pages; left alone, vLLM for CPUs plans in "
            f"blocks of {_CPU_BLOCK_TOKENS} and keeps no state of a prompt seen for the first time"
        )
        yield Argument("--block-size", str(engine_block), why)


# ---------------------------------------------------------------- sizes


def request_sizes(shape: ModelShape, told: GivenArguments, situation: Situation) -> Sizes:
    """Return what a token, a state and a block take in the pool, by all that vLLM is told."""
    engine_block = _engine_block_tokens(shape, told, situation)
    num_ranks = told.count("--tensor-parallel-size")
    state_bytes = 0
    if shape.recurrent is not None:
        dtype = _state_dtype(shape.recurrent, told, situation)
        state_bytes = shape.recurrent.num_layers * shape.recurrent.layer_bytes(dtype)
    is_known = not told.has(_FILE) and (
        shape.kind is not Kind.HYBRID or shape.recurrent is not None
    )
    return Sizes(
        num_ranks=num_ranks,
        block_tokens=engine_block * math.ceil(BLOCK_TOKENS_MIN / engine_block),
        token_bytes=shape.attention.token_bytes(_element_bytes(told), num_ranks)
        if shape.attention is not None and is_known
        else None,
        state_bytes=state_bytes,
        max_tokens=told.tokens("--max-model-len") or shape.max_tokens,
    )


def _engine_block_tokens(shape: ModelShape, given: GivenArguments, situation: Situation) -> int:
    """Return the engine's block: for a hybrid one whose pages are as long as a layer's state.

    vLLM's Platform._align_hybrid_block_size does the same with the pages of one rank.
    """
    default = _CPU_BLOCK_TOKENS if situation.device == "cpu" else _GPU_BLOCK_TOKENS
    unit = given.count("--block-size", default)
    if shape.recurrent is None or shape.attention is None:
        return unit
    page_bytes = shape.attention.page_elements * _element_bytes(given)
    state_bytes = shape.recurrent.layer_bytes(_state_dtype(shape.recurrent, given, situation))
    return unit * math.ceil(state_bytes / page_bytes / unit)


def _element_bytes(given: GivenArguments) -> int:
    cache_dtype = given.value("--kv-cache-dtype") or "auto"
    if cache_dtype.startswith(("fp8", "int8")):
        return 1
    is_wide = "float32" in (cache_dtype, given.value("--dtype") if cache_dtype == "auto" else "")
    return 4 if is_wide else 2


def _state_dtype(
    recurrent: RecurrentShape, given: GivenArguments, situation: Situation
) -> str | None:
    """Return the type in which states are kept; None for the one of the model's weights."""
    dtype = given.value("--mamba-ssm-cache-dtype")
    if dtype is not None and dtype != "auto":
        return dtype
    return recurrent.dtype or _default_state_dtype(situation)


def _default_state_dtype(situation: Situation) -> str | None:
    """Return the type of states for which the model's configuration names none.

    vLLM's CpuPlatform sets it where the CPU multiplies bfloat16; without that states are half as
    long, for which a block of this size does too.
    """
    return "float32" if situation.device == "cpu" else None


# ---------------------------------------------------------------- notes


def _notes(
    shape: ModelShape, given: GivenArguments, situation: Situation, sizes: Sizes
) -> Iterator[str]:
    version = situation.version
    if version is None or version > ENGINE_VERSIONS[1]:
        yield (
            f"vLLM {situation.engine_version} has not been tried with Millpond, "
            "which knows 0.26 to 0.33"
        )
    if shape.kind is Kind.UNKNOWN:
        yield (
            "the arguments are those of a model with full attention. Where the engine cannot "
            "share what it keeps, it logs event=pool_unused with the reason, and serves"
        )
    elif shape.kind is Kind.HYBRID and shape.recurrent is None:
        yield "the size of this model's recurrent states is not known here"
    if shape.kind is Kind.HYBRID and not given.has("--max-num-batched-tokens"):
        yield (
            "the engine's steps are left as they are (--max-num-batched-tokens): shorter ones "
            "would keep more states and compute cold prompts slower"
        )
    if shape.kind is not Kind.HYBRID and given.is_on("--enable-prefix-caching") is False:
        yield "without prefix caching every prefix is loaded, even one that the replica computed"
    if given.has(_FILE):
        yield (
            f"what {_FILE} says has not been looked at: nothing is chosen for this model, and the "
            "arguments below count before the file"
        )
    if given.has("--hf-overrides"):
        yield "what --hf-overrides says has not been looked at"
    yield from _notes_on_memory(shape, situation, sizes)
    yield from _notes_on_gpus(shape, given, situation, sizes)


def _notes_on_memory(shape: ModelShape, situation: Situation, sizes: Sizes) -> Iterator[str]:
    if sizes.token_bytes is not None and sizes.max_tokens is not None:
        whole = sizes.request_bytes(sizes.max_tokens) or 0
        state = f" and {show_bytes(sizes.state_bytes)} a state" if sizes.state_bytes else ""
        times = situation.pool_bytes / whole
        # Of windows the pool has what the engine had not dropped by the end of a step.
        at_most = "at most " if shape.kind is Kind.SLIDING else ""
        yield (
            f"{at_most}{show_bytes(sizes.token_bytes)} of pages a token{state}: a request of "
            f"{sizes.max_tokens:,} tokens takes {show_bytes(whole)}, and the pool holds "
            + (
                f"{times:.1f} of them"
                if times >= 1
                else f"no more than {times:.0%} of it: prompts that long are kept in part"
            )
        )
    left = situation.available_bytes - situation.pool_bytes
    wanted = situation.num_replicas * _ENGINE_BYTES
    if 0 <= left < wanted:
        yield (
            f"beside the pool {show_bytes(left)} of memory are left for {situation.num_replicas} "
            f"engines, which take about {show_bytes(wanted)}"
        )


def _notes_on_gpus(
    shape: ModelShape, given: GivenArguments, situation: Situation, sizes: Sizes
) -> Iterator[str]:
    if situation.device == "cuda" and not given.has(_FILE):
        idle = situation.num_gpus - num_gpus_needed(given) * situation.num_replicas
        if idle > 0:
            yield (
                f"{idle} of {situation.num_gpus} GPUs are left idle: more --replicas, or another "
                "--tensor-parallel-size behind --, would use them"
            )
    kv_heads = None if shape.attention is None else shape.attention.num_kv_heads
    if kv_heads is not None and sizes.num_ranks > kv_heads:
        yield (
            f"{sizes.num_ranks} ranks keep {kv_heads} key/value heads: each page is in the pool "
            f"{sizes.num_ranks // kv_heads} times"
        )


def show_bytes(num_bytes: int) -> str:
    """Return bytes for people, to three digits."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return (
                f"{num_bytes / unit:.3g} {name}"
                if num_bytes < 999.5 * unit
                else (f"{num_bytes / unit:.0f} {name}")
            )
    return f"{num_bytes} B"
