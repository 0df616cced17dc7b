"""Reads a request's body: bounded in bytes and in time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from tarnn.serving.http.errors import ApiError, bad, unavailable
from tarnn.serving.http.json_body import SHORT
from tarnn.serving.http.settings import ServerSettings
from tarnn.serving.http.wire import Shape, parse


async def read_bytes(request: Request, most: int | None = None) -> bytes:
    """The whole body. Raises ApiError: 413 for one that is too large, 408 for a slow one, 503 for one that
    is not here when the server stops.

    most: bytes; by default the server's bound. A body that says its size is refused before it is read.
    """
    settings: ServerSettings = request.app.state.settings
    most = settings.max_body if most is None else most
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise too_large(most)
    pieces, size, state = [], 0, request.app.state
    limit = asyncio.timeout(settings.body_seconds)
    state.bodies.add(limit)
    try:
        async with limit:
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise too_large(most)
                pieces.append(piece)
    except TimeoutError:
        if state.draining:
            raise unavailable() from None
        raise ApiError(408, f"The body was not here within {settings.body_seconds:g} s.", code="timeout") from None
    except ClientDisconnect:
        raise bad("The client went away.") from None
    finally:
        state.bodies.discard(limit)
    return b"".join(pieces)


def too_large(most: int) -> ApiError:
    return ApiError(413, f"The body is larger than {most:,} bytes. Send less.", code="body_too_large")


async def read_request(request: Request, shape: type[Shape]) -> Shape:
    """The body as that shape; ApiError for all that is wrong with it."""
    return await parsed(shape, await read_bytes(request))


async def parsed(shape: type[Shape], body: bytes) -> Shape:
    """The same, of a body that is here: a large one does not hold the loop up."""
    return parse(shape, body) if len(body) <= SHORT else await asyncio.to_thread(parse, shape, body)
