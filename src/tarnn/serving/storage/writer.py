"""The thread that writes to the disk, so that nobody else waits for it who need not."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tarnn.serving.storage.disk import Save

TICK = 1.0  # seconds between two looks at what is due
BATCH = 64  # states that one change of the index enters at most


class Writer:
    """Does one thing after another, in the order in which they came; many states at once.

    save: writes states. due: what else is to be done, now and then.
    """

    def __init__(self, save: Callable[[list[Save]], None], due: Callable[[], None]):
        self._save, self._due = save, due
        self._tasks: deque[Save | tuple[Callable[[], Any], Future]] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tarnn-states", daemon=True)
        self._thread.start()

    def save(self, job: Save) -> Future:
        """When the state is on the disk: its row."""
        self._add(job)
        return job.done

    def call(self, task: Callable[[], Any]) -> Future:
        """When the task was done: what it returned."""
        done: Future = Future()
        self._add((task, done))
        return done

    def close(self) -> None:
        """When all that came is done."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()

    def _add(self, task: Any) -> None:
        with self._news:
            if self._closed:
                raise RuntimeError("the store of states is closed. Open it again.")
            self._tasks.append(task)
            self._news.notify()

    def _run(self) -> None:
        while True:
            with self._news:
                if not (self._tasks or self._closed):
                    self._news.wait(TICK)
                tasks = [self._tasks.popleft() for _ in range(min(BATCH, len(self._tasks)))]
                if self._closed and not tasks:
                    return
            self._do(tasks)
            self._due()

    def _do(self, tasks: list[Any]) -> None:
        saves: list[Save] = []
        for task in [*tasks, None]:
            if isinstance(task, Save):
                saves.append(task)
                continue
            if saves:
                self._save_all(saves)
                saves = []
            if task is not None:
                run, done = task
                try:
                    done.set_result(run())
                except Exception as error:  # for whoever waits
                    done.set_exception(error)

    def _save_all(self, saves: list[Save]) -> None:
        try:
            self._save(saves)
        except Exception as error:  # a thread that dies would let all wait forever
            for job in saves:
                if not job.done.done():
                    job.done.set_exception(error)
