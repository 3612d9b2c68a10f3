"""Which of the states within a prompt are stored: docs/decisions/0013-states-within-a-prompt.md.

A state is as large as the pages of thousands of tokens, and one within a prompt resumes one
request in many. The first that a request computes is stored, since prompts fork there, and
another for each so many pages that it has computed. The end of the prompt, and what decoding
reaches, is where the next turn resumes, and a state that is there already costs nothing.
"""

from collections.abc import Sequence
from typing import Any, Final

from millpond.connector.geometry import EngineLayout
from millpond.connector.requests import RequestState
from millpond.model.names import Coverage

_PAGES: Final = 8
"""Pages, in multiples of a state's bytes, for each state within a prompt but the first."""


class InnerStates:
    """Blocks are those of ``layout``; ``offered[p]`` are blocks at which part p could be stored."""

    def __init__(self, layout: EngineLayout) -> None:
        self._layout = layout
        self._blocks = _PAGES * layout.state_blocks

    def thinned(self, state: RequestState, offered: Sequence[list[int]]) -> tuple[list[int], ...]:
        """Leave out of what is offered the states within the prompt that would be too many."""
        num_inner, start_blocks = state.num_inner_states, state.start_blocks or 0
        dropped: set[int] = set()
        for block in sorted(self._inner(state, offered)):
            if num_inner * self._blocks <= block + 1 - start_blocks:
                num_inner += 1
            else:
                dropped.add(block)
        return tuple(
            [block for block in blocks if block not in dropped] if is_state else blocks
            for blocks, is_state in zip(offered, self._is_state, strict=True)
        )

    def number(self, state: RequestState, offered: Sequence[list[int]]) -> int:
        """Return how many of the states that are offered lie within the prompt."""
        return len(self._inner(state, offered))

    @property
    def _is_state(self) -> list[bool]:
        return [coverage is Coverage.LAST for coverage in self._layout.coverages]

    def _inner(self, state: RequestState, offered: Sequence[list[int]]) -> set[int]:
        ends = {
            block
            for blocks, is_state in zip(offered, self._is_state, strict=True)
            if is_state
            for block in blocks
        }
        return {block for block in ends if self._is_inner(state, block)}

    def _is_inner(self, state: RequestState, block: int) -> bool:
        request: Any = state.request
        tokens = self._layout.block_tokens
        # Where the engine stops a step for others that were seen to share just that prefix.
        if block + 1 == request.shared_prefix_boundary // tokens:
            return False
        return (state.start_blocks or 0) < block + 1 < (request.num_tokens - 1) // tokens
