"""Keeps an engine connected to the pool: a thread that reconnects, a client while it lasts.

Engine threads ask for ``client`` and go on without one; they never wait for a connection.
Each loss and each recovery is logged once, not once a request.
"""

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from millpond.model.errors import ExpectedError, HandshakeRefused, SetupError
from millpond.model.limits import RECONNECT_S

logger = logging.getLogger("vllm.millpond")
"""Below vLLM's logger, so that its handlers and levels apply."""


class LinkedClient(Protocol):
    """What a link needs of a client."""

    @property
    def session(self) -> int: ...

    def poll_closed(self) -> bool: ...

    def close(self) -> None: ...


ClientT = TypeVar("ClientT", bound=LinkedClient)

_EARLY_PAUSE_S = 0.25
"""Between attempts of a worker whose scheduler has not joined yet: it will any moment."""


class Link(Generic[ClientT]):
    """One end of an engine (its scheduler, or one worker) and its connection to the daemon.

    ``connect`` is called from the link's own thread, again and again until it returns a
    client; None and an ``ExpectedError`` are reasons to try again, a ``SetupError`` ends the
    link for good, for trying again would not help. ``closed`` is called there too, once for
    each lost client, before the next attempt.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], ClientT | None],
        *,
        closed: Callable[[ClientT], None] | None = None,
    ) -> None:
        self._name = name
        self._connect = connect
        self._closed = closed
        self._client: ClientT | None = None
        self._wake = threading.Event()
        self._stopping = False
        self._complained = False
        self._is_early = False
        self._thread = threading.Thread(target=self._run, name=f"millpond-link-{name}", daemon=True)

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._thread.start()

    @property
    def client(self) -> ClientT | None:
        """The connected client, or None while there is none."""
        return self._client

    def lost(self, client: ClientT, error: Exception) -> None:
        """Note that a call on ``client`` failed; reconnecting begins at once."""
        if self._client is client:
            self._client = None
            self._complain(error)
        client.close()
        self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """End the thread and close the connection; waits at most ``timeout_s``."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _run(self) -> None:
        pause_s = RECONNECT_S[0]
        previous: ClientT | None = None
        while not self._stopping:
            current = self._client
            if current is not None and current.poll_closed():
                self._client = current = None
                logger.warning("event=pool_lost end=%s remedy=reconnecting", self._name)
                self._complained = True
            if current is None:
                if previous is not None:
                    if self._closed is not None:
                        self._closed(previous)
                    previous = None
                current = self._try()
                pause_s = RECONNECT_S[0] if current else min(pause_s * 2, RECONNECT_S[1])
                if self._is_early:
                    pause_s = _EARLY_PAUSE_S
                previous = current
                self._client = current
            self._wake.wait(RECONNECT_S[0] if current else pause_s)
            self._wake.clear()

    def _try(self) -> ClientT | None:
        self._is_early = False
        try:
            client = self._connect()
        except HandshakeRefused as error:
            self._is_early = error.code == "no-session"
            if not self._is_early:
                self._complain(error)
            return None
        except ExpectedError as error:
            self._complain(error)
            return None
        except SetupError as error:
            logger.error("event=pool_unused end=%s reason=%r", self._name, str(error))
            self._stopping = True
            return None
        if client is not None:
            logger.info("event=pool_connected end=%s session=%d", self._name, client.session)
            self._complained = False
        return client

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            logger.warning(
                "event=pool_unavailable end=%s reason=%r remedy=%r",
                self._name,
                str(error),
                "serving without it, reconnecting in the background",
            )
            self._complained = True
