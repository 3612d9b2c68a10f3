"""The wire's types: what is sent is what arrives, and nothing unknown gets through."""

from array import array
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.model.names import Coverage
from millpond.model.namespace import FieldDifference, Namespace, PartSpec
from millpond.service import protocol
from millpond.service.protocol import pack_u64, unpack_u64

NAMESPACE = Namespace(
    model="m",
    revision="r",
    weights="w",
    dtype="bfloat16",
    kv_cache_dtype="auto",
    quantization="",
    block_tokens=256,
    engine_block_tokens=16,
    tensor_parallel_size=1,
    attention_backend="b",
    layout="l",
    hash_algorithm="sha256",
    hash_seed="00",
    engine="vllm",
    engine_version="0.32",
    parts=(PartSpec("pages", Coverage.EVERY, 4096), PartSpec("win", Coverage.WINDOW, 4096, 2)),
)
REPORT = protocol.Report(
    request_id="x",
    prompt_tokens=6,
    computed_tokens=1,
    local_tokens=2,
    loaded_tokens=3,
    writers={"a": 3},
)
REQUESTS = (
    protocol.Hello(
        role="worker",
        replica="a",
        session_key="k",
        rank=1,
        num_ranks=2,
        namespace=NAMESPACE,
        drained=(2**60,),
    ),
    protocol.Lookup(id=1, keys=b"k" * 64, key_bytes=32),
    protocol.Pin(id=2, keys=b"k" * 64, key_bytes=32, first_block=1),
    protocol.Reserve(id=3, keys=b"k" * 64, key_bytes=32, first_block=0, parts=(b"", b"x" * 8)),
    protocol.Reserve(id=3, keys=b"", key_bytes=32, first_block=0, parts=(), request_id="r"),
    protocol.Finish(leases=(1, 2), ok=True, rank=0),
    protocol.Finish(leases=(), ok=False),
    REPORT,
    protocol.Link(h2d_gb_s=1.0, problem="x"),
    protocol.Status(id=4),
    protocol.Switch(id=5, enabled=False),
    protocol.Flush(id=6),
    protocol.Requests(id=7, request_id="abc"),
    protocol.Blocks(id=9, num_max=3),
    protocol.Check(id=8),
)
REPLIES = (
    protocol.Welcome(
        session=2**60,
        epoch=2**63 - 1,
        arena_bytes=2**40,
        enabled=True,
        daemon_version="1",
        differences={"b": (FieldDifference("dtype", "x", "y"),)},
    ),
    protocol.Refused(code="version", field="protocol_version", message="no"),
    protocol.LookupReply(id=1, num_blocks=3, outcome="hit"),
    protocol.Pinned(id=2, lease=None, num_blocks=0, outcome="miss", reason="off"),
    protocol.Reserved(id=3, lease=9, first_block=1, offsets=(b"12345678",)),
    protocol.StatusReply(id=4, statistics={"a": [1, {"b": 1.5}]}),
    protocol.BlocksReply(id=9, blocks=({"key": "00"},)),
    protocol.RequestsReply(id=7, reports=(("a", REPORT),)),
    protocol.Done(id=5),
    protocol.Failed(id=8, code="broken", message="so"),
)


@pytest.mark.parametrize(
    ("messages", "kinds"), [(REQUESTS, protocol.Request), (REPLIES, protocol.Reply)]
)
def test_each_message_survives_the_way(messages: tuple[msgspec.Struct, ...], kinds: object) -> None:
    decoder = msgspec.msgpack.Decoder(kinds)
    for message in messages:
        assert decoder.decode(msgspec.msgpack.encode(message)) == message
    assert {type(message) for message in messages} == set(get_args(kinds))


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda m: type(m).__name__)
def test_unknown_fields_are_refused(message: msgspec.Struct) -> None:
    fields = msgspec.to_builtins(message, builtin_types=(bytes,)) | {"surprise": 1}
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=type(message))


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=lambda m: type(m).__name__)
def test_messages_cannot_be_changed(message: msgspec.Struct) -> None:
    with pytest.raises(AttributeError):
        setattr(message, message.__struct_fields__[0], None)


@given(data=st.binary(max_size=200))
def test_garbage_is_refused_in_one_way(data: bytes) -> None:
    try:
        decoded = msgspec.msgpack.decode(data, type=protocol.Request)
    except msgspec.MsgspecError:
        return
    assert isinstance(decoded, get_args(protocol.Request))


@given(values=st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_u64_arrays_are_little_endian(values: list[int]) -> None:
    packed = pack_u64(values)
    assert packed == b"".join(value.to_bytes(8, "little") for value in values)
    assert packed == pack_u64(array("Q", values))
    assert list(unpack_u64(packed)) == values


def test_half_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of"):
        unpack_u64(b"1234567")
