"""Which states, and which pages of hybrid models, serve nobody any more.

A conversation is a chain of blocks with a state after some of them. Its next turn resumes from
the deepest; earlier ones (ends of scheduler steps, of former turns) are needed only by a
request that leaves the chain in between. So of two states in a chain that does not fork, the
earlier one is *superseded* once the deeper one is there. Where the chain forks, several
conversations begin with the same blocks (a system prompt), and the state before stays.

Pages can be used only up to a state. Those after the last one are *stranded* when it has left.

Both are marked spare, which makes them the first to be evicted; nothing else depends on it.
"""

from __future__ import annotations

from millpond.pool.allocator import COMMITTED
from millpond.pool.index import ROOT, Index, Part


def state_committed(index: Index, part: Part, node: int) -> None:
    """Note that ``node`` has a state now: pages before it are of use, the state before is not."""
    if index.is_hybrid:
        _mark_pages(index, node, is_spare=False)
    column, table = index.slots[part.number], part.table
    at = index.parent[node]
    while at != ROOT and not index.is_fork(at):
        slot = column[at]
        if slot:
            if table.state[slot] == COMMITTED:
                table.mark(slot, is_spare=True)
            return
        at = index.parent[at]


def state_read(part: Part, slot: int) -> None:
    """Note that somebody has resumed from a state: it serves after all."""
    part.table.mark(slot, is_spare=False)


def state_left(index: Index, part: Part, node: int) -> None:
    """Note that a state after ``node`` has left: the one before it may be the deepest now.

    Not for spare ones: what has superseded them has superseded the one before, too.
    """
    for slot in index.slots_up(part, node):
        part.table.mark(slot, is_spare=False)
        return


def strand(index: Index, node: int) -> None:
    """Mark the pages of ``node`` if the last state in or after it has been evicted."""
    if index.is_hybrid and node != ROOT and not index.child[node] and not index.has_state(node):
        _mark_pages(index, node, is_spare=True)


def _mark_pages(index: Index, node: int, *, is_spare: bool) -> None:
    for part in index.every:
        part.table.mark(index.slots[part.number][node], is_spare=is_spare)
