"""What all processes see of each other: how much each has to do, and which of its connections wait for an answer."""

import mmap
import os
import struct
import tempfile

PLACES = 4096  # connections of one process whose answers are looked after
IDLE, OWED, BEGUN = 0, 1, 2  # what a connection is due: nothing, an answer, or the rest of one
COUNT = struct.Struct("=i")


class Board:
    """A few bytes of memory that several processes share. file: of another process's board, inherited; None makes one.

    Each process writes its own load and its own places, and nothing else.
    """

    def __init__(self, count: int, file: int | None = None):
        self.count = count
        size = count * (COUNT.size + PLACES)
        if file is None:
            with tempfile.TemporaryFile() as fresh:
                file = os.dup(fresh.fileno())
            os.ftruncate(file, size)
        self.file = file
        self._bytes = mmap.mmap(file, size)

    @property
    def loads(self) -> list[int]:
        """How many requests each process is answering."""
        return [load for (load,) in COUNT.iter_unpack(self._bytes[: self.count * COUNT.size])]

    def set_load(self, index: int, load: int) -> None:
        COUNT.pack_into(self._bytes, index * COUNT.size, load)

    def due(self, index: int, place: int) -> int:
        return self._bytes[self._at(index, place)]

    def set_due(self, index: int, place: int, due: int) -> None:
        self._bytes[self._at(index, place)] = due

    def clear(self, index: int) -> None:
        """That process has ended: it has nothing to do."""
        self.set_load(index, 0)
        self._bytes[self._at(index, 0) : self._at(index, PLACES)] = bytes(PLACES)

    def close(self) -> None:
        self._bytes.close()
        os.close(self.file)

    def _at(self, index: int, place: int) -> int:
        return self.count * COUNT.size + index * PLACES + place
