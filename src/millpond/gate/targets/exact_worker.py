"""What vLLM imports into its workers: from then on their sums are exact (``exact_sums``).

Import it nowhere else: it changes vLLM in the process.
"""

import importlib
import logging
from typing import Any

import torch

from millpond.gate.targets.exact_sums import make_exact

logger = logging.getLogger("vllm.millpond")

_LAYERS = "vllm.model_executor.layers"


class ExactSums:
    """Nothing: vLLM wants a class, and what counts is that its module was imported."""


def _apply() -> None:
    # Attention uses the processor's tile registers, which products have asked the system for.
    ask: Any = getattr(torch.cpu, "_init_amx", None)
    if ask is not None:
        ask()
    try:
        make_exact(
            importlib.import_module(f"{_LAYERS}.utils"),
            importlib.import_module("vllm._custom_ops"),
            importlib.import_module(f"{_LAYERS}.mamba.ops.cpu.gdn_attention"),
        )
    except (ImportError, AttributeError) as error:
        logger.warning("event=sums_not_exact reason=%r", str(error))


_apply()
