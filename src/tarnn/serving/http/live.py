"""Work for a client who may go away: it ends when nobody waits for it any more."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tarnn.serving.http.errors import ApiError
from tarnn.serving.http.reader import ClientGone
from tarnn.serving.http.sse import HEADERS, failure, gone, part

Result = TypeVar("Result")


async def attended(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Where the client goes away first it is cancelled, and ClientGone raised."""
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


class LiveStream(Response):
    """Server-sent events that are made as they are sent. What fails before the first one has the status of its error.

    headers: what is known of the request when the first one is there.
    """

    def __init__(self, frames: AsyncGenerator[bytes], headers: Callable[[], Mapping[str, str]] = dict):
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._frames, self._late_headers = frames, headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            try:
                first = await attended(receive, anext(self._frames))
                self.headers.update(self._late_headers())
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await attended(receive, self._send(send, first))
            except ClientGone:
                pass

    async def _send(self, send: Send, first: bytes) -> None:
        await send(part(first))
        try:
            async for frame in self._frames:
                await send(part(frame))
        except ApiError as error:
            await send(part(failure(error)))
        await send(part(b"", more=False))
