"""Which of the states within a prompt are stored: docs/decisions/0013-states-within-a-prompt.md.

A state is as large as the pages of thousands of tokens, and one within a prompt resumes one
request in many. The first that a request computes is stored, since prompts fork there, and
another for each so many pages that it has computed. The end of the prompt, and what decoding
reaches, is where the next turn resumes, and a state that is there already costs nothing.
"""

from collections.abc import Iterable
from typing import Final

INNER_PAGES: Final = 8
"""Pages, in multiples of a state's bytes, for each state within a prompt but the first."""


def kept_ends(
    ends: Iterable[int], *, start_blocks: int, num_kept: int, blocks_each: float
) -> set[int]:
    """Return at which of ``ends``, all within one prompt, a state is stored.

    Ends are in blocks from the prompt's start. ``num_kept`` states have been stored since the
    request began to compute at ``start_blocks``, and each but the first takes ``blocks_each``.
    """
    kept: set[int] = set()
    for end in sorted(ends):
        if (num_kept + len(kept)) * blocks_each <= end - start_blocks:
            kept.add(end)
    return kept
