"""Many texts written at once by one model: requests go in, streams of events come out, one thread runs the model."""

import math
import secrets
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from tarnn.serving.checks import check_request
from tarnn.serving.model import ServedModel
from tarnn.serving.reading import Reading
from tarnn.serving.request import Request
from tarnn.serving.rounds import Keeper, Rounds
from tarnn.serving.stream import Mail, Stream


class Busy(RuntimeError):
    """The queue is full. retry_after: in how many seconds there may be room."""

    def __init__(self, retry_after: float):
        super().__init__(f"the queue is full; try again in {math.ceil(retry_after)} s.")
        self.retry_after = retry_after


class Stats(NamedTuple):
    """running: choices that are written now; ready: those that wait for a row; parked: those whose reader is slow. waiting:
    requests whose prompts are not read yet, and waiting_tokens of these. The rest counts since the start: errors, requests that
    ended with one; error: the last one, "" while there was none."""

    running: int
    ready: int
    parked: int
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
    max_parked: bytes of states at which texts wait for slow readers; beyond, the oldest of the client who has the most is ended.
    max_queue, max_queue_tokens: requests whose prompts are not read yet, and the tokens of these; beyond, `submit` raises Busy.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        store: Keeper | None = None,
        max_rows: int = 32,
        prefill_piece: int = 256,
        max_parked: int = 2**27,
        max_queue: int = 256,
        max_queue_tokens: int = 2**20,
    ):
        self.model, self.store = model, store
        self._max_queue, self._max_queue_tokens = max_queue, max_queue_tokens
        self._rounds = Rounds(model, store, max_rows, prefill_piece, max_parked, self._was_read)
        self._decode = model.decoder()
        self._lock = threading.Lock()
        self._asked: SimpleQueue[tuple[str, Any]] = (
            SimpleQueue()
        )  # a stream that is let go cancels, at any place of any thread
        self._waiting: dict[Mail, int] = {}
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
            self._asked.put(("tell", None))  # wakes it
            self._thread.join()

    def __enter__(self) -> "Engine":
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def ready(self) -> bool:
        """Whether requests are taken and worked on."""
        return self._thread is not None and self._thread.is_alive() and not (self._closing or self._error)

    @property
    def stats(self) -> Stats:
        rounds = self._rounds
        return Stats(
            len(rounds.rows),
            len(rounds.ready),
            sum(map(len, list(rounds.parked.values()))),
            len(self._waiting),
            self._waiting_tokens,
            rounds.tokens_read,
            rounds.tokens_written,
            rounds.tokens_cached,
            self._requests,
            self._refused,
            rounds.errors,
            self._error or rounds.error,
        )

    def submit(self, request: Request, on_events: Callable[[], None] | None = None) -> Stream:
        """Ask for an answer; its events come from the stream.

        on_events: called in the engine's thread when there is something new, once a step, also where many requests share it.
        It must not wait. Raises ValueError for a request that can't be, Busy where the queue is full, and RuntimeError where the
        engine takes no more.
        """
        check_request(request, self.model)
        seed = request.sampling.seed
        seed = secrets.randbits(63) if seed is None else seed
        own: frozenset[int] = getattr(self.model.model, "end_ids", frozenset())
        ends = own if request.end_ids is None else request.end_ids
        mail = Mail(request, seed, self._decode, ends, self._ask, on_events)
        reading, size = Reading(mail), len(request.prompt)
        with self._lock:
            if self._closing or self._error:
                why = f"has failed: {self._error}" if self._error else "is being closed"
                raise RuntimeError(f"the engine of {self.model.name} {why}; it takes no more requests.")
            full = len(self._waiting) >= self._max_queue
            if full or (self._waiting and self._waiting_tokens + size > self._max_queue_tokens):
                self._refused += 1
                raise Busy(self._retry_after())
            self._waiting[mail] = size
            self._waiting_tokens += size
            self._requests += 1
            self._asked.put(("add", reading))
        return Stream(mail)

    def check_room(self) -> None:
        """Raise Busy where the queue is full: before any work is done for a request that would be refused."""
        with self._lock:
            if len(self._waiting) >= self._max_queue:
                self._refused += 1
                raise Busy(self._retry_after())

    def _ask(self, what: str, mail: Mail) -> None:
        self._asked.put((what, mail))

    def _retry_after(self) -> float:
        return max(1.0, self._waiting_tokens * self._rounds.pace)

    def _was_read(self, mail: Mail) -> None:
        with self._lock:
            self._waiting_tokens -= self._waiting.pop(mail, 0)

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        try:
            while not self._over():
                self._answer()
                if self._rounds.busy:
                    self._rounds.turn()
                else:
                    self._rounds.tell()
                    self._do(*self._asked.get())
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end()

    def _over(self) -> bool:
        rounds = self._rounds
        return self._closing and not (self._draining and (rounds.busy or rounds.parked or not self._asked.empty()))

    def _answer(self) -> None:
        """Do what was asked for since the last round."""
        while not self._asked.empty():
            self._do(*self._asked.get())

    def _do(self, what: str, whom: Any) -> None:
        """add a reading; cancel or resume a request; tell those who wait."""
        arguments = () if whom is None else (whom,)
        getattr(self._rounds, what)(*arguments)

    def _end(self) -> None:
        """Nobody waits for a thread that has ended."""
        with self._lock:
            self._closing = True
        self._answer()
        self._rounds.end("error" if self._error else "cancelled", self._error)
        self._rounds.tell()
