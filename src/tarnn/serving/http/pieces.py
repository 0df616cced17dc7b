"""A long text is read into a state in pieces, so that others come between and the client sees how far it is."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest

from tarnn.serving.http.answers import check
from tarnn.serving.http.asking import client, start, tenant
from tarnn.serving.http.errors import ApiError
from tarnn.serving.http.prompts import Ids
from tarnn.serving.request import Request, Usage
from tarnn.serving.snapshot import Snapshot

PIECE = 4096  # tokens
PATIENCE = 60  # times that a piece behind the first one is tried again while the queue is full


class Progress(NamedTuple):
    """How far the reading is. snapshot: where it stands; cached: tokens that were not read again."""

    tokens_read: int
    cached: int
    snapshot: Snapshot


async def read_in_pieces(
    request: HttpRequest, engine: Any, ids: Ids, begin: Snapshot | None, boundaries: tuple[int, ...] = ()
) -> AsyncIterator[Progress]:
    """Read these tokens behind `begin`, and tell after each piece. There is one token at least.

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
        begin, usage = await read_piece(request, engine, piece, patient=past > 0)
        read_before = usage.prompt_tokens - len(piece.prompt) if past else 0
        cached += usage.cached_tokens - read_before
        yield Progress(past + len(piece.prompt), cached, begin)


async def read_piece(request: HttpRequest, engine: Any, piece: Request, *, patient: bool) -> tuple[Snapshot, Usage]:
    reader = await started(request, engine, piece, PATIENCE if patient else 0)
    snapshot = None
    try:
        while reader.open:
            for event in await reader.next():
                check(event)
                snapshot = event.snapshot or snapshot
    finally:
        reader.leave()
    assert snapshot is not None  # `keep` was asked for
    return snapshot, reader.usage


async def started(request: HttpRequest, engine: Any, piece: Request, patience: int) -> Any:
    for left in range(patience, -1, -1):
        try:
            return start(request, engine, [piece])
        except ApiError as error:
            if error.status != 429 or not left:
                raise
            await asyncio.sleep(float(error.headers["Retry-After"]))
    raise AssertionError("the last try returns or raises")
