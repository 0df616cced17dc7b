"""What the engine has written for a request, as its reader takes it: without waiting, in a thread, or in an asyncio loop.

The engine's thread appends to a mailbox and never waits for anybody. Whatever is not needed to go on writing, such as the text
of tokens, is made on the reader's side, while the engine's kernel runs.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from tarnn.decoding.streaming import KEEP, TextStream
from tarnn.serving.request import Event, Request, TokenLogprob, Usage
from tarnn.serving.snapshot import Snapshot

NO_TOKEN = -1


class News(NamedTuple):
    """One token of one choice, or its end, or both. text None: the reader makes it from the token."""

    choice: int
    token: int = NO_TOKEN
    logprob: TokenLogprob | None = None
    text: str | None = None
    finish: str = ""
    snapshot: Snapshot | None = None
    error: str = ""


class Mail:
    """Between the engine's thread, which puts news in, and one reader.

    tokens: of the prompt and of what it begins from; texts_of(choice): its `TextStream`, None for models without text.
    ask(what, mail): tells the engine "cancel" or "resume". seed: of all draws.
    """

    def __init__(
        self,
        request: Request,
        seed: int,
        decode: Callable[[list[int]], str] | None,
        ends: frozenset[int],
        ask: Callable[[str, "Mail"], None],
        on_events: Callable[[], None] | None,
    ):
        self.request, self.seed, self.ends, self.ask, self.on_events = request, seed, ends, ask, on_events
        self.news: deque[News] = deque()
        self.waiter: Callable[[], None] | tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self.parked = self.cancelled = False
        self.going_on = set(range(request.n))
        prompt, begin = len(request.prompt), request.begin
        self.num_prompt = prompt + (0 if begin is None else len(begin.tokens))
        self.num_cached = self.num_written = 0
        self._decode = decode

    def text_stream(self) -> TextStream | None:
        """A new one, behind the prompt."""
        if self._decode is None:
            return None
        context = self.request.prompt[-KEEP:].tolist()
        if len(context) < KEEP and self.request.begin is not None:
            context = [*self.request.begin.tokens[-KEEP:].tolist(), *context][-KEEP:]
        return TextStream(self._decode, context, self.request.stop)


class Stream:
    """The events of one request. One reader at a time: `for event in stream`, `async for event in stream`, or `take`."""

    def __init__(self, mail: Mail):
        self._mail = mail
        self._ready: deque[Event] = deque()
        self._texts: dict[int, TextStream | None] = {}
        self._unfinished = mail.request.n

    @property
    def request(self) -> Request:
        return self._mail.request

    @property
    def usage(self) -> Usage:
        """Complete when the last choice has finished."""
        return Usage(self._mail.num_prompt, self._mail.num_cached, self._mail.num_written)

    @property
    def over(self) -> bool:
        """Whether all events have been taken."""
        return not self._unfinished and not self._ready

    def cancel(self) -> None:
        """The choices that still go on end within one step, with the finish "cancelled"."""
        if not self._mail.cancelled and self._mail.going_on:
            self._mail.cancelled = True
            self._mail.ask("cancel", self._mail)

    def take(self) -> list[Event]:
        """What is there now, without waiting: at most one event of each choice that goes on, and one of each that ended."""
        events = [*self._ready, *self._collect()]
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
                if not self._mail.news:
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
                if not self._mail.news:
                    await future
            finally:
                self._mail.waiter = None
        return self._ready.popleft()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *exception: object) -> None:
        self.cancel()

    def __del__(self) -> None:
        """Nobody can read any more."""
        self.cancel()

    def _fill(self) -> bool:
        if not self._ready:
            self._ready.extend(self._collect())
        return bool(self._ready)

    def _collect(self) -> list[Event]:
        """The news of each choice as one event, as far as they have come."""
        mail, parts = self._mail, dict[int, list[News]]()
        while mail.news:
            news = mail.news.popleft()
            parts.setdefault(news.choice, []).append(news)
        if mail.parked:
            mail.ask("resume", mail)
        return [event for choice, news in parts.items() if (event := self._event(choice, news)) is not None]

    def _event(self, choice: int, news: list[News]) -> Event | None:
        last = news[-1]
        tokens = tuple(x.token for x in news if x.token != NO_TOKEN)
        logprobs = tuple(x.logprob for x in news if x.logprob is not None)
        text = self._text(choice, news)
        if last.finish:
            self._unfinished -= 1
            self._texts.pop(choice, None)
        elif not tokens and not text:
            return None
        return Event(choice, text, tokens, logprobs, last.finish, last.snapshot, last.error)

    def _text(self, choice: int, news: list[News]) -> str:
        if self._mail.request.stop:
            return "".join(x.text or "" for x in news)
        if choice not in self._texts:
            self._texts[choice] = self._mail.text_stream()
        if (stream := self._texts[choice]) is None:
            return ""
        for x in news:
            if x.token != NO_TOKEN:
                stream.push(x.token, self._mail.ends)
        if finish := news[-1].finish:
            stream.finish(finish, goes_on=news[-1].snapshot is not None)
        return stream.take()


def wake(mails: Iterable[Mail]) -> None:
    """Let the readers of these know that there are news: each loop and each `on_events` once. Never raises."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    calls: dict[Callable[[], None], None] = {}
    for mail in mails:
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
