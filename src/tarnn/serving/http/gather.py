"""Answer a completion or a chat: its choices are streamed, or gathered until they are whole."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tarnn.serving.engine import Engine
from tarnn.serving.http.reader import Reader, attended
from tarnn.serving.http.request_schemas import ChoicesRequest
from tarnn.serving.http.sse import Chunks, EventStream, Style
from tarnn.serving.http.to_engine import head_of, start, state_header, usage_of
from tarnn.serving.request import Event, Request

FEW = 4096  # tokens and logprobs that are written as JSON at once
WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


async def answer(
    request: HttpRequest,
    engine: Engine,
    body: ChoicesRequest,
    requests: list[Request],
    style: Style,
    logprobs: Callable[[Event], Any] | None,
    echoes: Sequence[Event] = (),
) -> Response:
    """Run these requests and answer in that style. logprobs, echoes: as in `Chunks`."""
    reader = start(request, engine, requests)
    if body.stream:
        chunks = Chunks(style, head_of(style.kind, style.chunk, engine), reader, body.stream_options, logprobs, echoes)
        return EventStream(chunks.frames(), partial(state_header, reader))
    choices = await attended(request.receive, gather(reader, echoes))
    head = head_of(style.kind, style.name, engine)

    def choice_of(choice: Event) -> dict[str, Any]:
        numbers = None if logprobs is None else logprobs(choice)
        end = {"logprobs": numbers, "finish_reason": choice.finish}
        return {"index": choice.choice} | style.content(choice.text) | end

    def build() -> dict[str, Any]:
        return head | {"choices": list(map(choice_of, choices)), "usage": usage_of(reader.usage)}

    count = sum(1 + len(logprob.likeliest) for choice in choices for logprob in choice.logprobs)
    return await as_json(build, count, state_header(reader))


async def gather(reader: Reader, echoes: Sequence[Event] = ()) -> list[Event]:
    """Return each choice as one event, after its echo."""
    pieces = {echo.choice: [echo] for echo in echoes}
    try:
        while reader.open:
            for event in await reader.next():
                pieces.setdefault(event.choice, []).append(event)
    finally:
        reader.leave()
    return [joined(pieces[choice]) for choice in sorted(pieces)]


def joined(events: list[Event]) -> Event:
    text = "".join(event.text for event in events)
    logprobs = tuple(logprob for event in events for logprob in event.logprobs)
    return events[-1]._replace(text=text, tokens=(), logprobs=logprobs)


async def as_json(
    build: Callable[[], dict[str, Any]], count: int, headers: Mapping[str, str] | None = None
) -> Response:
    """Return what `build` returns. With many numbers it is built and written in a thread, so that the loop is not held up.

    count: of its numbers.
    """
    if count <= FEW:
        return JSONResponse(build(), headers=headers)
    text = await asyncio.to_thread(lambda: "".join(WRITER.iterencode(build())))
    return Response(text, headers=headers, media_type="application/json")
