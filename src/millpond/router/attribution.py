"""Finds out where the tokens of finished requests came from: the pool knows, or nobody."""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from millpond.model.errors import ExpectedError, InvariantBroken
from millpond.router.prompts import GENERATING
from millpond.router.records import Attribution, GivenName, Record
from millpond.service.client import AdminClient
from millpond.service.protocol import Report

_log = logging.getLogger(__name__)

_ASK_AFTER_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
"""After a request's end: its replica reports it a moment later."""
_TICK_S: Final = 0.05
_RECONNECT_S: Final = 2.0
_TIMEOUT_S: Final = 2.0
_WAITING_MAX: Final = 10_000
"""Requests beyond it are not asked about."""
_NAMES_MAX: Final = 100_000
"""More than a pool keeps reports: of what is older, nothing can be mistaken."""

Reports = Sequence[tuple[str, Report]]


class PoolReports:
    """Asks a daemon for reports, on the caller's thread; is away while the daemon is.

    ``epoch`` is the life of the daemon that was last reached; another one holds nothing of it.
    """

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._client: AdminClient | None = None
        self.epoch: int | None = None
        self._connect_at = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether the pool answered when it was last asked."""
        return self._client is not None

    def connect(self) -> None:
        """Connect unless that was tried a moment ago; blocks for at most two seconds."""
        if self._client is not None and self._client.poll_closed():
            self._lose("it closed the connection")
        if self._client is not None or time.monotonic() < self._connect_at:
            return
        self._connect_at = time.monotonic() + _RECONNECT_S
        with contextlib.suppress(ExpectedError):
            self._client = AdminClient.connect(str(self._socket), timeout_s=_TIMEOUT_S)
            self.epoch = self._client.welcome.epoch
            _log.info("pool joined: socket=%s epoch=%s", self._socket, self.epoch)

    def ask(self, request_ids: Sequence[str]) -> list[Reports] | None:
        """Return the reports of each request; None if the pool is away."""
        self.connect()
        if self._client is None:
            return None
        try:
            return [_reports(self._client, each) for each in request_ids]
        except (ExpectedError, InvariantBroken) as error:
            self._lose(str(error))
            return None

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def _lose(self, why: str) -> None:
        _log.warning("pool away: socket=%s why=%s", self._socket, why)
        self.close()


def _reports(client: AdminClient, request_id: str) -> Reports:
    try:
        return client.requests_named(request_id)
    except ValueError as error:  # beyond the protocol's limits: the pool is fine, the name is not
        _log.warning("no reports: request_id=%.100s why=%s", request_id, error)
        return ()


class SeenNames:
    """Remembers the latest names that clients gave requests."""

    def __init__(self, num_max: int = _NAMES_MAX) -> None:
        self._num_max = num_max
        self._seen: OrderedDict[int, GivenName] = OrderedDict()

    def note(self, name: str) -> GivenName:
        """Count a request of this name; those of one name get the same, and see each other."""
        key = hash(name)  # names may be long
        given = self._seen.setdefault(key, GivenName())
        given.num_requests += 1
        self._seen.move_to_end(key)
        if len(self._seen) > self._num_max:
            self._seen.popitem(last=False)
        return given


@dataclass(slots=True)
class _Waiting:
    record: Record
    num_asked: int
    ask_at: float


class Attributor:
    """Attributes records one by one and hands each to ``on_done``, exactly once.

    Requests never wait for it: a pool that is slow or away costs attribution only.
    ``on_new_pool`` hears when the pool is not the one that it was.
    """

    def __init__(
        self,
        pool: PoolReports | None,
        *,
        on_done: Callable[[Record], None],
        on_new_pool: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._on_done = on_done
        self._on_new_pool = on_new_pool
        self._waiting: deque[_Waiting] = deque()
        # One thread: the client blocks, and asks one thing at a time.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pool-reports")

    @property
    def has_pool(self) -> bool:
        """Whether a pool answers."""
        return self._pool is not None and self._pool.is_connected

    def submit(self, record: Record) -> None:
        """Take a finished request."""
        if record.path not in GENERATING or record.replica is None or record.status != 200:
            self._on_done(record)
        elif not self.has_pool or len(self._waiting) >= _WAITING_MAX:
            self._guess(record)
        else:
            self._waiting.append(_Waiting(record, 0, time.monotonic() + _ASK_AFTER_S[0]))

    async def run(self) -> None:
        """Ask for what is due, for ever; without a pool, end at once."""
        if self._pool is None:
            return
        loop = asyncio.get_running_loop()
        epoch = self._pool.epoch
        while True:
            due = self._take_due(time.monotonic())
            names = [each.record.request_id for each in due]
            try:
                found = await loop.run_in_executor(self._thread, self._pool.ask, names)
            except asyncio.CancelledError:
                self._waiting.extend(due)  # for close
                raise
            if self._pool.epoch != epoch:
                epoch = self._pool.epoch
                self._on_new_pool()
            for waiting, reports in zip(due, found or [()] * len(due), strict=True):
                self._settle(waiting, reports, is_away=found is None)
            await asyncio.sleep(_TICK_S)

    def close(self) -> None:
        """Guess for all that still wait, and end."""
        while self._waiting:
            self._guess(self._waiting.popleft().record)
        self._thread.shutdown()
        if self._pool is not None:
            self._pool.close()

    def _take_due(self, now: float) -> list[_Waiting]:
        due = [each for each in self._waiting if each.ask_at <= now]
        self._waiting = deque(each for each in self._waiting if each.ask_at > now)
        return due

    def _settle(self, waiting: _Waiting, reports: Reports, *, is_away: bool) -> None:
        waiting.num_asked += 1
        if reports:
            waiting.record.attribution = attribute(waiting.record, reports)
            self._on_done(waiting.record)
        elif is_away or waiting.num_asked == len(_ASK_AFTER_S):
            self._guess(waiting.record)
        else:
            waiting.ask_at = time.monotonic() + _ASK_AFTER_S[waiting.num_asked]
            self._waiting.append(waiting)

    def _guess(self, record: Record) -> None:
        record.attribution = guess(record)
        self._on_done(record)


def attribute(record: Record, reports: Reports) -> Attribution:
    """Return the sum over a request's reports: one for each of its prompts and samples."""
    writers: dict[str, int] = {}
    for _, report in reports:
        for writer, tokens in report.writers.items():
            writers[writer] = writers.get(writer, 0) + tokens
    is_sure = record.is_own_id or (record.has_unique_name and len(reports) == 1)
    return Attribution(
        source="pool" if is_sure else "pool-ambiguous",
        reader=reports[-1][0],
        prompt_tokens=sum(report.prompt_tokens for _, report in reports),
        computed_tokens=sum(report.computed_tokens for _, report in reports),
        local_tokens=sum(report.local_tokens for _, report in reports),
        loaded_tokens=sum(report.loaded_tokens for _, report in reports),
        writers=writers,
        num_reports=len(reports),
    )


def guess(record: Record) -> Attribution:
    """Return what the router thinks of a request that nobody reported."""
    return Attribution(
        source="guessed",
        reader=record.replica or "",
        prompt_tokens=record.prompt_tokens,
        computed_tokens=record.prompt_tokens - record.local_tokens,
        local_tokens=record.local_tokens,
        loaded_tokens=0,
    )
