"""Server-sent events: an answer as it is written, one transport write for what there is."""

import asyncio
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tarnn.serving.http.errors import ApiError
from tarnn.serving.http.reader import ClientGone, Reader
from tarnn.serving.request import Event

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy must not collect events
}
Encode = Callable[[list[Event]], bytes]


def escaped(text: str) -> bytes:
    """The text as a JSON string. In ASCII: some clients take U+2028 for the end of a line."""
    return encode_basestring_ascii(text).encode()


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def watch(receive: Receive, reader: Reader) -> None:
    """Leave the reader once the client is gone."""
    await gone(receive)
    reader.leave()


async def gone(receive: Receive) -> None:
    """Wait until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def failure(error: ApiError) -> bytes:
    """An event that is an error."""
    return f"data: {error.text}\n\n".encode()


class EventStream(Response):
    """encode: from events to what is sent of them; last: what is sent when all choices have ended.

    headers: what is known of the request when the first event is there. The status waits for that event too, so that a
    request which fails before it has a status that says so; encode raises ApiError for an event that is an error.
    """

    def __init__(
        self, reader: Reader, encode: Encode, last: Callable[[], bytes], headers: Callable[[], Mapping[str, str]]
    ):
        self.reader, self.encode, self.last, self.headers_of = reader, encode, last, headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reader, encode = self.reader, self.encode
        watching = asyncio.ensure_future(watch(receive, reader))
        begun = False
        try:
            while reader.open:
                events = await reader.next()
                body = encode(events) if events else PING
                if not begun:
                    await send(self._start())
                    begun = True
                await send(part(body))
            await send(part(self.last(), more=False))
        except ClientGone:
            pass
        except ApiError as error:
            if not begun:
                await error.response()(scope, receive, send)
            else:
                await send(part(failure(error), more=False))
        finally:
            watching.cancel()
            reader.leave()

    def _start(self) -> Message:
        headers = {**HEADERS, **self.headers_of()}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}
