"""Read a long text into a state in pieces, so that others come between and the client sees the progress."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest

from tarnn.serving.http.errors import ApiError
from tarnn.serving.http.prompts import Ids
from tarnn.serving.http.reader import Reader
from tarnn.serving.http.to_engine import client, start, tenant
from tarnn.serving.request import Request, Usage
from tarnn.serving.snapshot import Snapshot

PIECE = 4096  # tokens
PATIENCE = 60  # times that a piece after the first one is tried again while the queue is full


class Progress(NamedTuple):
    """snapshot: the state after `tokens_read` tokens; cached: tokens that were not read again."""

    tokens_read: int
    cached: int
    snapshot: Snapshot


async def chunked_prefill(
    request: HttpRequest, engine: Any, ids: Ids, begin: Snapshot | None, boundaries: tuple[int, ...] = ()
) -> AsyncIterator[Progress]:
    """Read these tokens, at least one, after `begin`, and report after each piece.

    Raises ApiError: 429 if the queue is full at the first piece; later ones wait for room.
    """
    cached = 0
    for past in range(0, len(ids), PIECE):
        piece = Request(
            prompt=ids[past : past + PIECE],
            max_tokens=0,
            begin=begin,
            boundaries=boundaries,
            keep=True,
            tenant=tenant(request),
            client=client(request),
        )
        begin, usage = await read_piece(await started(request, engine, piece, PATIENCE if past else 0))
        read_before = usage.prompt_tokens - len(piece.prompt) if past else 0
        cached += usage.cached_tokens - read_before
        yield Progress(past + len(piece.prompt), cached, begin)


async def read_piece(reader: Reader) -> tuple[Snapshot, Usage]:
    snapshot = None
    try:
        while reader.open:
            for event in await reader.next():
                snapshot = event.snapshot or snapshot
    finally:
        reader.leave()
    assert snapshot is not None  # the request has `keep`
    return snapshot, reader.usage


async def started(request: HttpRequest, engine: Any, piece: Request, patience: int) -> Reader:
    while True:
        try:
            return start(request, engine, [piece])
        except ApiError as error:
            if error.status != 429 or not patience:
                raise
            patience -= 1
            await asyncio.sleep(float(error.headers["Retry-After"]))
