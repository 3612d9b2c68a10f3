"""Listens to the events of replicas' caches (vLLM's ``--kv-events-config``).

A publisher numbers its batches from 0 and sends each to whoever listens; what somebody missed
it sends again from another address, for as long as it remembers it. A cache is known as long as
no batch is missing since the first one, or since the cache was cleared.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from millpond.router.cached_blocks import AllBlocksCleared, CachedBlocks, Event, NotUnderstood
from millpond.router.replicas import Replica
from millpond.router.tokens import TokenNames

_log = logging.getLogger(__name__)

_MESSAGE_BYTES_MAX: Final = 64 * 2**20
_WAITING_MAX: Final = 1000
"""Batches that may wait for us; what a publisher drops beyond is asked for again."""
_AGAIN_S: Final = 5.0
_LOST: Final = zmq.EVENT_DISCONNECTED
_JOINED: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED
_NUMBER_BYTES: Final = 8
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class Batch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a step of an engine did to its cache."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class Feed:
    """One replica's cache by the numbered batches about it; no socket.

    The replica's ``is_cache_known`` says whether nothing is missing.
    """

    def __init__(self, replica: Replica, *, cached: CachedBlocks | None = None) -> None:
        self._replica = replica
        self._cached = CachedBlocks() if cached is None else cached
        self._decoder = msgspec.msgpack.Decoder(Batch)
        self._rank: int | None = None
        self._last_heard: int | None = None
        self._next = 0
        self._is_hopeless = False

    def num_tokens(self, prompt: TokenNames) -> int | None:
        """Return how many tokens of a prompt a request would find; None if that is unknown."""
        return self._cached.num_tokens(prompt) if self._is_known else None

    def take(self, number: int, payload: bytes) -> int | None:
        """Take a batch as it is sent; return the number to ask again from if some are missing."""
        if self._last_heard is not None and number <= self._last_heard:
            self.forget("the numbers begin anew")  # another process: numbers only grow
        self._last_heard = number
        if number == 0:
            self._know()
        if self._is_known:
            if number > self._next:
                return self._next
            if number == self._next:
                self._apply(number, payload)
            return None  # else it was sent again before it came
        self._apply_from_clear(number, payload)
        return None if self._is_known or self._is_hopeless else 0

    def take_again(self, number: int, payload: bytes) -> bool:
        """Take a batch that was asked for, which come in order; false if that leads nowhere."""
        if number > self._next:
            self.give_up("what is missing is not remembered any more", is_final=True)
        elif number == self._next:
            self._apply(number, payload)
        return not self._is_hopeless

    def end_again(self) -> None:
        """Take note that all that was asked for has come."""
        self._know()

    def give_up(self, why: str, *, is_final: bool = False) -> None:
        """Know nothing, until the cache is cleared or the numbers begin anew.

        Unless it ``is_final``, the whole history may be asked for.
        """
        if self._is_known or (is_final and not self._is_hopeless):
            _log.warning("cache unknown: replica=%s why=%s", self._replica.name, why)
        self._cached.restart()
        self._next = 0
        self._is_hopeless = is_final
        self._replica.is_cache_known = False

    def forget(self, why: str) -> None:
        """Take note that the next batch may be of another process."""
        self.give_up(why)
        self._last_heard = None
        self._rank = None

    def statistics(self) -> dict[str, int]:
        """Return how many blocks are known."""
        return self._cached.statistics()

    @property
    def _is_known(self) -> bool:
        return self._replica.is_cache_known

    def _know(self) -> None:
        if not self._is_known:
            _log.info("cache known: replica=%s", self._replica.name)
        self._is_hopeless = False
        self._replica.is_cache_known = True

    def _apply(self, number: int, payload: bytes) -> None:
        batch = self._decode(payload)
        if batch is not None:
            self._next = number + 1
            self._note(batch.events)

    def _apply_from_clear(self, number: int, payload: bytes) -> None:
        """Begin to know the cache if this batch clears it."""
        batch = self._decode(payload)
        if batch is None:
            return
        cleared = [i for i, x in enumerate(batch.events) if isinstance(x, AllBlocksCleared)]
        if cleared:
            self._next = number + 1
            self._know()
            self._note(batch.events[cleared[-1] :])

    def _decode(self, payload: bytes) -> Batch | None:
        try:
            batch = self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.give_up(f"a batch that makes no sense: {error}", is_final=True)
            return None
        rank = batch.data_parallel_rank or 0
        if self._rank is not None and rank != self._rank:
            self.give_up(f"batches of ranks {self._rank} and {rank}", is_final=True)
            return None
        self._rank = rank
        return batch

    def _note(self, events: Sequence[Event]) -> None:
        try:
            for event in events:
                self._cached.apply(event)
        except NotUnderstood as error:
            self.give_up(str(error), is_final=True)


class KvEvents:
    """Follows all replicas that publish events; belongs to the event loop that it was used in.

    A replica whose events are away, or make no sense, costs nothing but knowing its cache.
    """

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None
        self._feeds: dict[str, Feed] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, replica: Replica) -> None:
        """Listen to a replica from now on; one without events is no longer listened to."""
        name = replica.name
        if name in self._tasks:
            self._tasks.pop(name).cancel()
            del self._feeds[name]
        address = replica.address
        if address.events is None:
            return
        if self._context is None:
            self._context = zmq.asyncio.Context()
        feed = self._feeds[name] = Feed(replica)
        listening = _Listening(self._context, feed, address.events, address.replay)
        task = self._tasks[name] = asyncio.create_task(listening.run())
        task.add_done_callback(lambda done: _note_ended(feed, done))

    def forget(self, name: str) -> None:
        """Take note that a replica may be another process, whose cache is another one."""
        if name in self._feeds:
            self._feeds[name].forget("the replica is down")

    def num_tokens(self, prompt: TokenNames) -> Mapping[str, int]:
        """Return what each replica whose cache is known holds of a prompt."""
        found = {name: feed.num_tokens(prompt) for name, feed in self._feeds.items()}
        return {name: num for name, num in found.items() if num is not None}

    async def close(self) -> None:
        """Listen to nobody."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)


