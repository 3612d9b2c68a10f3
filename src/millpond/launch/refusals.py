"""What cannot work with a pool, found before anything starts: each with the reason and a remedy.

Only what is certain is refused. What the engine itself would refuse at once is left to it, except
where it would name neither the pool nor the way out.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Final, cast

from millpond.launch.arguments import (
    ENGINE_VERSIONS,
    Choice,
    Situation,
    num_gpus_needed,
    show_bytes,
)
from millpond.launch.given import GivenArguments
from millpond.launch.shape import Kind, ModelShape

_OF_UP: Final[Mapping[str, str]] = {
    "--calculate-kv-scales": "makes each replica scale its pages by its own first batch, so that "
    "none could read another's: use scales from the checkpoint",
    "--headless": "starts an engine without a server, which the router could not ask: leave it out",
    "--kv-offloading-size": "puts vLLM's own connector in the place of Millpond's: leave it out, "
    "and give the memory to --pool",
    "--kv-transfer-config": "would replace Millpond's connector, of which an engine has one: leave "
    "it out; Millpond's settings are those of [connector] in millpond.toml",
    "--model": "is an option of `millpond up` itself: give it before --",
    "--port": "would be the same for all replicas: `millpond up --port` is the router's, and "
    "replicas get those behind it",
    "--ssl-certfile": "makes replicas speak TLS, which router and health checks do not: let what "
    "stands before the router do so",
    "--ssl-keyfile": "makes replicas speak TLS, which router and health checks do not: let what "
    "stands before the router do so",
    "--uds": "takes a replica off the address where the router asks it: leave it out",
    "--use-replayssm": "does not work beside any connector: leave it out",
}
_EVENTS: Final = "--kv-events-config"
_EVENTS_ENDPOINT: Final = "tcp://*:5557"
"""Where vLLM publishes by default."""
_ALONE: Final = (
    "--decode-context-parallel-size",
    "--pipeline-parallel-size",
    "--prefill-context-parallel-size",
)
_SPECULATION: Final = ("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens")
_HOSTS: Final = ("127.0.0.1", "localhost", "0.0.0.0", "::", "")  # noqa: S104 - not bound
"""Where 127.0.0.1 is answered; at :: wherever the kernel has not been told otherwise."""


def find_refusals(
    shape: ModelShape, given: GivenArguments, situation: Situation, choice: Choice
) -> list[str]:
    """Return what keeps a system from working; empty where nothing does."""
    return [
        *_of_model(shape, situation),
        *_of_options(given, situation),
        *(_of_hybrids(given) if shape.kind is Kind.HYBRID else ()),
        *_of_gpus(shape, given, situation),
        *_of_memory(situation, choice),
    ]


def _of_model(shape: ModelShape, situation: Situation) -> Iterator[str]:
    oldest, newest = (f"{major}.{minor}" for major, minor in ENGINE_VERSIONS)
    if situation.is_before(ENGINE_VERSIONS[0]):
        yield (
            f"vLLM {situation.engine_version} is older than the connector's interface: install "
            f"{oldest} to {newest}"
        )
    name = f"{shape.kind.value} model {shape.architecture}".strip()
    if shape.kind is Kind.RECURRENT:
        yield (
            f"a {name} has recurrent layers alone, whose prefixes vLLM does not keep: there is "
            "nothing to share. Start vLLM without a pool"
        )
    if shape.kind is Kind.FOREIGN:
        yield (
            f"{shape.architecture or 'this model'} keeps its keys and values in a way that is not "
            "known here (an encoder's, in chunks, or compressed): its engines would serve without "
            "the pool. Start vLLM without one"
        )
    if shape.architecture == "Qwen3_5ForCausalLM" and situation.is_before((0, 27)):
        yield (
            "vLLM 0.26 serves Qwen3.5 with its image part alone (Qwen3_5ForConditionalGeneration) "
            "and refuses a text-only checkpoint: use the whole one, or vLLM 0.27 or later"
        )
    is_next = shape.architecture == "Qwen3NextForCausalLM"
    if is_next and situation.device == "cpu" and situation.is_before((0, 28)):
        yield "vLLM 0.27 for CPUs computes no numbers for Qwen3-Next: use a later one"


def _of_options(given: GivenArguments, situation: Situation) -> Iterator[str]:
    for name, why in _OF_UP.items():
        if given.has(name):
            yield f"{name} {why}"
    if situation.num_replicas > 1 and _listens(given.value(_EVENTS) or ""):
        yield (
            f"{_EVENTS} would have {situation.num_replicas} replicas publish at one address: leave "
            "it out, or start replicas by hand, each with its own"
        )
    for name in _ALONE:
        if given.count(name) > 1:
            yield (
                f"{name} {given.value(name)} cuts pages in a way that Millpond does not know: "
                "leave it out, and use --tensor-parallel-size"
            )
    host = given.value("--host")
    if host is not None and host not in _HOSTS:
        yield f"--host {host} takes replicas off 127.0.0.1, where they are asked: leave it out"


def _listens(events_config: str) -> bool:
    """Say whether an engine with this configuration listens somewhere: vLLM's ZmqEventPublisher."""
    try:
        config: object = json.loads(events_config)
    except ValueError:
        return False
    if not isinstance(config, dict):
        return False
    options = cast("dict[str, object]", config)
    endpoint = str(options.get("endpoint", _EVENTS_ENDPOINT))
    is_bound = "*" in endpoint or not endpoint.startswith("tcp://")
    is_on = bool(options.get("enable_kv_cache_events"))
    return is_on and (is_bound or options.get("replay_endpoint") is not None)


