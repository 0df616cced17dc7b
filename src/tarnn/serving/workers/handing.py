"""Connections passed between processes: a socket's descriptor, and the bytes of the request that came from it.

Over a Unix socket: the receiver says that it is there; then come the length of the bytes and the descriptor, the bytes, and
the receiver's word that it has them. So whoever hands over knows when it may forget the connection, and keeps it
where the receiver is gone, or says nothing at first.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

HERE, TAKEN = b"h", b"t"
PATIENCE = 0.5  # seconds for the receiver's first word
LONGEST = 64 * 2**20  # bytes of a request
HEADER = 4

Take = Callable[[socket.socket, bytes], Awaitable[None]]


async def hand_over(path: Path, connection: socket.socket, data: bytes) -> bool:
    """Whether the process that listens at `path` has the connection now. The caller closes its own copy."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as way:
        way.setblocking(False)
        try:
            async with asyncio.timeout(PATIENCE):
                await loop.sock_connect(way, str(path))
                if await loop.sock_recv(way, 1) != HERE:
                    return False
        except (OSError, TimeoutError):
            return False
        try:  # from here on the receiver may have it: only its end, or its word, says whether
            socket.send_fds(way, [len(data).to_bytes(HEADER)], [connection.fileno()])
            await loop.sock_sendall(way, data)
            return await loop.sock_recv(way, 1) == TAKEN
        except OSError:
            return False


class Hatch:
    """Where a process takes connections from the others. take(connection, data): what it does with each."""

    def __init__(self, path: Path, take: Take):
        path.unlink(missing_ok=True)  # left by a process that was killed
        self._take = take
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(256)
        self._listener.setblocking(False)
        self._tasks = {asyncio.ensure_future(self._accept())}

    def close(self) -> None:
        """Nothing more is taken: whoever connects learns that at once."""
        self._listener.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                way, _ = await loop.sock_accept(self._listener)
            except OSError:  # no descriptor left: others answer meanwhile
                await asyncio.sleep(0.1)
                continue
            task = asyncio.ensure_future(self._receive(way))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _receive(self, way: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with way, suppress(OSError):
            await loop.sock_sendall(way, HERE)
            await readable(way)
            header, descriptors, *_ = socket.recv_fds(way, HEADER, 1)
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                data = await receive_all(way, int.from_bytes(header))
                if data is None:
                    connection.close()
                    return
                await self._take(connection, data)
                await loop.sock_sendall(way, TAKEN)


async def readable(way: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(way, ready.set_result, None)
    try:
        await ready
    finally:
        loop.remove_reader(way)


async def receive_all(way: socket.socket, length: int) -> bytes | None:
    """So many bytes; None where the sender went away before the last of them, or promises too many."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < length <= LONGEST:
        piece = await loop.sock_recv(way, min(2**18, length - len(data)))
        if not piece:
            return None
        data += piece
    return bytes(data) if length <= LONGEST else None
