"""A connection of uvicorn's that can be given away, and that somebody else watches over while it is owed an answer."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tarnn.serving.http.bounded import BoundedProtocol
from tarnn.serving.workers.board import BEGUN, IDLE, OWED

CONNECTION = "tarnn.connection"  # in a request's scope: the connection that it came by


class Connection(BoundedProtocol):
    """handed: the bytes of a request that another process received, with which this connection begins.

    told: called with this connection when it is there, and when it is gone; `due` says what it owes its client.
    """

    def __init__(self, *arguments: Any, handed: bytes = b"", told: Callable[["Connection"], None], **options: Any):
        super().__init__(*arguments, **options)
        self.handed, self.told = handed, told
        self.given_away = self.lost = False
        self.due: Callable[[int], None] = lambda due: None
        self._answer: ASGIApp = self.config.loaded_app  # type: ignore[assignment]
        self.app = self._run  # type: ignore[assignment,has-type]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.told(self)
        if self.handed:
            self.data_received(self.handed)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        super().connection_lost(exc)
        if not self.given_away:  # the client learns it, though another process has a copy of the socket
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self.told(self)

    @property
    def socket(self) -> Any:
        return self.transport.get_extra_info("socket")

    @property
    def is_handed(self) -> bool:
        """Whether this is the request that it was handed over with: it stays here."""
        return bool(self.handed)

    def can_go(self, scope: Scope) -> bool:
        """Whether nothing has come behind this request: that would be lost to the other process."""
        return self.scope is scope and not self.lost

    async def give_away(self) -> None:
        """Another process has the socket: forget it, and leave the client in peace."""
        self.given_away = True
        self.transport.abort()
        while not self.lost:  # or uvicorn would miss an answer
            await asyncio.sleep(0)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CONNECTION] = self

        def seen(message: Message) -> Any:
            """No coroutine of its own: events of a stream pass here."""
            if message["type"] == "http.response.start":
                self.due(BEGUN)
            return send(message)

        self.due(OWED)
        try:
            await self._answer(scope, receive, seen)
        finally:
            self.due(IDLE)
            self.handed = b""


def as_bytes(scope: Scope, body: bytes) -> bytes:
    """A request as it goes over the wire; its body has one piece now."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    own = (b"content-length", b"transfer-encoding", b"expect")
    headers = [(name, value) for name, value in scope["headers"] if name not in own]
    headers.append((b"content-length", b"%d" % len(body)))
    head = [b"%b %b HTTP/%b" % (scope["method"].encode(), target, scope["http_version"].encode())]
    return b"\r\n".join([*head, *(b"%b: %b" % header for header in headers), b"", body])
