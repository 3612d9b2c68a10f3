"""The tree of blocks of one namespace, and the longest prefix found in it.

A node is a block; its parent is the block before it, so every path from the root is a prefix.
A node is in the tree only together with all its ancestors, hence "is key i present" is true
up to some i and false after it, and the longest present prefix is found by bisection. The
same holds for ``ready`` (all EVERY parts of the block and of those before it committed).

That rests on keys being chained digests: key i names the blocks 0..i, so a key that is found
vouches for those before it. ``depth`` guards against lists of keys that are out of step.

As in the allocator there is no object for a node, but a row in columns; row 0 is the root,
the empty prefix. ``slots[p][node]`` is the slot of part p, or NONE.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from millpond.model.errors import InvariantBroken
from millpond.model.names import Coverage
from millpond.pool.allocator import COMMITTED, NONE, RESERVED, SlotTable

ROOT: Final = 0


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part of a namespace's blocks and the table its slots come from.

    ``owner`` is what ``SlotTable.owner`` holds for slots of this part. ``window_blocks`` is
    None unless the coverage is WINDOW.
    """

    number: int
    coverage: Coverage
    window_blocks: int | None
    table: SlotTable
    owner: int
    is_every: bool = field(init=False)
    """Whether each block must have this part; such parts come and go with their node."""
    is_last: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_every", self.coverage is Coverage.EVERY)
        object.__setattr__(self, "is_last", self.coverage is Coverage.LAST)