def _of_hybrids(given: GivenArguments) -> Iterator[str]:
    why = "a request resumes from a recurrent state, "
    if given.is_on("--enable-prefix-caching") is False:
        yield f"{why}and vLLM keeps none with --no-enable-prefix-caching: leave it out"
    mode = given.value("--mamba-cache-mode")
    if mode in ("none", "all"):
        kept = "none" if mode == "none" else "one at every block, four times the memory"
        yield f"{why}and --mamba-cache-mode {mode} keeps {kept}: use align, or leave it out"
    if given.is_on("--enable-chunked-prefill") is False:
        yield (
            f"{why}which vLLM keeps between the steps of a prompt: leave out "
            "--no-enable-chunked-prefill"
        )
    if given.is_on("--disable-chunked-mm-input"):
        yield f"{why}which vLLM keeps inside of images too: leave out --disable-chunked-mm-input"
    if given.is_on("--disable-hybrid-kv-cache-manager"):
        yield "a hybrid needs vLLM's manager for it: leave out --disable-hybrid-kv-cache-manager"
    if given.has("--prefix-match-unit"):
        yield f"{why}which --prefix-match-unit puts inside of blocks: leave it out"
    if given.has(*_SPECULATION):
        yield (
            "speculative decoding keeps scratch states between those that a request resumes "
            "from: a hybrid would serve without the pool. Leave it out"
        )


def _of_gpus(shape: ModelShape, given: GivenArguments, situation: Situation) -> Iterator[str]:
    each = num_gpus_needed(given)
    needed = each * situation.num_replicas
    if situation.device == "cuda" and needed > situation.num_gpus:
        sizes = f" of {each} GPUs each" if each > 1 else ""
        yield (
            f"{situation.num_replicas} replicas{sizes} need {needed} GPUs and "
            f"{situation.num_gpus} can be used: ask for fewer replicas or ranks, or check "
            "CUDA_VISIBLE_DEVICES"
        )
    num_ranks = given.count("--tensor-parallel-size")
    if shape.num_heads is not None and shape.num_heads % num_ranks:
        yield (
            f"--tensor-parallel-size {num_ranks} does not divide the model's {shape.num_heads} "
            "attention heads: choose a divisor"
        )


def _of_memory(situation: Situation, choice: Choice) -> Iterator[str]:
    pool_bytes, sizes = situation.pool_bytes, choice.sizes
    if pool_bytes > situation.available_bytes:
        yield (
            f"a pool of {show_bytes(pool_bytes)} does not fit: the machine, or a cgroup, leaves "
            f"{show_bytes(situation.available_bytes)}. Choose a smaller --pool"
        )
    if sizes.token_bytes is None:
        return
    block_bytes = sizes.block_tokens * sizes.token_bytes
    if block_bytes + sizes.state_bytes > pool_bytes:
        yield (
            f"a pool of {show_bytes(pool_bytes)} does not hold the first block of a prompt, "
            f"{sizes.block_tokens} tokens in {show_bytes(block_bytes + sizes.state_bytes)}: "
            "choose a larger --pool"
        )
    elif sizes.state_bytes > pool_bytes * situation.state_ratio:
        yield (
            f"recurrent states may take {situation.state_ratio:.0%} of a pool of "
            f"{show_bytes(pool_bytes)}, and one has {show_bytes(sizes.state_bytes)}: choose a "
            "larger --pool, or another pool.state_ratio"
        )
