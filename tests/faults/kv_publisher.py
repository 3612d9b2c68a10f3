"""A publisher of a cache's events, as vLLM's is, that loses what it is told to lose."""

import asyncio
from pathlib import Path
from typing import Any, Self

import zmq
import zmq.asyncio

from tests.router_events import payload

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Publishes at one socket in ``folder`` and repeats at another; ``address`` has both.

    ``num_asked`` counts who asked to repeat. With ``is_deaf`` nobody gets an answer.
    """

    def __init__(self, folder: Path, name: str = "a") -> None:
        self._events, self._replay = (f"ipc://{folder}/{name}.{x}" for x in ("events", "replay"))
        self.address = f",events={self._events},replay={self._replay}"
        self.without_replay = f",events={self._events}"
        self.num_asked = 0
        self.is_deaf = False
        self.buffer: list[tuple[int, bytes]] = []
        self._next = 0
        self._context = zmq.asyncio.Context()
        self._repeating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # It hears of subscriptions, where a PUB socket does not; to who listens it is the same.
        self._pub = self._context.socket(zmq.XPUB)
        self._pub.bind(self._events)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self._replay)
        self._repeating = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._repeating is not None
        self._repeating.cancel()
        await asyncio.gather(self._repeating, return_exceptions=True)
        self._context.destroy(linger=0)

    async def heard(self) -> None:
        """Wait until somebody listens."""
        assert await self._pub.recv() == b"\x01"

    async def restart(self) -> None:
        """Be another process at the same addresses, and wait until somebody listens."""
        await self.__aexit__()
        self._context = zmq.asyncio.Context()
        self.buffer, self._next = [], 0
        await self.__aenter__()
        await self.heard()

    async def publish(self, *events: dict[str, Any], is_lost: bool = False) -> None:
        """Send a batch, or only remember it."""
        await self.publish_raw(payload(*events), is_lost=is_lost)

    async def publish_raw(self, data: bytes, *, is_lost: bool = False) -> None:
        number, self._next = self._next, self._next + 1
        if not is_lost:
            await self.send(b"topic", number.to_bytes(8, "big"), data)
        self.buffer.append((number, data))

    async def send(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    async def _repeat(self) -> None:
        while True:
            who, empty, start = await self._router.recv_multipart()
            self.num_asked += 1
            if self.is_deaf:
                continue
            for number, data in self.buffer:
                if number >= int.from_bytes(start, "big"):
                    frames = (who, empty, b"topic", number.to_bytes(8, "big"), data)
                    await self._router.send_multipart(frames)
            await self._router.send_multipart((who, empty, b"", END, b""))
