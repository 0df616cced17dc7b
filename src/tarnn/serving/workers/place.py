"""A process's place among the others: what it inherits from the one that started it."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from tarnn.serving.workers.board import Board

VARIABLE = "TARNN_WORKER"  # in the environment of a process that was started to serve with others


@dataclass(frozen=True)
class Place:
    """index of count processes; folder: where the sockets lie by which they reach each other. states: that of their states,
    which belongs to all that have the same `owner`.

    listener: the socket that all accept connections from; channel: to the process that started this one. board: shared memory.
    All three are descriptors, inherited.
    """

    index: int
    count: int
    folder: str
    states: str
    owner: str
    listener: int
    channel: int
    board_file: int

    @cached_property
    def board(self) -> Board:
        return Board(self.count, self.board_file)

    def public_socket(self) -> socket.socket:
        return socket.socket(fileno=self.listener)

    def hatch_of(self, index: int) -> Path:
        return Path(self.folder) / f"{index}.sock"

    def environment(self) -> dict[str, str]:
        """Of the process whose place this is."""
        return {**os.environ, VARIABLE: json.dumps(asdict(self))}


def own_place() -> Place | None:
    """The place of this process; None where it serves alone. Processes that it starts have none."""
    told = os.environ.pop(VARIABLE, None)
    return None if told is None else Place(**json.loads(told))
