"""An answer that is not streamed: all events of a request, gathered."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tarnn.serving.http.errors import failed
from tarnn.serving.http.reader import ClientGone, Reader
from tarnn.serving.http.sse import watch
from tarnn.serving.request import Event, TokenLogprob

FEW = 4096  # tokens and logprobs that are written as JSON at once
WRITER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass
class Answer:
    """One choice, whole."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""


def check(event: Event) -> None:
    """Raises ApiError for an event that is none: the engine failed, or was stopped."""
    if event.finish == "error":
        raise failed(event.error)
    if event.finish == "cancelled":
        raise failed("The server stopped before the answer was whole.")


async def gather(request: HttpRequest, reader: Reader, echoes: Sequence[Event] = ()) -> list[Answer]:
    """All choices, each behind its echo. The client's leaving cancels them: then ClientGone is raised."""
    pieces = {echo.choice: [echo] for echo in echoes}
    watching = asyncio.ensure_future(watch(request.receive, reader))
    try:
        while reader.open:
            for event in await reader.next():
                check(event)
                pieces.setdefault(event.choice, []).append(event)
    finally:
        watching.cancel()
        reader.leave()
    return [joined(pieces[choice]) for choice in sorted(pieces)]


def joined(events: list[Event]) -> Answer:
    return Answer(
        text="".join(event.text for event in events),
        logprobs=[logprob for event in events for logprob in event.logprobs],
        finish=events[-1].finish,
    )


def numbers_of(answers: Sequence[Answer]) -> int:
    """How many logprobs are told."""
    return sum(1 + len(logprob.likeliest) for answer in answers for logprob in answer.logprobs)


async def whole(
    build: Callable[[], dict[str, Any]], numbers: int, headers: Mapping[str, str] | None = None
) -> Response:
    """An answer as JSON. One of many numbers is built and written in a thread, bit by bit: the loop is not held up."""
    if numbers <= FEW:
        return JSONResponse(build(), headers=headers)
    text = await asyncio.to_thread(lambda: "".join(WRITER.iterencode(build())))
    return Response(text, headers=headers, media_type="application/json")


async def client_gone(_: HttpRequest, error: Exception) -> Response:
    """Nobody reads it; a log may."""
    assert isinstance(error, ClientGone)
    return Response(status_code=499)
