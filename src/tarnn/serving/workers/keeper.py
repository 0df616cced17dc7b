"""Copies of a process's connections, so that whoever waits for an answer gets one when the process dies."""

import contextlib
import socket
import struct

from tarnn.serving.workers.board import OWED, Board

READY, HELD, GONE = b"r", b"+", b"-"
RECORD = struct.Struct("=cH")  # one of these, and a connection's place; with HELD comes a descriptor
WORDS = (
    b'{"error": {"message": "The process that worked on this answer has died; it is started again. Repeat the request.", '
    b'"type": "server_error", "param": null, "code": "worker_died"}}'
)
BAD_GATEWAY = (
    b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(WORDS), WORDS)
)


class Keeper:
    """The connections of the process at `index`, as it tells of them over `channel`."""

    def __init__(self, index: int, board: Board, channel: socket.socket):
        self.index, self.board, self.channel = index, board, channel
        self.ready = False
        self._kept: dict[int, socket.socket] = {}
        channel.setblocking(False)

    def listen(self) -> bool:
        """Take what has been told. False: the process has ended."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    record, descriptors, *_ = socket.recv_fds(self.channel, RECORD.size, 1)
                except ConnectionError:
                    return False
                if len(record) < RECORD.size:
                    return False
                what, place = RECORD.unpack(record)
                self._note(what, place, [socket.socket(fileno=x) for x in descriptors])
        return True

    def _note(self, what: bytes, place: int, connections: list[socket.socket]) -> None:
        if what == READY:
            self.ready = True
        elif (old := self._kept.pop(place, None)) is not None:
            old.close()
        for connection in connections:
            self._kept[place] = connection

    def bury(self) -> int:
        """The process has died: who waits for an answer is told so, all others see their connection close.

        Returns how many were told. An answer that had begun just ends; its client sees that the last chunk is missing.
        """
        told = 0
        for place, connection in self._kept.items():
            with connection, contextlib.suppress(OSError):
                if self.board.due(self.index, place) == OWED:
                    connection.setblocking(False)
                    connection.send(BAD_GATEWAY)
                    told += 1
                connection.shutdown(socket.SHUT_RDWR)
        self._kept.clear()
        self.board.clear(self.index)
        self.channel.close()
        return told
