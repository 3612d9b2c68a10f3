"""What is changed of an engine for exact sums: each token by itself, and nothing else."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from millpond.gate.targets.exact_sums import make_exact


@dataclass
class Metadata:
    """As vLLM's for gated delta nets, as far as it is used."""

    num_decodes: int
    num_prefills: int
    non_spec_query_start_loc: torch.Tensor
    non_spec_state_indices_tensor: torch.Tensor
    has_initial_state: torch.Tensor | None
    num_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_actual_tokens: int = 0


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Engine:
    """Stands for vLLM's modules: notes what is called, and how."""

    def __init__(self) -> None:
        self.attended: list[dict[str, Any]] = []
        self.planned: list[dict[str, Any]] = []
        self.stepped: list[tuple[Any, tuple[torch.Tensor, ...]]] = []
        self.utils: Any = SimpleNamespace(dispatch_cpu_unquantized_gemm=self._dispatch)
        self.ops: Any = SimpleNamespace(
            cpu_attention_with_kv_cache=lambda **asked: self.attended.append(asked),
            cpu_attn_get_scheduler_metadata=self._plan,
        )
        self.gdn: Any = SimpleNamespace(
            _cpu_gdn_attention_nonspec=lambda _, one, *tokens: self.stepped.append((one, tokens))
        )

    def make_exact(self) -> None:
        make_exact(self.utils, self.ops, self.gdn)

    def _dispatch(self, layer: Any, remove_weight: bool) -> None:  # noqa: ANN401
        layer.cpu_linear = torch.nn.functional.linear
        if remove_weight:
            layer.weight = torch.empty(0)

    def _plan(self, **asked: Any) -> torch.Tensor:  # noqa: ANN401
        self.planned.append(asked)
        return torch.zeros(1)


@pytest.fixture
def engine() -> Engine:
    made = Engine()
    made.make_exact()
    return made


def test_a_product_is_rounded_once(engine: Engine) -> None:
    """Large terms that cancel: sums in 16 bits, or in another order, would lose the small one."""
    layer: Any = SimpleNamespace(weight=torch.tensor([[256.0, 1.0, -256.0]], dtype=torch.bfloat16))
    engine.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    x = torch.tensor([[2.0**20, 3.0, 2.0**20]], dtype=torch.bfloat16)
    made = layer.cpu_linear(x, layer.weight, torch.tensor([0.5], dtype=torch.bfloat16))
    assert made.dtype == torch.bfloat16
    assert made.tolist() == [[3.5]]


@pytest.mark.parametrize("weight", [torch.zeros(2, 1, 4), torch.zeros(2, 2, device="meta")])
def test_what_is_no_product_is_the_engines_affair(engine: Engine, weight: torch.Tensor) -> None:
    layer: Any = SimpleNamespace(weight=weight)
    engine.utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    assert layer.cpu_linear is torch.nn.functional.linear


def attend(engine: Engine, **changes: object) -> dict[str, Any]:
    plan = engine.ops.cpu_attn_get_scheduler_metadata(
        num_reqs=2,
        seq_lens=ints(7, 4),
        query_start_loc=ints(0, 1, 4),
        enable_kv_split=True,
        isa="x",
    )
    asked: dict[str, Any] = {
        "query": "tokens",
        "query_start_loc": ints(0, 1, 4),
        "seq_lens": ints(7, 4),
        "block_table": ints(10, 11, 20, 21).reshape(2, 2),
        "scheduler_metadata": plan,
        "causal": True,
        "dynamic_causal": None,
    } | changes
    engine.ops.cpu_attention_with_kv_cache(**asked)
    return asked


def test_each_token_is_a_request_with_what_is_before_it(engine: Engine) -> None:
    """One token of a request of 7, and the last three of one of 4."""
    attend(engine)
    (made,) = engine.attended
    assert made["query"] == "tokens"
    assert made["query_start_loc"].tolist() == [0, 1, 2, 3, 4]
    assert made["seq_lens"].tolist() == [7, 2, 3, 4]
    assert made["block_table"].tolist() == [[10, 11], [20, 21], [20, 21], [20, 21]]
    whole, each = engine.planned
    assert (whole["num_reqs"], each["num_reqs"]) == (2, 4)
    assert each["seq_lens"] is made["seq_lens"]
    assert each["query_start_loc"] is made["query_start_loc"]
    assert (each["enable_kv_split"], each["isa"]) == (False, "x")


@pytest.mark.parametrize(
    "changes",
    [
        {"causal": False},
        {"dynamic_causal": torch.zeros(1)},
        {"scheduler_metadata": torch.zeros(1)},  # of somebody else's making
    ],
)
def test_other_attention_is_the_engines_affair(engine: Engine, changes: dict[str, object]) -> None:
    asked = attend(engine, **changes)
    assert engine.attended == [asked]


def test_each_token_is_a_step_of_its_own(engine: Engine) -> None:
    """A decode at state 5, a new request at state 6, and one at state 7 that goes on."""
    states = [torch.ones(9, 2), torch.ones(9, 3)]
    metadata = Metadata(
        num_decodes=1,
        num_prefills=2,
        non_spec_query_start_loc=ints(0, 1, 3, 4),
        non_spec_state_indices_tensor=ints(5, 6, 7),
        has_initial_state=torch.tensor([True, False, True]),
    )
    tokens = tuple(torch.arange(4.0) + 10 * i for i in range(4))
    engine.gdn._cpu_gdn_attention_nonspec(SimpleNamespace(kv_cache=states), metadata, *tokens)
    assert [int(one.non_spec_state_indices_tensor) for one, _ in engine.stepped] == [5, 6, 6, 7]
    assert [[int(t) for t in given] for _, given in engine.stepped] == [
        [i, 10 + i, 20 + i, 30 + i] for i in range(4)
    ]
    for one, _ in engine.stepped:
        assert (one.num_decodes, one.num_decode_tokens, one.num_actual_tokens) == (1, 1, 1)
        assert (one.num_prefills, one.num_prefill_tokens) == (0, 0)
        assert one.non_spec_query_start_loc.tolist() == [0, 1]
    for state in states:
        assert [int(row.sum()) for row in state] == [
            *[state.shape[1]] * 6,
            0,
            *[state.shape[1]] * 2,
        ]


@pytest.mark.parametrize(
    "lose",
    [
        lambda engine: delattr(engine.utils, "dispatch_cpu_unquantized_gemm"),
        lambda engine: delattr(engine.ops, "cpu_attn_get_scheduler_metadata"),
        lambda engine: delattr(engine.gdn, "_cpu_gdn_attention_nonspec"),
    ],
)
def test_all_is_changed_or_nothing(lose: Callable[[Engine], None]) -> None:
    engine = Engine()
    lose(engine)
    before = [vars(module).copy() for module in (engine.utils, engine.ops, engine.gdn)]
    with pytest.raises(AttributeError):
        engine.make_exact()
    assert [vars(module) for module in (engine.utils, engine.ops, engine.gdn)] == before
