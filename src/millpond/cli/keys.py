"""The blocks that a daemon describes, put together: totals, ends of prefixes, one chain."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from millpond.cli.figures import Tree


@dataclass(frozen=True, slots=True)
class Slot:
    """One part of a block: where it lies, who wrote it, and how many leases hold it."""

    part: int
    offset: int
    slot_bytes: int
    state: str
    num_holds: int
    writer: str


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a prefix. ``is_ready``: the attention pages up to it are all committed."""

    namespace: int
    key: str
    parent: str
    block: int
    is_ready: bool
    slots: tuple[Slot, ...]


class Blocks:
    """Some blocks of a pool, each after the one before it in its prefix."""

    def __init__(self, described: Sequence[Tree]) -> None:
        self.all = msgspec.convert(described, list[Block])
        # The same key may stand in two namespaces.
        self._by_key = {(block.namespace, block.key): block for block in self.all}

    def named(self, key_prefix: str) -> list[Block]:
        """Return the blocks whose key begins so."""
        return [block for block in self.all if block.key.startswith(key_prefix)]

    def chain(self, last: Block) -> list[Block]:
        """Return the prefix that ends with ``last``, from block 0 on."""
        found = [last]
        while found[-1].block:
            found.append(self._by_key[last.namespace, found[-1].parent])
        return found[::-1]

    def ends(self) -> list[Block]:
        """Return the blocks that none follows: each stands for a whole prefix."""
        followed = {(block.namespace, block.parent) for block in self.all if block.block}
        return [block for block in self.all if (block.namespace, block.key) not in followed]

    def summary(self) -> list[dict[str, object]]:
        """Return totals for each namespace and part."""
        return list(self._totals())

    def _totals(self) -> Iterator[dict[str, object]]:
        ends = Counter(block.namespace for block in self.ends())
        for namespace in sorted({block.namespace for block in self.all}):
            blocks = [block for block in self.all if block.namespace == namespace]
            yield {
                "namespace": namespace,
                "num_blocks": len(blocks),
                "num_ready": sum(block.is_ready for block in blocks),
                "num_prefixes": ends[namespace],
                "longest_prefix": 1 + max(block.block for block in blocks),
                "parts": [_part(blocks, part) for part in _parts(blocks)],
            }


def _parts(blocks: Sequence[Block]) -> list[int]:
    return sorted({slot.part for block in blocks for slot in block.slots})


def _part(blocks: Sequence[Block], part: int) -> dict[str, object]:
    slots = [slot for block in blocks for slot in block.slots if slot.part == part]
    return {
        "part": part,
        "num_slots": len(slots),
        "slot_bytes": slots[0].slot_bytes,
        "num_held": sum(slot.num_holds > 0 for slot in slots),
        "num_by_state": dict(Counter(slot.state for slot in slots)),
        "num_by_writer": dict(Counter(slot.writer for slot in slots)),
    }
