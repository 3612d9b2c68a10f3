"""Replicas that could disagree about bytes never share, and are told why."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from millpond.model.names import Coverage
from millpond.model.namespace import Namespace, PartSpec
from millpond.service.client import ReplicaIdentity
from tests.faults.engine import PLAIN, Engine, Kind
from tests.faults.world import SLOT_BYTES, Daemon, namespace

NUM_BLOCKS = 3
OTHER_PARTS = (PartSpec("pages", Coverage.EVERY, 2 * SLOT_BYTES),)
DIFFERENT: dict[str, object] = {
    "revision": "other",
    "weights": "fine-tuned",
    "dtype": "float16",
    "kv_cache_dtype": "fp8",
    "quantization": "awq",
    "block_tokens": 512,
    "engine_block_tokens": 32,
    "tensor_parallel_size": 2,
    "attention_backend": "other",
    "layout": "other",
    "hash_algorithm": "xxhash",
    "hash_seed": "01",
    "engine": "other",
    "engine_version": "0.27",
    "parts": OTHER_PARTS,
    "format_version": 1,
}


@dataclass(frozen=True)
class Variant(Kind):
    """A kind whose namespace differs from the tests' in some fields."""

    changes: Mapping[str, object] = field(default_factory=dict)

    def identity(self, replica: str, session_key: str) -> ReplicaIdentity:
        """Return who an engine of this kind is."""
        return ReplicaIdentity(
            replica=replica,
            session_key=session_key,
            num_ranks=1,
            namespace=namespace(**self.changes),
        )


def test_every_field_is_tried() -> None:
    assert {*DIFFERENT, "model"} == set(Namespace.__struct_fields__)


@pytest.mark.parametrize("name", DIFFERENT)
def test_one_field_that_differs_keeps_replicas_apart(daemon: Daemon, name: str) -> None:
    same = Variant("same", PLAIN.parts)
    other = Variant(
        "other",
        OTHER_PARTS if name == "parts" else PLAIN.parts,
        changes={name: DIFFERENT[name]},
    )
    path = daemon.socket_path
    with Engine(path, "a", same) as a, Engine(path, "b", other) as b, Engine(path, "c", same) as c:
        # Of the same keys, each has its own bytes.
        a.store("prefix", NUM_BLOCKS)
        assert b.lookup("prefix", NUM_BLOCKS).num_blocks == 0
        assert b.pin("prefix", NUM_BLOCKS).reason == "miss"
        b.store("prefix", NUM_BLOCKS)
        a.verify("prefix", NUM_BLOCKS)
        b.verify("prefix", NUM_BLOCKS)
        c.verify("prefix", NUM_BLOCKS)
        # Who came later is told of who was there, and of nothing else.
        assert a.scheduler.welcome.differences == {}
        (told,) = b.scheduler.welcome.differences["a"]
        assert told.field == name
        assert told.mine != told.theirs
        if isinstance(DIFFERENT[name], str | int):
            assert told.mine == str(DIFFERENT[name])
        assert set(b.scheduler.welcome.differences) == {"a"}
        assert set(c.scheduler.welcome.differences) == {"b"}
        # What they read is counted by who wrote it.
        read = daemon.status()["pool"]["blocks_by_writer_reader"]
        assert read == {"a": {"a": NUM_BLOCKS, "c": NUM_BLOCKS}, "b": {"b": NUM_BLOCKS}}


def test_another_model_is_nobody_to_be_told_of(daemon: Daemon) -> None:
    with Engine(daemon.socket_path, "a") as a:
        a.store("prefix", NUM_BLOCKS)
        stranger = Variant("stranger", PLAIN.parts, changes={"model": "other"})
        with Engine(daemon.socket_path, "b", stranger) as b:
            assert b.scheduler.welcome.differences == {}
            assert b.lookup("prefix", NUM_BLOCKS).num_blocks == 0
