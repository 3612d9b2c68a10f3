"""Asks each replica again and again whether it is ready."""

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from millpond.router.options import HealthOptions
from millpond.router.replicas import Replica, Replicas, State

_log = logging.getLogger(__name__)


class Health:
    """Keeps the replicas' states. ``on_down`` hears of one whose memory may be gone."""

    def __init__(
        self,
        replicas: Replicas,
        session: aiohttp.ClientSession,
        options: HealthOptions,
        *,
        on_down: Callable[[str], None],
    ) -> None:
        self._replicas = replicas
        self._session = session
        self._options = options
        self._on_down = on_down
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Check all replicas side by side, for ever."""
        while True:
            self._hurry.clear()
            await asyncio.gather(*(self._check(each) for each in self._replicas))
            try:
                async with asyncio.timeout(self._options.every_s):
                    await self._hurry.wait()
            except TimeoutError:
                continue

    def check_soon(self) -> None:
        """Check all without waiting for the next turn."""
        self._hurry.set()

    def note_refused(self, replica: Replica) -> None:
        """Take note that a replica does not accept connections: it is down until it answers."""
        self._set(replica, State.DOWN, "refuses connections")

    async def _check(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self._options.timeout_s):
                answer = await self._session.get(f"{replica.url}/health", allow_redirects=False)
                answer.release()
        except aiohttp.ClientConnectorError:
            self._fail(replica, "refuses connections", is_sure=True)
        except (aiohttp.ClientError, OSError) as error:
            self._fail(replica, f"does not answer ({type(error).__name__})", is_sure=False)
        else:
            if answer.status == 200:
                replica.num_failed_checks = 0
                self._set(replica, State.READY, "answers")
            else:
                self._fail(replica, f"answers {answer.status}", is_sure=False)

    def _fail(self, replica: Replica, why: str, *, is_sure: bool) -> None:
        replica.num_failed_checks += 1
        is_starting = replica.state is State.STARTING
        if not is_starting and (is_sure or replica.num_failed_checks >= self._options.failures_max):
            self._set(replica, State.DOWN, why)

    def _set(self, replica: Replica, state: State, why: str) -> None:
        if replica.state is state:
            return
        level = logging.WARNING if state is State.DOWN else logging.INFO
        _log.log(
            level, "replica %s: replica=%s url=%s why=%s", state, replica.name, replica.url, why
        )
        replica.state = state
        if state is State.DOWN:
            self._on_down(replica.name)
