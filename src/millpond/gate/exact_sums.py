"""A CPU engine whose answers do not depend, to the last bit, on how requests were batched.

    vllm serve ... --worker-extension-cls millpond.gate.exact_sums.ExactSums

An engine adds up in another order when a request shares a step with others, when its prompt is
cut elsewhere, or when tokens that it had decoded are computed again in one go, as after a
preemption. Rounding then differs, and a wrong byte hides behind it. Here each token is computed
by itself, so that whatever differs is wrong data:

    matrix products   in 64 bits, and rounded once
    attention         each token is a request of its own, with the pages before it
    recurrent states  each token is a decode step of its own

For the gate's tiny models: a prompt of 1,000 tokens takes a second or two. The module changes
vLLM where a worker imports it, before its model is loaded. A version that has other functions
stays as it is; whether sums are exact shows in answers (``service_launched.are_sums_exact``).
"""

import dataclasses
import functools
import importlib
import itertools
import logging
from typing import Any, Final

import torch

logger = logging.getLogger("vllm.millpond")

_LAYERS: Final = "vllm.model_executor.layers"
_ONE_TOKEN: Final = (0, 1)


class ExactSums:
    """Nothing: vLLM wants a class, and what counts is that its module was imported."""


def _exact_products() -> None:
    engine: Any = importlib.import_module(f"{_LAYERS}.utils")
    original = engine.dispatch_cpu_unquantized_gemm

    @functools.wraps(original)
    def dispatch(layer: Any, remove_weight: bool) -> None:  # noqa: ANN401, FBT001 - as vLLM calls it
        weight = layer.weight
        is_product = weight.ndim == 2 and not weight.is_meta
        exact = weight.detach().double() if is_product else None
        original(layer, remove_weight)
        if exact is not None:
            layer.cpu_linear = functools.partial(_product, exact)

    engine.dispatch_cpu_unquantized_gemm = dispatch


def _product(
    exact: torch.Tensor, x: torch.Tensor, _weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    added = None if bias is None else bias.double()
    return torch.nn.functional.linear(x.double(), exact, added).to(x.dtype)


def _exact_attention() -> None:
    engine: Any = importlib.import_module("vllm._custom_ops")
    attend, plan = engine.cpu_attention_with_kv_cache, engine.cpu_attn_get_scheduler_metadata

    @functools.wraps(plan)
    def planned(**asked: Any) -> Any:  # noqa: ANN401
        made = plan(**asked)
        made.asked = asked  # the tensor itself comes back with the pages
        return made

    @functools.wraps(attend)
    def attended(**asked: Any) -> None:  # noqa: ANN401
        ends = asked["query_start_loc"].tolist()
        numbers = torch.tensor([b - a for a, b in itertools.pairwise(ends)])
        total = int(numbers.sum())
        # Token i of n that a request has in this step sees the request's length less n - 1 - i.
        missing = torch.cat([torch.arange(int(n) - 1, -1, -1) for n in numbers])
        lengths = asked["seq_lens"][: len(numbers)].repeat_interleave(numbers) - missing
        one_each = {
            "query_start_loc": torch.arange(total + 1, dtype=torch.int32),
            "seq_lens": lengths.to(torch.int32),
        }
        whole = asked["scheduler_metadata"].asked
        each = whole | one_each | {"num_reqs": total, "enable_kv_split": False}
        tables = asked["block_table"][: len(numbers)].repeat_interleave(numbers, 0).contiguous()
        attend(**(asked | one_each | {"block_table": tables, "scheduler_metadata": plan(**each)}))

    engine.cpu_attn_get_scheduler_metadata = planned
    engine.cpu_attention_with_kv_cache = attended


def _exact_states() -> None:
    engine: Any = importlib.import_module(f"{_LAYERS}.mamba.ops.cpu.gdn_attention")
    original = engine._cpu_gdn_attention_nonspec  # noqa: SLF001

    @functools.wraps(original)
    def attended(layer: Any, metadata: Any, *tokens: torch.Tensor) -> None:  # noqa: ANN401
        num_requests = metadata.num_decodes + metadata.num_prefills
        ends = metadata.non_spec_query_start_loc[: num_requests + 1].tolist()
        for request, (begin, end) in enumerate(itertools.pairwise(ends)):
            slot = metadata.non_spec_state_indices_tensor[request : request + 1].contiguous()
            is_decode = request < metadata.num_decodes
            if not is_decode and not bool(metadata.has_initial_state[request]):
                for cache in layer.kv_cache:
                    cache[slot.long()] = 0
            one = dataclasses.replace(
                metadata,
                num_decodes=1,
                num_decode_tokens=1,
                num_prefills=0,
                num_prefill_tokens=0,
                num_actual_tokens=1,
                has_initial_state=None,
                non_spec_query_start_loc=torch.tensor(_ONE_TOKEN, dtype=torch.int32),
                non_spec_state_indices_tensor=slot,
            )
            for token in range(begin, end):
                original(layer, one, *(rows[token : token + 1] for rows in tokens))

    engine._cpu_gdn_attention_nonspec = attended  # noqa: SLF001


def _allow_tiles() -> None:
    """Ask the system for the tile registers that attention uses; products did it otherwise."""
    ask: Any = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()


for _change in (_allow_tiles, _exact_products, _exact_attention, _exact_states):
    try:
        _change()
    except (ImportError, AttributeError) as error:
        logger.warning("event=sums_not_exact what=%s reason=%r", _change.__name__, str(error))
