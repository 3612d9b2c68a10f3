"""Frames for the fuzzer: valid ones, valid ones that were damaged, and garbage."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from millpond.model.limits import FRAME_BYTES_MAX
from millpond.service import protocol
from millpond.service.protocol import LENGTH, Hello, frame
from tests.faults.engine import PLAIN
from tests.faults.world import KEY_BYTES, keys

NUM_PREFIXES: Final = 40
LENGTH_MAX: Final = 24
NASTY_NUMBERS: Final = (
    *(0, 1, -1, 2, 31, 32, 33, 64, 65, 255, 256, 65_535, 65_536, 65_537),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
)
NASTY_VALUES: Final = (
    *NASTY_NUMBERS,
    *(None, True, False, 0.5, float("nan"), float("inf"), "", "\0", "x" * 200, "ü" * 5000),
    *(b"", b"\0" * 7, b"\xff" * 64, b"k" * 70_000, [], [[]], [None], {}, {"": None}),
    *([0] * 2000, ["a", 1, b"c"], {"type": "hello"}, msgspec.msgpack.Ext(5, b"ext")),
)
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_PREFIXES: Final = [keys(f"f-{number}", LENGTH_MAX) for number in range(NUM_PREFIXES)]
_TYPES: Final = (b"lookup", b"pin", b"reserve", b"finish", b"hello", b"status", b"check", b"done")


class Frames:
    """Makes frames from one source of chance."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._damages: Sequence[Callable[[bytes], bytes]] = (
            *[self._change_a_field] * 5,
            *[self._flip_bits] * 3,
            self._insert_or_delete,
            self._cut,
            self._splice,
            self._lie_about_the_length,
            self._nothing_like_it,
        )
        self._last = frame(_ENCODE(protocol.Status(id=0)))

    # ------------------------------------------------------------ valid

    def hello(self, role: str, replica: str, session_key: str, drained: Sequence[int]) -> Hello:
        """Return a hello that the daemon accepts, unless chance has it otherwise."""
        if role == "admin":
            return Hello(role="admin")
        return Hello(
            role=role,
            replica=replica,
            session_key=session_key,
            namespace=PLAIN.identity(replica, session_key).namespace,
            drained=tuple(drained) if role == "worker" else (),
        )

    def request(self, role: str, number: int, leases: Sequence[int]) -> protocol.Request:
        """Return a valid request of a role, about ``leases`` if there are any."""
        if role == "worker":
            return self._of_a_worker(leases)
        if role == "admin":
            return self._operators(number)
        prefix = self._rng.choice(_PREFIXES)[: KEY_BYTES * self._rng.randint(1, LENGTH_MAX)]
        at = {"id": number, "keys": prefix, "key_bytes": KEY_BYTES}
        match self._rng.randrange(10):
            case 0 | 1 | 2:
                return protocol.Lookup(**at)
            case 3 | 4 | 5:
                return protocol.Pin(first_block=self._rng.choice((0, 0, 1, 5)), **at)
            case 6 | 7 | 8:
                return protocol.Reserve(first_block=0, parts=(b"",), **at)
            case _:
                return self._report()

    def _of_a_worker(self, leases: Sequence[int]) -> protocol.Request:
        if self._rng.random() < 0.1:
            return protocol.Link(h2d_gb_s=self._rng.choice((None, 0.0, 55.5)), problem="so")
        return protocol.Finish(leases=tuple(leases), ok=self._rng.random() < 0.8, rank=0)

    def _operators(self, number: int) -> protocol.Request:
        # Seldom what takes everybody's blocks away.
        if self._rng.random() < 0.04:
            return self._rng.choice(
                (protocol.Flush(id=number), protocol.Switch(id=number, enabled=False))
            )
        choices: Sequence[protocol.Request] = (
            protocol.Switch(id=number, enabled=True),
            protocol.Switch(id=number, enabled=True),
            protocol.Check(id=number),
            protocol.Blocks(id=number, num_max=self._rng.choice((1, 10, 300))),
            protocol.Requests(id=number, last=self._rng.randint(-1, 5)),
            protocol.Requests(id=number, request_id=f"r-{self._rng.randrange(9)}"),
            protocol.Status(id=number),
            protocol.Status(id=number),
        )
        return self._rng.choice(choices)

    def _report(self) -> protocol.Report:
        computed, local, loaded = (self._rng.randrange(1000) for _ in range(3))
        return protocol.Report(
            request_id=f"cmpl-r-{self._rng.randrange(9)}-0-deadbeef",
            prompt_tokens=computed + local + loaded,
            computed_tokens=computed,
            local_tokens=local,
            loaded_tokens=loaded,
            writers={"w": loaded},
        )

    # ------------------------------------------------------------ not so valid

    def damaged(self, message: msgspec.Struct) -> bytes:
        """Return the frame of ``message``, damaged in one or two ways."""
        data = frame(_ENCODE(message))
        for _ in range(self._rng.choice((1, 1, 1, 2))):
            data = self._rng.choice(self._damages)(data)
        self._last = data[:4096]
        return data

    def _change_a_field(self, data: bytes) -> bytes:
        """Give a field another value, take it away, or add one."""
        try:
            fields: Any = msgspec.msgpack.decode(data[LENGTH.size :])
        except (msgspec.MsgspecError, RecursionError):
            return data
        if not isinstance(fields, dict) or not fields:
            return data
        place = fields
        name = self._rng.choice(list(place))
        if isinstance(place[name], dict) and place[name] and self._rng.random() < 0.8:
            place = place[name]
            name = self._rng.choice(list(place))
        match self._rng.randrange(6):
            case 0:
                del place[name]
            case 1:
                place[self._rng.choice(("id", "rank", "x", "", "ok"))] = self._value()
            case _:
                place[name] = self._value(like=place[name])
        try:
            return frame(_ENCODE(fields))
        except (ValueError, OverflowError):  # too large for a frame
            return data

    def _value(self, like: object = None) -> object:
        if isinstance(like, int) and self._rng.random() < 0.7:
            return self._rng.choice(NASTY_NUMBERS)
        if isinstance(like, bytes) and self._rng.random() < 0.7:
            return self._rng.choice((like[1:], like + b"x", like * 2, like[:KEY_BYTES] * 3, b""))
        if isinstance(like, list) and self._rng.random() < 0.7:
            return like * self._rng.choice((2, 300)) + [self._rng.choice(NASTY_VALUES)]
        return self._rng.choice(NASTY_VALUES)

    def _flip_bits(self, data: bytes) -> bytes:
        flipped = bytearray(data)
        for _ in range(self._rng.choice((1, 1, 2, 8))):
            # The interesting bytes are those around the names, in front.
            stop = min(len(data), self._rng.choice((8, 80, len(data))))
            if stop > LENGTH.size:
                flipped[self._rng.randrange(LENGTH.size, stop)] ^= 1 << self._rng.randrange(8)
        return bytes(flipped)

    def _insert_or_delete(self, data: bytes) -> bytes:
        content = data[LENGTH.size :]
        at = self._rng.randrange(len(content) + 1)
        if self._rng.random() < 0.5:
            content = content[:at] + content[at + self._rng.choice((1, 2, 9)) :]
        else:
            content = (
                content[:at] + self._rng.randbytes(self._rng.choice((1, 2, 40))) + content[at:]
            )
        return frame(content)

    def _cut(self, data: bytes) -> bytes:
        content = data[LENGTH.size :]
        return frame(content[: self._rng.randrange(len(content) + 1)])

    def _splice(self, data: bytes) -> bytes:
        other = self._last[LENGTH.size :]
        content = data[LENGTH.size :]
        at, from_ = self._rng.randrange(len(content) + 1), self._rng.randrange(len(other) + 1)
        return frame(content[:at] + other[from_:])

    def _lie_about_the_length(self, data: bytes) -> bytes:
        content = data[LENGTH.size :]
        off = self._rng.choice((-len(content), -3, -1, 1, 2, 300))
        lie = self._rng.choice((len(content) + off, FRAME_BYTES_MAX + 1, 2**32 - 1))
        return LENGTH.pack(max(0, lie)) + content

    def _nothing_like_it(self, _data: bytes) -> bytes:
        match self._rng.randrange(4):
            case 0:
                return frame(self._rng.randbytes(self._rng.choice((0, 1, 2, 30, 3000))))
            case 1:
                return frame(self._rng.choice((b"\x91", b"\x81\xa1x")) * 2000 + b"\x01")
            case 2:
                kind = self._rng.choice(_TYPES)
                return frame(b"\x82\xa4type" + bytes([0xA0 + len(kind)]) + kind + b"\xa2id\x01")
            case _:
                return self._rng.randbytes(self._rng.choice((1, 3, 4, 5, 100)))
