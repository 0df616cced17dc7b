"""A connection whose request begins within some bytes and seconds, and whose client may send no more and still be answered."""

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD = 64 * 2**10  # bytes of a request's line and headers, or little more
HEAD_SECONDS = 30.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # any client reads it, and one that is gone resets the connection
FIRST_LOOK, LAST_LOOK = 0.01, 1.0  # seconds between two looks whether it has


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, which bounds nothing, and closes a connection whose client sends no more."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head: int | None = 0  # bytes of the present head; None behind its end
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, transport.close)
        self._next_look: asyncio.TimerHandle | None = None

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

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether an answer is on its way to a client that sends no more. One that has gone looks the same, until it is sent
        something: then there is an error on the socket, which nobody sees who doesn't ask."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or cycle.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        if not cycle.response_started:
            self.transport.write(CONTINUE)
        self._look(FIRST_LOOK)
        return True

    def _look(self, pause: float) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._next_look = self.loop.call_later(pause, self._look, min(2 * pause, LAST_LOOK))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
