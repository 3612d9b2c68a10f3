"""uvicorn's HTTP/1.1 with bounds on the head of a request: its size, and how long it takes."""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S_MAX: Final = 30.0
ABORT: Final = "millpond.abort"
"""The extension of a request's scope that ends its connection at once, whatever is unsent."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to a head of more than ``head_bytes_max``, and drops who never ends one.

    The same bound holds for what follows the head and is no body. Trailers are read and dropped:
    uvicorn would take them for headers of a request whose headers have been checked already.
    """

    head_bytes_max: int

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 (uvicorn's own)
        super().__init__(*args, **options)
        self._is_in_head = True
        self._head_bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()
        # The application can only end an answer; the connection would wait for a client to take
        # what has been written, for ever.
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        # Of one read, which may hold a body as well, no more than a head is looked at.
        is_over = self._is_in_head and self._head_bytes > self.head_bytes_max
        if is_over and b"\r\n\r\n" not in data:
            self._refuse()
            return
        super().data_received(data)
        # Whole reads without a byte of a body: trailers, or extensions of a chunk.
        if not self._is_in_head and self._head_bytes > self.head_bytes_max:
            self._refuse()

    def _begin_head(self) -> None:
        self._end_head()
        self._is_in_head = True
        self._timer = self.loop.call_later(HEAD_S_MAX, self._drop)

    def _end_head(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _drop(self) -> None:
        self.transport.close()

    def _refuse(self) -> None:
        self._end_head()
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
            b"content-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()
