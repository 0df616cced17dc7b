"""Many texts written at once by one model: requests go in, streams of events come out, one thread runs the model."""

import math
import secrets
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from tarnn.serving.model import ServedModel
from tarnn.serving.pool import Prefill
from tarnn.serving.request import Request, check_request
from tarnn.serving.scheduler import PrefixCache, Scheduler
from tarnn.serving.stream import RequestQueue, Stream


class Busy(RuntimeError):
    """The queue is full. retry_after: in how many seconds there may be room."""

    def __init__(self, retry_after: float):
        super().__init__(f"the queue is full; try again in {math.ceil(retry_after)} s.")
        self.retry_after = retry_after


class Stats(NamedTuple):
    """Numbers of an engine.

    running: choices in rows; ready: choices that wait for a row; paused: choices whose readers are slow. waiting: requests whose
    prompts are not read yet, and waiting_tokens of these. The rest counts since the start: errors, requests that ended with one;
    error: the last one, "" while there was none.
    """

    running: int
    ready: int
    paused: int
    waiting: int
    waiting_tokens: int
    tokens_read: int
    tokens_written: int
    tokens_cached: int
    requests: int
    refused: int
    errors: int
    error: str


class Engine:
    """One model that continues many texts at once.

        with Engine(open_served("runs/first")) as engine:
            for event in engine.submit(Request(prompt_ids, max_tokens=100)):
                print(event.text, end="")

    Every answer is, to the last bit, what the token loop makes of its request alone: with the same sampling and seed, whatever
    else is going on. store: keeps states of what was read and written, and new requests begin from them.
    max_rows: choices that are written at once; prefill_piece: tokens of prompts that are read between two of theirs.
    max_paused: bytes of states at which texts wait for slow readers; beyond, the oldest of the client that has the most is ended.
    max_queue, max_queue_tokens: requests whose prompts are not read yet, and the tokens of these; beyond, `submit` raises Busy.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        store: PrefixCache | None = None,
        max_rows: int = 32,
        prefill_piece: int = 256,
        max_paused: int = 2**27,
        max_queue: int = 256,
        max_queue_tokens: int = 2**20,
    ):
        self.model, self.store = model, store
        self._max_queue, self._max_queue_tokens = max_queue, max_queue_tokens
        self.scheduler = Scheduler(model, store, max_rows, prefill_piece, max_paused, self._was_read)
        self._decode = model.decoder()
        self._lock = threading.Lock()
        # a method of the scheduler and its argument; a stream that is garbage cancels, at any place of any thread
        self._commands: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._waiting: dict[RequestQueue, int] = {}
        self._waiting_tokens = self._requests = self._refused = 0
        self._closing = self._draining = False
        self._error = ""
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to work. `submit` may be called before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"engine of {self.model.name}", daemon=True)
            self._thread.start()

    def close(self, *, drain: bool = False) -> None:
        """End the thread: what goes on is cancelled, or first comes to its end (drain). No more requests are taken."""
        with self._lock:
            self._closing, self._draining = True, drain
        if self._thread is None:
            self._end()
        else:
            self._commands.put(("notify_readers", None))  # wakes it
            self._thread.join()

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def ready(self) -> bool:
        """Return True if requests are taken and worked on."""
        return self._thread is not None and self._thread.is_alive() and not (self._closing or self._error)

    @property
    def stats(self) -> Stats:
        scheduler = self.scheduler
        return Stats(
            len(scheduler.rows),
            len(scheduler.ready),
            sum(map(len, list(scheduler.paused.values()))),
            len(self._waiting),
            self._waiting_tokens,
            scheduler.tokens_read,
            scheduler.tokens_written,
            scheduler.tokens_cached,
            self._requests,
            self._refused,
            scheduler.errors,
            self._error or scheduler.error,
        )

    def submit(self, request: Request, on_events: Callable[[], None] | None = None) -> Stream:
        """Take a request; its events come from the stream.

        on_events: called in the engine's thread when there is something new, once a step, also where many requests share it.
        It must not wait. Raises ValueError for a request that can't be, Busy where the queue is full, and RuntimeError where the
        engine takes no more.
        """
        check_request(request, self.model)
        seed = request.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed
        ends = self.model.model.end_ids if request.end_ids is None else request.end_ids
        queue = RequestQueue(request, seed, self._decode, ends, self._ask, on_events)
        prefill, size = Prefill(queue), len(request.prompt)
        with self._lock:
            if self._closing or self._error:
                why = f"has failed: {self._error}" if self._error else "is being closed"
                raise RuntimeError(f"the engine of {self.model.name} {why}; it takes no more requests.")
            full = len(self._waiting) >= self._max_queue
            if full or (self._waiting and self._waiting_tokens + size > self._max_queue_tokens):
                self._refused += 1
                raise Busy(self._retry_after())
            self._waiting[queue] = size
            self._waiting_tokens += size
            self._requests += 1
            self._commands.put(("add", prefill))
        return Stream(queue)

    def check_room(self) -> None:
        """Raise Busy where the queue is full: before any work is done for a request that would be refused."""
        with self._lock:
            if len(self._waiting) >= self._max_queue:
                self._refused += 1
                raise Busy(self._retry_after())

    def step(self) -> bool:
        """Do what was requested, then one step of the scheduler; return False if there was no work.

        The engine's thread calls it; without `start` a test may, in a thread without gradients.
        """
        while not self._commands.empty():
            self._do(*self._commands.get())
        if not self.scheduler.busy:
            return False
        self.scheduler.step()
        return True

    def _ask(self, what: str, queue: RequestQueue) -> None:
        self._commands.put((what, queue))

    def _retry_after(self) -> float:
        return max(1.0, self._waiting_tokens * self.scheduler.pace)

    def _was_read(self, queue: RequestQueue) -> None:
        with self._lock:
            self._waiting_tokens -= self._waiting.pop(queue, 0)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        try:
            while not self._over():
                if not self.step():
                    self.scheduler.notify_readers()
                    if not self._over():  # or the step took what `close` wakes with
                        self._do(*self._commands.get())
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end()

    def _over(self) -> bool:
        scheduler = self.scheduler
        return self._closing and not (
            self._draining and (scheduler.busy or scheduler.paused or not self._commands.empty())
        )

    def _do(self, method: str, argument: Any) -> None:
        """Call `add`, `cancel`, `resume` or `notify_readers` of the scheduler."""
        getattr(self.scheduler, method)(*(() if argument is None else (argument,)))

    def _end(self) -> None:
        """End all requests, so that no reader waits for a thread that has ended."""
        with self._lock:
            self._closing = True
        while not self._commands.empty():
            self._do(*self._commands.get())
        self.scheduler.end("error" if self._error else "cancelled", self._error)
        self.scheduler.notify_readers()
