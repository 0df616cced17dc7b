"""Runs the application on a socket until a signal: the first one drains, the second one stops."""

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

from tarnn.errors import UserError
from tarnn.serving.http.bounded import BoundedProtocol

KEEP_ALIVE = 75  # seconds that a silent connection stays open; more than proxies hold theirs
MOST_CONNECTIONS = 4096
STILL = 10.0  # seconds without a byte read after which a server that ends waits for a client no longer
WATCH = 0.02  # seconds between two looks at what still runs


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, which is ours from now on. Raises UserError where it can't be had."""
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
    """As a client writes it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """report: told `ready` once connections are taken, and what a signal does. stop: ends what still runs; called at the second
    signal. trusted_proxies: addresses or networks whose word counts on who asks."""

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
        if os.name == "posix":  # wakes a loop that waits
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
        """Until all is answered and read. Who sends no body now, or reads nothing for long, is not waited for."""
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
