"""From the engines' threads to the server's loop, and the end of work whose client has gone."""

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Receive

from tarnn.serving.engine import Engine
from tarnn.serving.http.errors import ClientGone, failed
from tarnn.serving.http.operators import Latencies
from tarnn.serving.request import Event, Request, Usage
from tarnn.serving.stream import Stream

STOPPED = "The server stopped before the answer was whole."
Result = TypeVar("Result")


class AsyncBridge:
    """Wakes readers on the loop. An engine reports a step's events in a row: the loop is called once for all of them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: deque[Reader] = deque()
        self._called = False

    def put(self, reader: "Reader") -> None:
        """Wake this reader soon. From any thread."""
        self._ready.append(reader)
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before the readers are taken: a later `put` calls again
        while self._ready:
            self._ready.popleft().wake()


class Reader:
    """The events of one HTTP request: of one stream, or of several prompts, whose choices are numbered on.

    silence: seconds after which `next` returns without events. latencies: the server's histograms.
    """

    def __init__(self, bridge: AsyncBridge, latencies: Latencies, silence: float):
        self.streams: list[Stream] = []
        self.open = 0  # choices that have not ended
        self._bridge, self._latencies, self._silence = bridge, latencies, silence
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._quiet = False
        self._first_choices: list[int] = []
        self._since = self._loop.time()
        self.begun = False  # there was an event
        self._timer = self._loop.call_later(silence, self._tick)

    def submit(self, engine: Engine, requests: Iterable[Request]) -> None:
        """Submit all of them, or none: if one is refused, the earlier ones are cancelled."""
        try:
            for request in requests:
                self._first_choices.append(self.open)
                self.streams.append(engine.submit(request, self._notify))
                self.open += request.n
        except BaseException:
            self.leave()
            raise

    async def next(self) -> list[Event]:
        """Return the events since the last call; none after a silence. ApiError (500) if the engine failed or was stopped."""
        while True:
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
        """Stop reading: what still runs is cancelled."""
        self._timer.cancel()
        if self.open:
            for stream in self.streams:
                stream.cancel()

    @property
    def usage(self) -> Usage:
        """The sums over all prompts."""
        return Usage(*map(sum, zip(*(stream.usage for stream in self.streams))))

    def _notify(self) -> None:
        self._bridge.put(self)

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
            self._latencies.gaps.add(now - self._since)
        else:
            self.begun = True
            self._latencies.first_tokens.add(now - self._since)
        self._since = now
        for event in events:
            if event.finish:
                self.open -= 1
                if event.finish in ("error", "cancelled"):
                    raise failed(event.error or STOPPED)


async def gone(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def attended(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the work's result. If the client goes away first, cancel the work and raise ClientGone."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)  # it leaves its rows before we go on
