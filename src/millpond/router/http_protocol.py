"""uvicorn's HTTP/1.1 with bounds on the head of a request: its size, and how long it takes."""

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_S_MAX: Final = 30.0


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to a head of more than ``head_bytes_max``, and drops who never ends one."""

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

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            # Of one read, which may hold a body as well, no more than a head is looked at.
            if self._head_bytes > self.head_bytes_max and b"\r\n\r\n" not in data:
                self._refuse()
                return
        super().data_received(data)

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
