"""A CPU engine whose answers do not depend, to the last bit, on how requests were batched.

    vllm serve ... --worker-extension-cls millpond.gate.targets.exact_worker.ExactSums

An engine adds up in another order when a request shares a step with others, when its prompt is
cut elsewhere, or when tokens that it had decoded are computed again in one go, as after a
preemption. Rounding then differs, and a wrong byte hides behind it. Here each token is computed
by itself, so that whatever differs is wrong data:

    matrix products   in 64 bits, and rounded once
    attention         each token is a request of its own, with the pages before it
    recurrent states  each token is a decode step of its own

For decoders as tiny as the gate's: a prompt of 1,000 tokens takes a second or two. What is called
otherwise than is known here goes on as before; whether sums are exact shows in answers
(``service_launched.inexact_sums``).
"""

import dataclasses
import functools
import itertools
from typing import Any, Final

import torch

_ONE_TOKEN: Final = (0, 1)


def make_exact(utils: Any, ops: Any, gdn: Any) -> None:  # noqa: ANN401 - modules of vLLM
    """Change vLLM's layer utilities, its operations and its gated delta nets; all or none.

    Raises ``AttributeError`` where a version has other functions.
    """
    dispatch = utils.dispatch_cpu_unquantized_gemm
    attend, plan = ops.cpu_attention_with_kv_cache, ops.cpu_attn_get_scheduler_metadata
    step = gdn._cpu_gdn_attention_nonspec  # noqa: SLF001
    utils.dispatch_cpu_unquantized_gemm = _exact_products(dispatch)
    ops.cpu_attn_get_scheduler_metadata = _remembered(plan)
    ops.cpu_attention_with_kv_cache = _token_by_token(attend, plan)
    gdn._cpu_gdn_attention_nonspec = _step_by_step(step)  # noqa: SLF001


def _exact_products(original: Any) -> Any:  # noqa: ANN401
    @functools.wraps(original)
    def dispatch(layer: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401
        weight = layer.weight
        is_product = weight.ndim == 2 and not weight.is_meta
        exact = weight.detach().double() if is_product else None
        original(layer, *rest, **named)  # may give the weight away
        if exact is not None:
            layer.cpu_linear = functools.partial(_product, exact)

    return dispatch


def _product(
    exact: torch.Tensor, x: torch.Tensor, _weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    added = None if bias is None else bias.double()
    return torch.nn.functional.linear(x.double(), exact, added).to(x.dtype)


def _remembered(plan: Any) -> Any:  # noqa: ANN401
    @functools.wraps(plan)
    def planned(*args: Any, **asked: Any) -> Any:  # noqa: ANN401
        made = plan(*args, **asked)
        if not args:
            made.asked = asked  # the tensor itself comes back with the pages
        return made

    return planned


def _token_by_token(attend: Any, plan: Any) -> Any:  # noqa: ANN401
    @functools.wraps(attend)
    def attended(*args: Any, **asked: Any) -> Any:  # noqa: ANN401
        whole: Any = getattr(asked.get("scheduler_metadata"), "asked", None)
        is_plain = asked.get("causal") and asked.get("dynamic_causal") is None
        if args or whole is None or not is_plain:
            return attend(*args, **asked)
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
        tables = asked["block_table"][: len(numbers)].repeat_interleave(numbers, 0).contiguous()
        planned = plan(**(whole | one_each | {"num_reqs": total, "enable_kv_split": False}))
        each = one_each | {"block_table": tables, "scheduler_metadata": planned}
        return attend(**(asked | each))

    return attended


def _step_by_step(original: Any) -> Any:  # noqa: ANN401
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

    return attended
