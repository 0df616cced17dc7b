"""One of several processes that serve together: how it takes connections from the others, and tells of its own."""

import asyncio
import contextlib
import functools
import heapq
import signal
import socket
from collections import deque
from typing import Any

import uvicorn

from tarnn.serving.ids import IDS
from tarnn.serving.workers.board import IDLE, PLACES
from tarnn.serving.workers.choice import owners
from tarnn.serving.workers.connection import Connection
from tarnn.serving.workers.handing import LONGEST, Hatch, hand_over
from tarnn.serving.workers.keeper import GONE, HELD, READY, RECORD
from tarnn.serving.workers.place import Place

AGAIN = 0.01  # seconds after which the channel is tried again when it was full


class Member:
    """What makes uvicorn's server one of several: it begins with `Config(http=member.protocol)`, joins and leaves."""

    def __init__(self, place: Place):
        self.place = place
        self.protocol = functools.partial(Connection, told=self._told)
        self._channel = socket.socket(fileno=place.channel)
        self._channel.setblocking(False)
        self._free = list(range(PLACES))
        self._places: dict[Connection, int] = {}
        self._unsaid: deque[tuple[bytes, int, Any]] = deque()
        self._hatch: Hatch | None = None

    def join(self, server: uvicorn.Server) -> None:
        """Take requests from the others. On the server's loop, when it accepts connections."""
        IDS.own = self._owns
        self._hatch = Hatch(self.place.hatch_of(self.place.index), functools.partial(self._take, server))
        asyncio.get_running_loop().add_reader(self._channel, self._orphaned, server)
        self._say(READY, 0)

    def leave(self) -> None:
        """Take no more of the others' requests: they answer them."""
        if self._hatch is not None:
            self._hatch.close()

    async def _take(self, server: uvicorn.Server, connection: socket.socket, data: bytes) -> None:
        connection.setblocking(False)
        make = functools.partial(self.protocol, server.config, server.server_state, server.lifespan.state, handed=data)
        await asyncio.get_running_loop().connect_accepted_socket(make, connection)

    def _owns(self, id: str) -> bool:
        return owners(id.encode(), self.place.count)[0] == self.place.index

    def _orphaned(self, server: uvicorn.Server) -> None:
        """The process that started this one never says anything: it has ended."""
        asyncio.get_running_loop().remove_reader(self._channel)
        server.handle_exit(signal.SIGTERM, None)

    def _told(self, connection: Connection) -> None:
        """A connection is there, or gone."""
        if connection.lost:
            if (place := self._places.pop(connection, None)) is not None:
                connection.due = lambda due: None
                heapq.heappush(self._free, place)
                self._say(GONE, place)
        elif self._free and connection.socket.family != socket.AF_UNIX:  # those are between processes
            place = self._places[connection] = heapq.heappop(self._free)
            connection.due = functools.partial(self.place.board.set_due, self.place.index, place)
            connection.due(IDLE)
            self._say(HELD, place, connection)

    def _say(self, what: bytes, place: int, connection: Connection | None = None) -> None:
        self._unsaid.append((what, place, connection))
        if len(self._unsaid) == 1:
            self._say_all()

    def _say_all(self) -> None:
        with contextlib.suppress(ConnectionError):
            while self._unsaid:
                what, place, connection = self._unsaid[0]
                held = [] if connection is None or connection.lost else [connection.socket.fileno()]
                try:
                    socket.send_fds(self._channel, [RECORD.pack(what, place)], held)
                except BlockingIOError:
                    asyncio.get_running_loop().call_later(AGAIN, self._say_all)
                    return
                self._unsaid.popleft()


async def ask(place: Place, index: int, data: bytes, seconds: float = 5.0) -> bytes | None:
    """What another process answers to a request whose answer ends with the connection; None where it doesn't."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            if not await hand_over(place.hatch_of(index), theirs, data):
                return None
        answer = bytearray()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(seconds):
                while len(answer) < LONGEST:
                    if not (piece := await loop.sock_recv(ours, 2**18)):
                        return bytes(answer)
                    answer += piece
    return None
