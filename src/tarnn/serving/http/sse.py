"""Server-sent events: an answer as it is written, in one transport write for all that is new."""

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tarnn.serving.http.errors import ApiError, ClientGone
from tarnn.serving.http.reader import Reader, attended
from tarnn.serving.http.request_schemas import StreamOptions
from tarnn.serving.http.to_engine import usage_of
from tarnn.serving.request import Event

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # a proxy must not collect events
}


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class EventStream(Response):
    """Server-sent events from a generator, which is closed when the client disconnects.

    headers: called when the first event is there. The status waits for that event too, so that a request which fails
    before it has an error's status.
    """

    def __init__(self, frames: AsyncGenerator[bytes], headers: Callable[[], Mapping[str, str]] = dict):
        self._frames, self._late_headers = frames, headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._frames):
            try:
                first = await attended(receive, anext(self._frames))
                headers = {**HEADERS, **self._late_headers()}
                raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                await attended(receive, self._send(send, first))
            except ClientGone:
                pass

    async def _send(self, send: Send, first: bytes) -> None:
        await send(part(first))
        try:
            async for frame in self._frames:
                await send(part(frame))
        except ApiError as error:
            await send(part(f"data: {error.text}\n\n".encode()))
        await send(part(b"", more=False))


class Style(NamedTuple):
    """How one API writes its choices. kind: the beginning of its ids; name, chunk: its types of objects.

    content: the text as a field of a whole choice. Of a chunk, opened, first: JSON before the text, and before the first
    text of a choice; closed: JSON after it.
    """

    kind: str
    name: str
    chunk: str
    content: Callable[[str], dict[str, Any]]
    opened: bytes
    first: bytes
    closed: bytes = b""


class Chunks:
    """Writes events as chunks. All but the text is the same each time, and so is written once.

    head: the fields of all chunks. options: whether usage is reported, at the end or in each chunk. logprobs: those of an
    event as JSON, or None if they were not requested. echoes: events before the first one of their choice.
    """

    def __init__(
        self,
        style: Style,
        head: dict[str, Any],
        reader: Reader,
        options: StreamOptions | None,
        logprobs: Callable[[Event], Any] | None,
        echoes: Iterable[Event],
    ):
        self._head, self._reader, self._logprobs = head, reader, logprobs
        self._echoes = {event.choice: event for event in echoes}
        self._with_usage = bool(options and options.include_usage)
        self._usage_in_each = self._with_usage and bool(options and options.continuous_usage_stats)
        self._begin = b"data: " + compact(head)[:-1] + b',"choices":[{"index":'
        self._opened, self._first, self._closed = b"," + style.opened, b"," + style.first, style.closed
        self._end_with(b',"usage":null}\n\n' if self._with_usage else b"}\n\n")
        self._begun: set[int] = set()

    def _end_with(self, end: bytes) -> None:
        self._end = end
        self._goes_on = self._closed + b',"logprobs":null,"finish_reason":null}]' + end

    async def frames(self) -> AsyncGenerator[bytes]:
        """Return the chunks of each batch of events together, to the end of all choices."""
        reader = self._reader
        try:
            while reader.open:
                yield self._encode(events) if (events := await reader.next()) else PING
            yield self._last()
        finally:
            reader.leave()

    def _encode(self, events: list[Event]) -> bytes:
        if self._usage_in_each:
            self._end_with(b',"usage":%b}\n\n' % compact(usage_of(self._reader.usage)))
        if self._echoes:
            events = [self._echoes.pop(x.choice) for x in events if x.choice in self._echoes] + events
        return b"".join(map(self._chunk, events))

    def _chunk(self, event: Event) -> bytes:
        choice = event.choice
        opened = self._opened
        if choice not in self._begun:
            self._begun.add(choice)
            opened = self._first
        text = escaped(event.text)
        if not event.finish and self._logprobs is None:
            return b"%b%d%b%b%b" % (self._begin, choice, opened, text, self._goes_on)
        logprobs = b"null" if self._logprobs is None else compact(self._logprobs(event))
        finish = compact(event.finish or None)
        rest = b'%b,"logprobs":%b,"finish_reason":%b}]%b' % (self._closed, logprobs, finish, self._end)
        return b"%b%d%b%b%b" % (self._begin, choice, opened, text, rest)

    def _last(self) -> bytes:
        if not self._with_usage:
            return DONE
        whole = self._head | {"choices": [], "usage": usage_of(self._reader.usage)}
        return b"data: " + compact(whole) + b"\n\n" + DONE


def escaped(text: str) -> bytes:
    """Return the text as a JSON string in ASCII: some clients take U+2028 for the end of a line."""
    return encode_basestring_ascii(text).encode()


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
