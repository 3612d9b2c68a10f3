"""Which states of a request lie within its prompt, and which of those are stored."""

from collections.abc import Sequence
from typing import Any

from millpond.connector.geometry import EngineLayout
from millpond.connector.requests import RequestState
from millpond.model.inner_states import INNER_PAGES, kept_ends
from millpond.model.names import Coverage


class InnerStates:
    """Blocks are those of ``layout``; ``offered[p]`` are blocks at which part p could be stored."""

    def __init__(self, layout: EngineLayout) -> None:
        self._layout = layout
        self._blocks_each = INNER_PAGES * layout.state_blocks

    def thinned(self, state: RequestState, offered: Sequence[list[int]]) -> tuple[list[int], ...]:
        """Leave out of what is offered the states within the prompt that would be too many."""
        inner = self._inner_ends(state, offered)
        dropped = inner - kept_ends(
            inner,
            start_blocks=state.start_blocks or 0,
            num_kept=state.num_inner_states,
            blocks_each=self._blocks_each,
        )
        return tuple(
            [block for block in blocks if block + 1 not in dropped] if is_state else blocks
            for blocks, is_state in zip(offered, self._is_state, strict=True)
        )

    def number(self, state: RequestState, offered: Sequence[list[int]]) -> int:
        """Return how many of the states that are offered lie within the prompt."""
        return len(self._inner_ends(state, offered))

    @property
    def _is_state(self) -> list[bool]:
        return [coverage is Coverage.LAST for coverage in self._layout.coverages]

    def _inner_ends(self, state: RequestState, offered: Sequence[list[int]]) -> set[int]:
        ends = {
            block + 1
            for blocks, is_state in zip(offered, self._is_state, strict=True)
            if is_state
            for block in blocks
        }
        return {end for end in ends if self._is_inner(state, end)}

    def _is_inner(self, state: RequestState, end: int) -> bool:
        request: Any = state.request
        tokens = self._layout.block_tokens
        # Where the engine stops a step for others that were seen to share just that prefix.
        if end == request.shared_prefix_boundary // tokens:
            return False
        return (state.start_blocks or 0) < end < (request.num_tokens - 1) // tokens
