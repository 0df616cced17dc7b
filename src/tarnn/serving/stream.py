"""Hand events from the engine's thread to a request's reader: without waiting, in a thread, or in an asyncio loop.

The engine's thread never waits for a reader. Whatever is not needed to go on writing, such as the text of tokens, is made on the
reader's side, while the engine's kernel runs.
"""

import asyncio
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from tarnn.decoding.streaming import KEEP, TextStream
from tarnn.serving.request import Event, Request, TokenLogprob, Usage
from tarnn.serving.snapshot import Snapshot, Tokens


class Choice:
    """One of the n texts of a request. Each side appends or counts and waits for nobody: no lock is needed.

    tokens: written so far; logprobs, one per token, where they are wanted; texts: if the request has stop strings, since the
    engine must look for these itself; both until the reader takes them. `finish` comes last. taken: tokens that it has had.

    For the engine alone: prompt, all tokens before it; most, how many it may write; at, its state while it has no row;
    ending, how it will end once its last token was read; proven, as of a snapshot.
    """

    def __init__(self, queue: "RequestQueue", index: int, text: TextStream):
        self.queue, self.index = queue, index
        self.tokens, self.taken = array("i"), 0
        self.logprobs: deque[TokenLogprob] = deque()
        self.texts: deque[str] = deque()
        self.finish = self.error = self.ending = ""
        self.snapshot: Snapshot | None = None
        self.prompt: Tokens = np.zeros(0, np.int32)
        self.most = 0
        self.at: Snapshot | None = None
        begin = queue.request.begin
        self.proven = begin is None or begin.proven
        self._text = text
        self._engine_reads = bool(queue.request.stop)

    # of the engine's thread

    def wrote(self, token: int, logprob: TokenLogprob | None) -> None:
        """Add a token; set `ending` if it is the last one."""
        queue = self.queue
        if self._engine_reads:
            self._text.push(token, queue.ends)
            if self._text.over:
                self.ending = "stop"
            self.texts.append(self._text.take())
        if logprob is not None:
            self.logprobs.append(logprob)
        self.tokens.append(token)
        if token in queue.ends:
            self.ending = "stop"
        elif not self.ending and len(self.tokens) >= self.most:
            self.ending = "length"

    def end(self, finish: str, snapshot: Snapshot | None = None, error: str = "") -> None:
        """End the choice."""
        if self._engine_reads:
            self._text.finish(finish, goes_on=_goes_on(finish, snapshot))
            self.texts.append(self._text.take())
        self.snapshot, self.error, self.at = snapshot, error, None
        self.finish = finish

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the choice."""
        return len(self.prompt) + len(self.tokens)

    def all_tokens(self) -> Tokens:
        return np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    # of the reader

    @property
    def has_news(self) -> bool:
        return bool(self.finish) or len(self.tokens) > self.taken

    def take(self) -> Event | None:
        """Return what is new, or None."""
        finish = self.finish  # before the rest, so that nothing can come after it
        tokens = self.tokens[self.taken :].tolist()
        logprobs = [self.logprobs.popleft() for _ in tokens] if self.logprobs else []
        self.taken += len(tokens)
        text = self._take_text(tokens, finish)
        if not (tokens or text or finish):
            return None
        return Event(self.index, text, tuple(tokens), tuple(logprobs), finish, self.snapshot, self.error)

    def _take_text(self, tokens: list[int], finish: str) -> str:
        if self._engine_reads:
            return "".join(self.texts.popleft() for _ in range(len(self.texts)))
        for token in tokens:
            self._text.push(token, self.queue.ends)
        if finish:
            self._text.finish(finish, goes_on=_goes_on(finish, self.snapshot))
        return self._text.take()


class RequestQueue:
    """The choices of one request, between the engine's thread and the reader, and the reader's `waiter`.

    decode: as `TextStream` takes it. ends: tokens that end a choice. seed: of all draws.
    ask(command, queue): requests from the engine to "cancel" or "resume". paused: the engine waits for the reader.
    """

    def __init__(
        self,
        request: Request,
        seed: int,
        decode: Callable[[list[int]], str],
        ends: frozenset[int],
        ask: Callable[[str, "RequestQueue"], None],
        on_events: Callable[[], None] | None,
    ):
        self.request, self.seed, self.ends, self.ask, self.on_events = request, seed, ends, ask, on_events
        self.waiter: Callable[[], None] | tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.paused = self.cancelled = False
        begin = request.begin
        self.num_prompt = len(request.prompt) + (0 if begin is None else len(begin.tokens))
        self.num_cached = 0
        self.choices = [Choice(self, index, self._text_stream(decode)) for index in range(request.n)]

    @property
    def going_on(self) -> list[Choice]:
        return [x for x in self.choices if not x.finish]

    def _text_stream(self, decode: Callable[[list[int]], str]) -> TextStream:
        """Return a new one that begins after the prompt."""
        context = self.request.prompt[-KEEP:].tolist()
        if len(context) < KEEP and self.request.begin is not None:
            context = [*self.request.begin.tokens[-KEEP:].tolist(), *context][-KEEP:]
        return TextStream(decode, context, self.request.stop)


class Stream:
    """The events of one request. One reader at a time: `for event in stream`, `async for event in stream`, or `take`.

    The engine writes ahead of the reader up to a bound; then the request is paused. A stream that is garbage is cancelled.
    """

    def __init__(self, queue: RequestQueue):
        self._queue = queue
        self._open = queue.choices
        self._ready: deque[Event] = deque()

    @property
    def request(self) -> Request:
        return self._queue.request

    @property
    def usage(self) -> Usage:
        """Count tokens; complete when the last choice has finished."""
        queue = self._queue
        return Usage(queue.num_prompt, queue.num_cached, sum(len(x.tokens) for x in queue.choices))

    @property
    def over(self) -> bool:
        """Return True if all events have been taken."""
        return not (self._open or self._ready)

    def cancel(self) -> None:
        """End the choices that still go on, within one step, with the finish "cancelled"."""
        if not self._queue.cancelled and self._queue.going_on:
            self._queue.cancelled = True
            self._queue.ask("cancel", self._queue)

    def take(self) -> list[Event]:
        """Return what is there now, without waiting: at most one event of each choice."""
        self._fill()
        events = list(self._ready)
        self._ready.clear()
        return events

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Event:
        while not self._fill():
            if self.over:
                raise StopIteration
            gate = threading.Lock()
            gate.acquire()
            self._queue.waiter = gate.release
            try:
                if not self._has_news():
                    gate.acquire()
            finally:
                self._queue.waiter = None
        return self._ready.popleft()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        while not self._fill():
            if self.over:
                raise StopAsyncIteration
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._queue.waiter = loop, future
            try:
                if not self._has_news():
                    await future
            finally:
                self._queue.waiter = None
        return self._ready.popleft()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def _has_news(self) -> bool:
        return any(x.has_news for x in self._open)

    def _fill(self) -> bool:
        """Take news from the choices; return True if there is an event."""
        if self._ready:
            return True
        queue = self._queue
        for choice in self._open:
            if (event := choice.take()) is not None:
                self._ready.append(event)
        if any(x.finish for x in self._ready):
            ended = {x.choice for x in self._ready if x.finish}
            self._open = [x for x in self._open if x.index not in ended]
        if queue.paused:
            queue.ask("resume", queue)
        return bool(self._ready)


def notify(queues: Iterable[RequestQueue]) -> None:
    """Tell the readers that there is news: each loop and each `on_events` once. Never raises."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    calls: dict[Callable[[], None], None] = {}
    for queue in queues:
        if queue.waiter is not None:
            waiter, queue.waiter = queue.waiter, None
            if isinstance(waiter, tuple):
                loops.setdefault(waiter[0], []).append(waiter[1])
            elif waiter is not None:
                waiter()
        if queue.on_events is not None:
            calls[queue.on_events] = None
    for call in calls:
        _guarded(call)
    for loop, futures in loops.items():
        _guarded(loop.call_soon_threadsafe, _set, futures)


def _guarded(call: Callable[..., Any], *arguments: Any) -> None:
    """Call without raising: a loop may be closed and a callback may fail, and readers' errors are not the engine's."""
    with suppress(Exception):
        call(*arguments)


def _set(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _goes_on(finish: str, snapshot: Snapshot | None) -> bool:
    """Return True if half a character at the end may be completed by what goes on from the snapshot."""
    return finish == "length" and snapshot is not None
