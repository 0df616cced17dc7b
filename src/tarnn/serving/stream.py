"""What the engine has written for a request, as its reader takes it: without waiting, in a thread, or in an asyncio loop.

The engine's thread never waits for a reader. Whatever is not needed to go on writing, such as the text of tokens, is made on the
reader's side, while the engine's kernel runs.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from tarnn.decoding.streaming import KEEP, TextStream
from tarnn.serving.answer import Answer
from tarnn.serving.request import Event, Request, Usage


class Mail:
    """Between the engine's thread and the reader of one request: its answers, and who waits for them.

    decode: as `TextStream` takes it. ends: tokens that end an answer. seed: of all draws.
    ask(what, mail): tells the engine to "cancel" or "resume". parked: whether the engine waits for the reader to take something.
    """

    def __init__(
        self,
        request: Request,
        seed: int,
        decode: Callable[[list[int]], str],
        ends: frozenset[int],
        ask: Callable[[str, "Mail"], None],
        on_events: Callable[[], None] | None,
    ):
        self.request, self.seed, self.ends, self.ask, self.on_events = request, seed, ends, ask, on_events
        self.waiter: Callable[[], None] | tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.parked = self.cancelled = False
        begin = request.begin
        self.num_prompt = len(request.prompt) + (0 if begin is None else len(begin.tokens))
        self.num_cached = 0
        self.answers = [Answer(self, choice, self._text_stream(decode)) for choice in range(request.n)]

    @property
    def going_on(self) -> list[Answer]:
        return [x for x in self.answers if not x.finish]

    def _text_stream(self, decode: Callable[[list[int]], str]) -> TextStream:
        """Return a new one that begins after the prompt."""
        context = self.request.prompt[-KEEP:].tolist()
        if len(context) < KEEP and self.request.begin is not None:
            context = [*self.request.begin.tokens[-KEEP:].tolist(), *context][-KEEP:]
        return TextStream(decode, context, self.request.stop)


class Stream:
    """The events of one request. One reader at a time: `for event in stream`, `async for event in stream`, or `take`.

    What is not taken is written up to a bound; then the request is parked until it is. A stream that nobody holds any more is
    cancelled.
    """

    def __init__(self, mail: Mail):
        self._mail = mail
        self._open = mail.answers
        self._ready: deque[Event] = deque()

    @property
    def request(self) -> Request:
        return self._mail.request

    @property
    def usage(self) -> Usage:
        """Complete when the last choice has finished."""
        mail = self._mail
        return Usage(mail.num_prompt, mail.num_cached, sum(len(x.tokens) for x in mail.answers))

    @property
    def over(self) -> bool:
        """Whether all events have been taken."""
        return not (self._open or self._ready)

    def cancel(self) -> None:
        """The choices that still go on end within one step, with the finish "cancelled"."""
        if not self._mail.cancelled and self._mail.going_on:
            self._mail.cancelled = True
            self._mail.ask("cancel", self._mail)

    def take(self) -> list[Event]:
        """What is there now, without waiting: at most one event of each choice."""
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
            self._mail.waiter = gate.release
            try:
                if not self._has_news():
                    gate.acquire()
            finally:
                self._mail.waiter = None
        return self._ready.popleft()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Event:
        while not self._fill():
            if self.over:
                raise StopAsyncIteration
            loop = asyncio.get_running_loop()
            future = loop.create_future()
            self._mail.waiter = loop, future
            try:
                if not self._has_news():
                    await future
            finally:
                self._mail.waiter = None
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
        """Whether there is an event to give."""
        if self._ready:
            return True
        mail = self._mail
        for answer in self._open:
            if (event := answer.take()) is not None:
                self._ready.append(event)
        if any(x.finish for x in self._ready):
            ended = {x.choice for x in self._ready if x.finish}
            self._open = [x for x in self._open if x.choice not in ended]
        if mail.parked:
            mail.ask("resume", mail)
        return bool(self._ready)


def wake(mails: Iterable[Mail]) -> None:
    """Let the readers of these know that there are news: each loop and each `on_events` once. Never raises."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    calls: dict[Callable[[], None], None] = {}
    for mail in mails:
        if mail.waiter is not None:
            waiter, mail.waiter = mail.waiter, None
            if isinstance(waiter, tuple):
                loops.setdefault(waiter[0], []).append(waiter[1])
            elif waiter is not None:
                waiter()
        if mail.on_events is not None:
            calls[mail.on_events] = None
    for call in calls:
        _guarded(call)
    for loop, futures in loops.items():
        _guarded(loop.call_soon_threadsafe, _set, futures)


def _guarded(call: Callable[..., Any], *arguments: Any) -> None:
    """A loop may be closed, and a callback may fail: readers' errors are not the engine's."""
    with suppress(Exception):
        call(*arguments)


def _set(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
