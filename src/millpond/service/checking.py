"""Checking the pool while it serves: in a forked child, which has it as it was at that moment.

A check walks everything and takes seconds for a million blocks. In the daemon's own thread
nobody would be served meanwhile, and in pieces it would see a pool that changes under it.
The child shares the daemon's memory until one of them writes, and lives only for the check.
It never has the arena, whose mapping is not inherited, nor the threads that may be touching it.
"""

import contextlib
import gc
import os
import selectors
import signal
from collections.abc import Callable
from typing import Final, NoReturn

from millpond.model.errors import InvariantBroken
from millpond.pool.pool import Pool
from millpond.service.peer import Peer
from millpond.service.protocol import Done, Failed

_DESCRIPTORS_MAX: Final = 1 << 20
_VERDICT_BYTES_MAX: Final = 4096
"""What a pipe takes in one piece."""
_HOLDS: Final = b"invariants hold"


class Checks:
    """Requests for a check, and the one child that runs at a time.

    All that wait when a child starts get its answer, since it sees what they had seen.
    ``answer(peer, reply)`` is called later, and not for peers that are gone.
    """

    def __init__(
        self,
        pool: Pool,
        selector: selectors.BaseSelector,
        answer: Callable[[Peer, Done | Failed], None],
    ) -> None:
        self._pool = pool
        self._selector = selector
        self._answer = answer
        self._waiting: list[tuple[Peer, int]] = []
        self._running: list[tuple[Peer, int]] = []
        self._child: tuple[int, int] | None = None
        """The child's pid and the pipe with its verdict."""

    def request(self, peer: Peer, request_id: int) -> None:
        """Have the pool checked as it is now; ``peer`` is answered when that is done."""
        peer.is_waiting = True
        self._waiting.append((peer, request_id))
        self._start()

    def close(self) -> None:
        """Give up what is running."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child[0], signal.SIGKILL)
            self._end_child()

    def _start(self) -> None:
        if self._child is not None or not self._waiting:
            return
        self._running, self._waiting = self._waiting, []
        self._child = _fork_checker(self._pool)
        self._selector.register(self._child[1], selectors.EVENT_READ, self._on_verdict)

    def _on_verdict(self, _mask: int) -> None:
        verdict = self._end_child()
        message = "" if verdict == _HOLDS else verdict.decode()
        if not verdict:  # the child was killed, for want of memory perhaps
            message = self._check_here()
        for peer, request_id in self._running:
            peer.is_waiting = False
            if not peer.closed:
                done = Done(id=request_id)
                failed = Failed(id=request_id, code="broken", message=message)
                self._answer(peer, failed if message else done)
        if message:
            raise InvariantBroken(message)
        self._start()

    def _check_here(self) -> str:
        try:
            self._pool.check_invariants()
        except InvariantBroken as error:
            return str(error)
        return ""

    def _end_child(self) -> bytes:
        """Return the verdict of a child that has given one, or has died without."""
        assert self._child is not None
        pid, pipe = self._child
        self._child = None
        self._selector.unregister(pipe)
        verdict = os.read(pipe, _VERDICT_BYTES_MAX)
        os.close(pipe)
        os.waitpid(pid, 0)
        return verdict


def _fork_checker(pool: Pool) -> tuple[int, int]:
    """Start a child that checks ``pool``; return its pid and where it will say what it found."""
    verdict, pipe = os.pipe()
    pid = os.fork()
    if pid == 0:
        _check_and_exit(pool, pipe)
    os.close(pipe)
    return pid, verdict


def _check_and_exit(pool: Pool, pipe: int) -> NoReturn:
    """Be the child: keep nothing of the daemon's open, so that nobody takes us for it."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.closerange(0, pipe)
        os.closerange(pipe + 1, _DESCRIPTORS_MAX)
        gc.disable()
        try:
            pool.check_invariants()
            verdict = _HOLDS
        except InvariantBroken as error:
            verdict = str(error).encode()[:_VERDICT_BYTES_MAX]
        os.write(pipe, verdict)
    finally:
        os._exit(0)
