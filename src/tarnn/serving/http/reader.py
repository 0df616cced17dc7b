"""From the engines' threads to the server's loop: one call a step, whatever the number of streams."""

import asyncio
from collections import deque
from collections.abc import Iterable

from tarnn.serving.engine import Engine
from tarnn.serving.http.times import Times
from tarnn.serving.request import Event, Request, Usage
from tarnn.serving.stream import Stream


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class Mailbox:
    """Wakes readers on the loop. An engine tells all of a step's news in a row: the loop is called for the first only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._full: deque[Reader] = deque()
        self._called = False

    def put(self, reader: "Reader") -> None:
        """There is news for this reader. From any thread."""
        self._full.append(reader)
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before the readers are taken: who comes now calls again
        while self._full:
            self._full.popleft().wake()


class Reader:
    """The events of one request: of one stream, or of several prompts, whose choices are counted on.

    silence: seconds after which `next` returns without events. times: the server's histograms.
    """

    def __init__(self, mailbox: Mailbox, times: Times, silence: float):
        self.streams: list[Stream] = []
        self.open = 0  # choices that have not ended
        self._mailbox, self._times, self._silence = mailbox, times, silence
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._gone = self._quiet = False
        self._first_choices: list[int] = []
        self._since = self._loop.time()
        self.begun = False  # there was an event
        self._timer = self._loop.call_later(silence, self._tick)

    def submit(self, engine: Engine, requests: Iterable[Request]) -> None:
        """All of them, or none: what was submitted is cancelled where another one is refused."""
        try:
            for request in requests:
                self._first_choices.append(self.open)
                self.streams.append(engine.submit(request, self._ring))
                self.open += request.n
        except BaseException:
            self.leave()
            raise

    async def next(self) -> list[Event]:
        """The events since the last call; none after a silence. Raises ClientGone."""
        while True:
            if self._gone:
                raise ClientGone
            self._quiet = False
            if events := self._take():
                return events
            self._waiting = self._loop.create_future()
            await self._waiting
            self._waiting = None
            if self._quiet:
                return []

    def wake(self) -> None:
        waiting = self._waiting
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def leave(self) -> None:
        """Nobody reads on: what still runs is cancelled."""
        self._gone = True
        self._timer.cancel()
        if self.open:
            for stream in self.streams:
                stream.cancel()
        self.wake()

    @property
    def usage(self) -> Usage:
        """Of all prompts together."""
        return Usage(*map(sum, zip(*(stream.usage for stream in self.streams))))

    def _ring(self) -> None:
        self._mailbox.put(self)

    def _tick(self) -> None:
        if self._quiet:
            self.wake()
        self._quiet = True
        self._timer = self._loop.call_later(self._silence, self._tick)

    def _take(self) -> list[Event]:
        if len(self.streams) == 1:
            events = self.streams[0].take()
        else:
            events = [
                event._replace(choice=first + event.choice)
                for first, stream in zip(self._first_choices, self.streams)
                for event in stream.take()
            ]
        if events:
            self._count(events)
        return events

    def _count(self, events: list[Event]) -> None:
        now = self._loop.time()
        if self.begun:
            self._times.gaps.add(now - self._since)
        else:
            self.begun = True
            self._times.first_tokens.add(now - self._since)
        self._since = now
        for event in events:
            if event.finish:
                self.open -= 1
