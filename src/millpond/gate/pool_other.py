"""The second live client of the full-pool check: the same work, in a process of its own."""

import contextlib
import ctypes
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from typing import Final, NamedTuple, Self

from millpond.gate.errors import CannotTest
from millpond.gate.pool_client import Chunk, ClientSpec, PoolClient
from millpond.gate.pool_device import Moved, open_device
from millpond.gate.pool_errors import PoolFault
from millpond.model.errors import DaemonGone, ExpectedError, MillpondError, RequestTimedOut
from millpond.transfer.copies import Direction
from millpond.transfer.device import CopyFailed

_START_S_MAX: Final = 180.0
"""Importing torch on a busy machine, and registering the arena a second time."""
_END_S: Final = 10.0
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Order:
    """What the process is to do next: ``begin``, ``fill``, ``compare``, ``free``, ``end``."""

    verb: str
    filling: int = 0


class Answer(NamedTuple):
    """What came of it. ``fault`` is what was found wrong, ``error`` what could not be done."""

    chunks: tuple[Chunk, ...] = ()
    num_bytes_compared: int = 0
    moved: dict[Direction, Moved] | None = None
    fault: str | None = None
    error: str | None = None


class OtherClient:
    """The process as its starter sees it; every wait is bounded, and it ends with the starter."""

    def __init__(self, spec: ClientSpec, device_name: str, turn: Lock) -> None:
        context = multiprocessing.get_context("spawn")
        self._mine, theirs = context.Pipe()
        self._process = context.Process(
            target=run_other, args=(spec, device_name, turn, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self.wait(_START_S_MAX)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def tell(self, order: Order) -> None:
        """Give an order; its answer is there when ``wait`` returns."""
        try:
            self._mine.send(order)
        except OSError as error:
            raise DaemonGone("the second client has ended") from error

    def wait(self, timeout_s: float) -> Answer:
        """Return the next answer; raises ``PoolFault``, ``RequestTimedOut``, ``ExpectedError``."""
        try:
            if not self._mine.poll(timeout_s):
                raise RequestTimedOut(f"the second client did not answer in {timeout_s:.0f} s")
            answer: Answer = self._mine.recv()
        except (EOFError, OSError) as error:
            self._process.join(_END_S)
            raise ExpectedError(
                f"the second client has ended with status {self._process.exitcode}"
            ) from error
        if answer.fault is not None:
            raise PoolFault(f"seen by the second client: {answer.fault}")
        if answer.error is not None:
            raise ExpectedError(f"the second client failed: {answer.error}")
        return answer

    def close(self) -> None:
        """End the process: asked first, then killed."""
        try:
            self._mine.send(Order("end"))
        except OSError:
            pass
        else:
            self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)
        self._mine.close()


def run_other(spec: ClientSpec, device_name: str, turn: Lock, pipe: Connection) -> None:
    """Join the pool and follow orders until ``end``; the process's main function."""
    # A Ctrl-C goes to the starter, which decides; when that is killed, this ends too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    joined: list[PoolClient] = []

    def join() -> Answer:
        joined.append(PoolClient(spec, open_device(device_name), turn, lambda _: None))
        return Answer()

    pipe.send(_attempt(join))
    for client in joined:
        # The end of the pipe is that of its starter.
        with contextlib.closing(client), contextlib.suppress(EOFError):
            while (order := pipe.recv()).verb != "end":
                pipe.send(_attempt(partial(_follow, client, order)))


def _attempt(work: Callable[[], Answer]) -> Answer:
    try:
        return work()
    except (PoolFault, CopyFailed) as fault:
        return Answer(fault=str(fault))
    except (MillpondError, CannotTest, RuntimeError) as error:  # torch raises the latter
        return Answer(error=str(error))


def _follow(client: PoolClient, order: Order) -> Answer:
    if order.verb == "begin":
        client.begin(order.filling)
        return Answer()
    if order.verb == "fill":
        client.fill(order.filling)
        chunks = tuple(chunk.for_others() for chunk in client.chunks)
        return Answer(chunks, moved=client.mover.take_counts())
    if order.verb == "compare":
        num_bytes = client.compare(client.chunks)
        return Answer(num_bytes_compared=num_bytes, moved=client.mover.take_counts())
    client.free()
    return Answer()
