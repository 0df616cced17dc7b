"""Run the application on a socket until a signal: the first one drains, the second one stops."""

import asyncio
import errno
import gc
import os
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tarnn.errors import UserError

KEEP_ALIVE = 75  # seconds that a silent connection stays open; more than proxies hold theirs
MOST_CONNECTIONS = 4096
STILL = 10.0  # seconds without a byte read after which a server that ends waits for a client no longer
WATCH = 0.02  # seconds between two looks at running requests
MOST_HEAD = 64 * 2**10  # bytes of a request's line and headers, or little more
HEAD_SECONDS = 30.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"  # any client reads it, and one that is gone resets the connection
FIRST_LOOK, LAST_LOOK = 0.01, 1.0  # seconds between two looks for an error on the socket


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to that address. Raises UserError if that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host} is no address of this machine: {error}. Leave it out for 127.0.0.1.") from error
    if os.name == "posix":  # a port is free again when its server has ended
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is in use. Give another --port; 0 finds a free one.") from error
        raise UserError(f"{host}:{port} can't be served: {error.strerror}. Give another --host or --port.") from error
    return bound


def address_of(bound: socket.socket) -> str:
    """Return the address as a client writes it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose request begins within some bytes and seconds, and whose client may stop sending and still be answered.

    uvicorn's own has no such limits, and closes the connection of a client that sends no more.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head: int | None = 0  # bytes of the present head; None after its end
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
        """Return whether an answer is on its way to a client that sends no more.

        A client that has gone looks the same until it is sent something; then the socket has an error, which `_look` finds.
        """
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


class Server(uvicorn.Server):
    """report: called with `ready` once connections are taken, and with what a signal does. stop: ends running requests;
    called at the second signal. trusted_proxies: addresses or networks whose X-Forwarded-For is believed."""

    def __init__(
        self,
        app: Starlette,
        report: Callable[[str], None],
        stop: Callable[[], None],
        *,
        ready: str,
        trusted_proxies: Sequence[str] = (),
    ):
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=bool(trusted_proxies),
                forwarded_allow_ips=list(trusted_proxies),
                timeout_keep_alive=KEEP_ALIVE,
                limit_concurrency=MOST_CONNECTIONS,
            )
        )
        self.app, self._report, self._stop, self._ready = app, report, stop, ready
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            gc.collect()
            gc.freeze()  # a look at all objects of models and libraries would hold the loop up
            self._report(self._ready)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        gc.unfreeze()

    async def main_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if os.name == "posix":  # wakes a waiting loop
            for number in (signal.SIGINT, signal.SIGTERM):
                try:
                    loop.add_signal_handler(number, self.handle_exit, number, None)
                except (RuntimeError, ValueError):  # not the main thread
                    break
        await super().main_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal: take no more requests, and end when the last is answered. End at the second."""
        state = self.app.state
        if state.draining:
            self._report("tarnn: stopped")
            self._stop()
            self.should_exit = self.force_exit = True
            return
        state.draining = True
        if state.inside:
            self._report(
                f"tarnn: takes no more requests and answers {state.inside} to their ends; Ctrl-C again stops them"
            )
        self._draining = asyncio.get_event_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Wait until all is answered and read, but not for bodies that have not arrived, or clients that read nothing."""
        loop = asyncio.get_running_loop()
        for limit in self.app.state.bodies:
            limit.reschedule(loop.time())
        unread: dict[Any, tuple[int, float]] = {}
        while self.app.state.inside or unread:
            await asyncio.sleep(WATCH)
            sizes = {x: x.transport.get_write_buffer_size() for x in self.server_state.connections}
            now, before = loop.time(), unread
            unread = {x: (size, now) for x, size in sizes.items() if size}
            for connection, (size, _) in unread.items():
                if connection in before and before[connection][0] == size:
                    unread[connection] = before[connection]
                    if now - before[connection][1] > STILL:
                        connection.transport.abort()
        self._report("tarnn: stopped")
        self.should_exit = True