class Index:
    """The blocks of one namespace; ``rows`` maps a key to its node.

    Links: ``parent``, ``child`` (the youngest), ``older`` and ``younger`` (its siblings).
    """

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self.every = tuple(part for part in parts if part.is_every)
        self.tails = tuple(part for part in parts if not part.is_every)
        """Parts that only a resumable boundary needs: LAST and WINDOW."""
        self.lasts = tuple(part for part in parts if part.is_last)
        self.is_hybrid = bool(self.every and self.lasts)
        """Whether blocks have pages that are of no use without a state."""
        by_last = sorted(self.tails, key=lambda part: not part.is_last)
        self.first_part = (*self.every, *by_last)[0]
        """The part by which blocks are counted: EVERY before LAST before WINDOW."""
        self.clear()

    def clear(self) -> None:
        """Forget every node; the caller has dealt with their slots."""
        self.rows: dict[bytes, int] = {}
        self.keys: list[bytes] = [b""]
        self.parent: array[int] = array("I", [NONE])
        self.child: array[int] = array("I", [NONE])
        self.older: array[int] = array("I", [NONE])
        self.younger: array[int] = array("I", [NONE])
        self.depth: array[int] = array("I", [0])
        self.num_missing = bytearray(1)
        self.ready = bytearray(b"\1")
        self.slots: tuple[array[int], ...] = tuple(array("I", [NONE]) for _ in self.parts)
        self._free: array[int] = array("I")

    # ------------------------------------------------------------ finding

    def longest_ready(self, keys: bytes, key_bytes: int) -> tuple[int, int]:
        """Return how many leading keys are ready, and the node of the last of them."""
        return self._bisect(keys, key_bytes, self.ready)

    def longest_present(self, keys: bytes, key_bytes: int) -> tuple[int, int]:
        """Return how many leading keys are in the tree, and the node of the last of them."""
        return self._bisect(keys, key_bytes, None)

    def _bisect(self, keys: bytes, key_bytes: int, flags: bytearray | None) -> tuple[int, int]:
        find, depth = self.rows.get, self.depth
        found, node = 0, ROOT  # the first `found` keys qualify
        bound = len(keys) // key_bytes  # no more than `bound` do
        probe = bound  # a full hit is the common case: one probe
        while found < bound:
            row = find(keys[(probe - 1) * key_bytes : probe * key_bytes])
            if row is not None and depth[row] == probe and (flags is None or flags[row]):
                found, node = probe, row
            else:
                bound = probe - 1
            probe = (found + bound + 1) // 2
        return found, node

    def find(self, keys: bytes, key_bytes: int, block: int) -> int | None:
        """Return the node of one block of a chain, None where it is absent."""
        row = self.rows.get(keys[block * key_bytes : (block + 1) * key_bytes])
        return row if row is not None and self.depth[row] == block + 1 else None

    def resumable(self, node: int) -> tuple[int, bool]:
        """Return the last node up to ready ``node`` after which a request can resume.

        ROOT where there is none. The flag says that something which a deeper boundary lacks
        is being written now.
        """
        is_pending = False
        # Most blocks have no state; skipping those is the hot loop of a hybrid lookup.
        sparse = self.slots[self.lasts[0].number] if self.lasts else None
        parent = self.parent
        while node != ROOT:
            if sparse is not None:
                while node != ROOT and not sparse[node]:
                    node = parent[node]
            lacking = self._lacking(node)
            if lacking is None:
                break
            part, at = lacking
            slot = self.slots[part.number][at]
            is_pending = is_pending or (slot != NONE and part.table.state[slot] == RESERVED)
            # Every boundary between `at` and `node` needs the window that `at` breaks.
            node = parent[at]
        return node, is_pending

    def _lacking(self, node: int) -> tuple[Part, int] | None:
        """Return a part, and the nearest block without it, that resuming after ``node`` needs."""
        for part in self.tails:
            column, state = self.slots[part.number], part.table.state
            at = node
            for _ in range(part.window_blocks or 1):
                if at == ROOT:
                    break
                if state[column[at]] != COMMITTED:  # state[NONE] is FREE
                    return part, at
                at = self.parent[at]
        return None

    def path(self, node: int, num_blocks: int) -> list[int]:
        """Return the last ``num_blocks`` nodes up to ``node``, in block order."""
        parent = self.parent
        nodes: list[int] = []
        for _ in range(num_blocks):
            nodes.append(node)
            node = parent[node]
        nodes.reverse()
        return nodes

    def slots_up(self, part: Part, node: int) -> Iterator[int]:
        """Yield the slots of ``part`` from ``node`` up to the beginning of its prefix."""
        column, parent = self.slots[part.number], self.parent
        while node != ROOT:
            if column[node]:
                yield column[node]
            node = parent[node]

    def is_fork(self, node: int) -> bool:
        """Return whether more than one block follows ``node``."""
        child = self.child[node]
        return child != NONE and self.older[child] != NONE

    def has_state(self, node: int) -> bool:
        """Return whether ``node`` has a LAST slot, written or being written."""
        return any(self.slots[part.number][node] for part in self.lasts)

    def subtree(self, node: int) -> list[int]:
        """Return ``node`` and all its descendants, each after its parent."""
        nodes = [node]
        for at in nodes:  # grows while it is walked
            if len(nodes) > len(self.keys):
                raise InvariantBroken(f"blocks after {self.keys[node].hex()} form a ring")
            child = self.child[at]
            while child:
                nodes.append(child)
                child = self.older[child]
        return nodes

    # ------------------------------------------------------------ changing

    def add(self, keys: list[bytes], parent: int) -> list[int]:
        """Append blocks without slots to the prefix that ends at ``parent``; return their nodes."""
        num_new = max(0, len(keys) - len(self._free))
        nodes = [self._free.pop() for _ in range(len(keys) - num_new)]
        nodes += range(len(self.keys), len(self.keys) + num_new)
        self._append_rows(num_new)
        depth = self.depth[parent]
        if nodes:
            older = self.child[parent]
            self.older[nodes[0]] = older
            if older:
                self.younger[older] = nodes[0]
        for key, node in zip(keys, nodes, strict=True):
            depth += 1
            self.keys[node] = key
            self.parent[node] = parent
            self.child[parent] = node
            self.depth[node] = depth
            self.num_missing[node] = len(self.every)
            self.ready[node] = not self.every
            self.rows[key] = node
            parent = node
        return nodes

    def _append_rows(self, num_rows: int) -> None:
        self.keys += [b""] * num_rows
        columns = (self.parent, self.child, self.older, self.younger, self.depth, *self.slots)
        for column in columns:
            column.frombytes(bytes(num_rows * column.itemsize))
        self.num_missing.extend(bytes(num_rows))
        self.ready.extend(bytes(num_rows))

    def remove(self, node: int) -> None:
        """Take out a block that has neither children nor slots."""
        has_slot = [True for column in self.slots if column[node]]
        if self.child[node] or has_slot:
            raise InvariantBroken(f"block {self.keys[node].hex()} removed while in use")
        older, younger = self.older[node], self.younger[node]
        if older:
            self.younger[older] = younger
        if younger:
            self.older[younger] = older
        else:
            self.child[self.parent[node]] = older
        del self.rows[self.keys[node]]
        self.keys[node] = b""
        self.ready[node] = 0
        # What ``add`` does not write is as in a new row.
        self.older[node] = self.younger[node] = NONE
        self._free.append(node)

    def note_committed(self, node: int) -> None:
        """Note that one more EVERY part of ``node`` is committed; ready spreads to children."""
        if not self.num_missing[node]:
            raise InvariantBroken(f"block {self.keys[node].hex()} committed once too often")
        self.num_missing[node] -= 1
        spreading = [node]
        while spreading:
            at = spreading.pop()
            if self.num_missing[at] or not self.ready[self.parent[at]]:
                continue
            self.ready[at] = 1
            child = self.child[at]
            while child:
                spreading.append(child)
                child = self.older[child]
