"""Starts the processes that serve together, starts those again that die, and ends them all."""

import secrets
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tarnn.serving.workers.board import Board
from tarnn.serving.workers.keeper import Keeper
from tarnn.serving.workers.place import Place

TICK = 0.1  # seconds within which a signal is seen
STABLE = 10.0  # seconds: a process that lived longer is started again at once
LONGEST_DELAY = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ENDINGS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGKILL,
)  # of the processes, for the first of our signals and those that follow


@dataclass
class Worker:
    """One process, and those that were started in its place. delay: before the next one, in seconds; due: when."""

    process: subprocess.Popen[bytes]
    keeper: Keeper
    started: float
    delay: float = 0.5
    due: float | None = None


class Supervisor:
    """Runs `command` `count` times; each process finds its place by `own_place`.

    listener: the public socket. states: the folder that all keep their states in; None: one that goes with the last of them.
    say: where deaths are told; on_ready: called once, when all take requests.
    """

    def __init__(
        self,
        command: Sequence[str],
        count: int,
        listener: socket.socket,
        *,
        states: Path | None = None,
        say: Callable[[str], None] = print,
        on_ready: Callable[[], None] = lambda: None,
    ):
        self.command, self.count, self.listener = list(command), count, listener
        self.states, self.say, self.on_ready = states, say, on_ready
        self.board, self._owner = Board(count), secrets.token_hex(16)
        self._signals = 0
        self._workers: dict[int, Worker] = {}
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Until a signal ends all. Returns the exit code: that of the first process where that one can't start."""
        before = {number: signal.signal(number, self._signalled) for number in SIGNALS}
        try:
            with tempfile.TemporaryDirectory(prefix="tarnn-") as folder:
                self._folder = Path(folder)
                self.listener.listen(2048)
                return self._watch()
        finally:
            for worker in self._workers.values():
                worker.process.kill()
                worker.process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.close()
            self.board.close()

    def _watch(self) -> int:
        self._start(0)  # alone: what keeps it from starting is said once
        told_ready = False
        while not self._signals or self._workers:
            for key, _ in self._selector.select(TICK):
                index: int = key.data
                if not self._workers[index].keeper.listen() and (code := self._ended(index)) is not None:
                    return code
            now = time.monotonic()
            for index, worker in list(self._workers.items()):
                if worker.due is not None and (self._signals or worker.due <= now):
                    del self._workers[index]
                    if not self._signals:
                        self._start(index, worker.delay)
            if not self._signals and 0 in self._workers and self._workers[0].keeper.ready:
                for index in range(self.count):
                    if index not in self._workers:
                        self._start(index)
                if not told_ready and all(worker.keeper.ready for worker in self._workers.values()):
                    told_ready = True
                    self.on_ready()
        return 0

    def _start(self, index: int, delay: float = 0.5) -> None:
        ours, theirs = socket.socketpair()
        place = Place(
            index=index,
            count=self.count,
            folder=str(self._folder),
            states=str((self.states or self._folder / "states").absolute()),
            owner=self._owner,
            listener=self.listener.fileno(),
            channel=theirs.fileno(),
            board_file=self.board.file,
        )
        with theirs:
            process = subprocess.Popen(
                self.command,
                env=place.environment(),
                pass_fds=[place.listener, place.channel, place.board_file],
                start_new_session=True,  # Ctrl-C is for this process, which passes it on
            )
        keeper = Keeper(index, self.board, ours)
        self._workers[index] = Worker(process, keeper, time.monotonic(), delay)
        self._selector.register(ours, selectors.EVENT_READ, index)

    def _ended(self, index: int) -> int | None:
        """A process has gone. Returns the code to exit with where it can't be started again."""
        worker = self._workers[index]
        self._selector.unregister(worker.keeper.channel)
        code = worker.process.wait()
        told = worker.keeper.bury()
        if self._signals:
            del self._workers[index]
            return None
        if index == 0 and not worker.keeper.ready and len(self._workers) == 1:
            return code or 1
        lived = time.monotonic() - worker.started
        wait = 0.0 if lived > STABLE else worker.delay
        worker.delay = 0.5 if lived > STABLE else min(2 * worker.delay, LONGEST_DELAY)
        worker.due = time.monotonic() + wait
        why = f"signal {-code}" if code < 0 else f"exit code {code}"
        answers = "an answer" if told == 1 else f"{told} answers"
        self.say(
            f"tarnn: worker {index} died ({why}) while {answers} waited; these clients were told (502). It is started again."
        )
        return None

    def _signalled(self, number: int, _: FrameType | None) -> None:
        if not self._signals:
            self.say("tarnn: takes no more requests and answers those that run to their ends; Ctrl-C again stops them")
        ending = ENDINGS[min(self._signals, len(ENDINGS) - 1)]
        self._signals += 1
        for worker in self._workers.values():
            if worker.due is None:
                worker.process.send_signal(ending)
