"""A wrong page on purpose: the control of every comparison of outputs.

Only for a pool that was started for this: the arena is written behind everybody's back.
"""

import mmap
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from millpond.gate.service_pair import A, B, CannotCheck, Mismatch, Pair, new_salt
from millpond.model.limits import ARENA_HEADER_BYTES

LAYERS: Final = {0: 2, 1: 6}
"""Layers whose pages lie in a slot, by part: attention's, and states, of the tiny hybrid."""
_ARENA_NAME: Final = "memfd:millpond-arena"
_BLOCKS_MAX: Final = 16


def corruption(pair: Pair) -> int:
    """Change one page of one block, for each kind of page; the moved request must notice.

    Returns the tokens compared; raises ``Mismatch`` where the output stays as it was.
    """
    num_compared = 0
    for part, num_layers in LAYERS.items():
        with pair.admin() as admin:
            admin.flush()
        ids, salt = pair.prompt(2 * pair.block + 20), new_salt()
        reference = pair.reference(ids)
        num_compared += pair.compare(pair.ask(A, ids, salt), reference, "before the corruption")
        pair.settle()
        _corrupt(pair, part, num_layers)
        answer = pair.ask(B, ids, salt)
        pair.require_loaded(answer, "the corrupted prefix", [2 * pair.block])
        if not pair.is_changed(answer, reference):
            raise Mismatch(
                f"cannot see: one page of part {part} was overwritten with zeros, and the "
                "answer of the request that loaded it is the same"
            )
        num_compared += len(answer.token_ids)
        with pair.admin() as admin:
            admin.flush()
    return num_compared


def _corrupt(pair: Pair, part: int, num_layers: int) -> None:
    """Overwrite the first layer's page of a part of the second block with zeros."""
    with pair.admin() as admin:
        blocks = cast("tuple[dict[str, Any], ...]", admin.blocks(_BLOCKS_MAX))
        pid = cast("Mapping[str, Any]", admin.status()["service"])["pid"]
    slots = [
        slot
        for block in blocks
        for slot in block["slots"]
        if block["block"] == 1 and slot["part"] == part
    ]
    if len(slots) != 1:
        raise CannotCheck(f"block 1 has {len(slots)} slots of part {part}")
    start, num_bytes = slots[0]["offset"], slots[0]["slot_bytes"] // num_layers
    with _arena(pid) as memory:
        page = slice(ARENA_HEADER_BYTES + start, ARENA_HEADER_BYTES + start + num_bytes)
        if not any(memory[page]):
            raise CannotCheck("the page is all zeros already")
        memory[page] = bytes(num_bytes)


@contextmanager
def _arena(pid: int) -> Generator[mmap.mmap]:
    folder = Path(f"/proc/{pid}/fd")
    path = next((p for p in folder.iterdir() if _ARENA_NAME in str(p.readlink())), None)
    if path is None:
        raise CannotCheck(f"process {pid} has no arena")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory
