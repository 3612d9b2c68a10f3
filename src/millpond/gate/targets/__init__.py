"""Paths of other projects, each with its own imports, made only when asked for."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from millpond.gate.paths import Path

_HERE: Final = "millpond.gate.targets"

TARGETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "lmcache-raw-pointer": f"{_HERE}.lmcache_copies:raw_pointer",
        "lmcache-mixed-allocator": f"{_HERE}.lmcache_copies:mixed_allocator",
        "lmcache-completion-recorder": f"{_HERE}.lmcache_copies:completion_recorder",
        "lmcache-mp-retrieve": f"{_HERE}.lmcache_retrieve:mp_retrieve",
        "vllm-simple-offload": f"{_HERE}.vllm_offload:simple_offload",
        "vllm-offloading-handlers": f"{_HERE}.vllm_offload:offloading_handlers",
        "vllm-swap-blocks": f"{_HERE}.vllm_swap:swap_blocks",
        "vllm-swap-blocks-batch": f"{_HERE}.vllm_swap:swap_blocks_batch",
    }
)
"""Where each target is made, as "module:factory"; nothing of it is imported before."""


def make_target(name: str) -> "Path":
    """Make a target by its name, or by the "module:factory" of one's own.

    ``ValueError`` where there is no such target; ``CannotTest`` where its package is missing,
    of an unknown version, or not what that version should be.
    """
    where = TARGETS.get(name, name)
    module, colon, factory = where.partition(":")
    if not colon:
        raise ValueError(f"no target {name!r}; there are: {', '.join(TARGETS)}")
    path: Path = getattr(importlib.import_module(module), factory)()
    return path