class _Listening:
    """Sockets between one publisher and one feed."""

    def __init__(
        self, context: zmq.asyncio.Context, feed: Feed, events: str, replay: str | None
    ) -> None:
        self._context = context
        self._feed = feed
        self._events = events
        self._replay = replay
        self._again_at = 0.0

    async def run(self) -> None:
        """Listen for ever."""
        with (
            self._socket(zmq.SUB) as socket,
            socket.get_monitor_socket(_LOST | _JOINED) as changes,
        ):
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._events)
            either = zmq.asyncio.Poller()
            either.register(socket, zmq.POLLIN)
            either.register(changes, zmq.POLLIN)
            while True:
                await either.poll()
                frames = await socket.recv_multipart() if await socket.poll(0) else None
                # Only now: what changed before a message came is sure to be there.
                while await changes.poll(0):
                    await self._note_change(await changes.recv_multipart())
                if frames is not None:
                    await self._take(frames)
                await asyncio.sleep(0)  # what waits already would be one long turn

    async def _note_change(self, frames: list[bytes]) -> None:
        if parse_monitor_message(frames)["event"] == _JOINED:
            # It may have been there for long; what it says from now on is heard.
            await self._ask_again(0)
        else:
            # A process that follows may get as far in numbers as this one did.
            self._feed.forget("the connection was lost")

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self._feed.give_up("a message of another form", is_final=True)
            return
        missing = self._feed.take(int.from_bytes(frames[1], "big"), frames[2])
        if missing is not None:
            await self._ask_again(missing)

    async def _ask_again(self, start: int) -> None:
        if self._replay is None:
            self._feed.give_up("batches are missing, and there is no address to ask for them")
        elif time.monotonic() >= self._again_at:
            with self._socket(zmq.DEALER) as socket:
                socket.connect(self._replay)
                try:
                    await self._take_again(socket, start)
                except TimeoutError:
                    self._again_at = time.monotonic() + _AGAIN_S
                    self._feed.give_up("batches are missing, and do not come again in time")

    async def _take_again(self, socket: zmq.asyncio.Socket, start: int) -> None:
        async with asyncio.timeout(_AGAIN_S):
            await socket.send_multipart(  # pyright: ignore[reportUnknownMemberType]
                [b"", start.to_bytes(_NUMBER_BYTES, "big")]
            )
        while True:
            async with asyncio.timeout(_AGAIN_S):
                frames = await socket.recv_multipart()
            if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
                self._feed.give_up("an answer of another form", is_final=True)
                return
            number, payload = frames[-2:]
            if number == _END:
                self._feed.end_again()
                return
            if not self._feed.take_again(int.from_bytes(number, "big"), payload):
                return
            await asyncio.sleep(0)

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, _WAITING_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, _MESSAGE_BYTES_MAX)
        return socket


def _note_ended(feed: Feed, task: asyncio.Task[None]) -> None:
    """A replica's events are lost with a bug of ours, and nothing else."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _log.error("nobody listens to events any more: %s", error, exc_info=error)
        feed.give_up("nobody listens to its events any more")
