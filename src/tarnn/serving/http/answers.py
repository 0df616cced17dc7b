"""An answer that is not streamed: all events of a request, gathered."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from tarnn.serving.http.errors import failed
from tarnn.serving.http.reader import ClientGone, Reader
from tarnn.serving.http.sse import watch
from tarnn.serving.request import Event, TokenLogprob
from tarnn.serving.snapshot import Snapshot


@dataclass
class Answer:
    """One choice, whole."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str = ""
    snapshot: Snapshot | None = None


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
        tokens=[token for event in events for token in event.tokens],
        logprobs=[logprob for event in events for logprob in event.logprobs],
        finish=events[-1].finish,
        snapshot=events[-1].snapshot,
    )


async def client_gone(_: HttpRequest, error: Exception) -> Response:
    """Nobody reads it; a log may."""
    assert isinstance(error, ClientGone)
    return Response(status_code=499)
