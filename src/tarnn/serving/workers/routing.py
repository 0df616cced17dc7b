"""Sends each request to the process that has its conversation's state in memory."""

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tarnn.serving.workers.choice import choose
from tarnn.serving.workers.connection import CONNECTION, Connection, as_bytes
from tarnn.serving.workers.conversation import conversation
from tarnn.serving.workers.handing import hand_over
from tarnn.serving.workers.place import Place

ROUTED = ("/v1/completions", "/v1/chat/", "/v1/responses", "/v1/states")


class Routing:
    """app: answers what stays here. most, seconds: bounds of a body; beyond them a request stays, and the app refuses it."""

    def __init__(self, app: ASGIApp, place: Place, most: int, seconds: float):
        self.app, self.place, self.most, self.seconds = app, place, most, seconds
        self._load = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = scope.get(CONNECTION)
        if connection is None or not scope["path"].startswith(ROUTED):
            await self.app(scope, receive, send)
            return
        messages: list[Message] = []
        if not connection.is_handed and await self._gives_away(scope, receive, connection, messages):
            return
        self._count(1)
        try:
            await self.app(scope, replay(messages, receive), send)
        finally:
            self._count(-1)

    async def _gives_away(
        self, scope: Scope, receive: Receive, connection: Connection, messages: list[Message]
    ) -> bool:
        """Whether another process has the request now. messages: gets what was received of it."""
        body = await self._body(receive, messages)
        if body is None:
            return False
        key = conversation(scope["path"], body)
        if key is None or (owner := choose(key, self.place.board.loads)) == self.place.index:
            return False
        connection.flow.pause_reading()  # what came now would be lost with the other process
        if connection.can_go(scope) and await hand_over(
            self.place.hatch_of(owner), connection.socket, as_bytes(scope, body)
        ):
            await connection.give_away()
            return True
        connection.flow.resume_reading()
        return False

    async def _body(self, receive: Receive, messages: list[Message]) -> bytes | None:
        """None where it is too large, too slow, or the client is gone."""
        size, more = 0, True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                while more and size <= self.most:
                    messages.append(message := await receive())
                    more = message.get("more_body", False)
                    size += len(message.get("body", b""))
        if more or messages[-1]["type"] == "http.disconnect":
            return None
        return b"".join([message["body"] for message in messages])

    def _count(self, change: int) -> None:
        self._load += change
        self.place.board.set_load(self.place.index, self._load)


def replay(messages: list[Message], receive: Receive) -> Receive:
    """What was received already, then what comes."""
    if not messages:
        return receive
    waiting = iter(messages)

    async def again() -> Message:
        return next(waiting, None) or await receive()

    return again
