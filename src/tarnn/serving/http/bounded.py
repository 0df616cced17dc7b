"""A connection whose request begins within some bytes and seconds: who sends a head without an end is cut off."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 64 * 2**10  # bytes of a request's line and headers, or little more
HEAD_SECONDS = 30.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, which bounds neither."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head: int | None = 0  # bytes of the present head; None behind its end
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > MOST_HEAD and not self.transport.is_closing():
                self.send_400_response("The request's headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = self._head or 0
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def on_headers_complete(self) -> None:
        self._head = None
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
