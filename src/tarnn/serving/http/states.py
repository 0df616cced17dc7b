"""/v1/states: texts that were read once, to begin from any number of times."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn.serving.http.asking import engine_of, refuse_when_full, tenant
from tarnn.serving.http.body import read_bytes, read_request
from tarnn.serving.http.chat import opened
from tarnn.serving.http.errors import ApiError, bad
from tarnn.serving.http.held import find, held_state, in_store, store_of
from tarnn.serving.http.live import LiveStream, attended
from tarnn.serving.http.pieces import Progress, read_in_pieces
from tarnn.serving.http.prompts import Ids, ids_of, prompt_ids
from tarnn.serving.http.sse import DONE
from tarnn.serving.http.state_wire import (
    MOST_LISTED,
    DeletedState,
    ForkRequest,
    ListQuery,
    ModelQuery,
    PromptTokensDetails,
    StateList,
    StateObject,
    StateProgress,
    StateQuery,
    StateRequest,
    StateUsage,
    UploadQuery,
)
from tarnn.serving.http.template import check_template
from tarnn.serving.http.wire import parse, parse_query
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.stored import StateInfo

JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"


async def create(request: HttpRequest) -> Response:
    """Read a text into a state, or take one that was downloaded: the body's type says which."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind == BYTES:
        return await add(request, parse_query(UploadQuery, request.query_params))
    if kind == TEXT:
        query = parse_query(StateQuery, request.query_params)
        asked = StateRequest(text=utf8(await read_bytes(request)), **query.model_dump())
    elif kind == JSON:
        asked = await read_request(request, StateRequest)
    else:
        raise ApiError(415, f"The body must be {JSON}, {TEXT} or {BYTES}; got {kind[:100]!r}.")
    return await read(request, asked)


async def read(request: HttpRequest, asked: StateRequest) -> Response:
    if sum(x is not None for x in (asked.text, asked.tokens, asked.messages)) != 1:
        raise bad("Give one of text, tokens and messages.", code="one_source")
    engine = engine_of(request, asked.model)
    store_of(engine)
    refuse_when_full(engine)
    begin = await held_state(request, engine, asked.state)
    ids, boundaries = await ids_asked(request, engine, asked, goes_on=begin is not None)
    if not len(ids):
        raise bad("There is nothing to read behind this state; POST /v1/states/ID/fork copies one.", "text")
    past = 0 if begin is None else len(begin.tokens)
    making = Making(request, engine, asked, ids, begin, tuple(past + place for place in boundaries))
    if asked.stream:
        return LiveStream(making.frames())
    made = await attended(request.receive, making.whole())
    return JSONResponse(made.model_dump())


async def ids_asked(
    request: HttpRequest, engine: Any, asked: StateRequest, *, goes_on: bool
) -> tuple[Ids, Sequence[int]]:
    """What is read, and places in it where messages end."""
    model, most = engine.model, request.app.state.settings.max_prompt
    if asked.text is not None:
        return await prompt_ids(model, asked.text, "text", most=most, goes_on=goes_on), ()
    if asked.messages is not None:
        check_template(model)
        messages = [message.plain for message in asked.messages]
        ids, boundaries = await asyncio.to_thread(opened, model, messages, answer_follows=False)
        return await prompt_ids(model, ids, "messages", most=most), boundaries
    ids = await asyncio.to_thread(ids_of, asked.tokens, "tokens")
    if not len(ids):
        raise bad("tokens must be a list of token ids that is not empty.", "tokens", "invalid_value")
    return await prompt_ids(model, ids, "tokens", most=most), ()


class Making:
    """A state in the making: it is read, held, and told of."""

    def __init__(
        self,
        request: HttpRequest,
        engine: Any,
        asked: StateRequest,
        ids: Ids,
        begin: Snapshot | None,
        boundaries: tuple[int, ...],
    ):
        self.request, self.engine, self.asked, self.ids = request, engine, asked, ids
        self.begin, self.boundaries = begin, boundaries

    async def whole(self) -> StateObject:
        async for progress in self._pieces():
            last = progress
        return await self._held(last)

    async def frames(self) -> AsyncGenerator[bytes]:
        """Server-sent events: one for each piece that was read, and one with the state."""
        async for progress in self._pieces():
            last = progress
            yield self._frame(progress)
        yield self._frame(last, await self._held(last))
        yield DONE

    def _pieces(self) -> AsyncIterator[Progress]:
        return read_in_pieces(self.request, self.engine, self.ids, self.begin, self.boundaries)

    def _frame(self, progress: Progress, made: StateObject | None = None) -> bytes:
        told = StateProgress(tokens_read=progress.tokens_read, tokens=len(self.ids), state=made)
        return b"data: " + told.model_dump_json().encode() + b"\n\n"

    async def _held(self, read: Progress) -> StateObject:
        store, parent = self.engine.store, None
        if self.asked.state is not None:
            parent = (await in_store(store.info, tenant(self.request), self.asked.state, param="state")).id
        hold = store.hold
        info = await in_store(hold, tenant(self.request), read.snapshot, name=self.asked.name, parent=parent)
        tokens = len(read.snapshot.tokens)
        cached = PromptTokensDetails(cached_tokens=read.cached)
        usage = StateUsage(prompt_tokens=tokens, prompt_tokens_details=cached, total_tokens=tokens)
        return described(self.engine, info, usage)


async def add(request: HttpRequest, query: UploadQuery) -> Response:
    """A state that was downloaded, here or from another server with the same model."""
    engine = engine_of(request, query.model)
    size = engine.model.model.new_state(1, 0).nbytes if engine.store is not None else 0
    data = await read_bytes(request, request.app.state.settings.max_body + size)
    info = await in_store(store_of(engine).add, tenant(request), data, name=query.name)
    return JSONResponse(described(engine, info).model_dump())


async def put(request: HttpRequest) -> Response:
    """The same, under a name that stands in the path: a conversation that moves keeps the id that its client knows."""
    named = parse_query(ModelQuery, request.query_params).model_dump(exclude_none=True)
    return await add(request, parse_query(UploadQuery, named | {"name": request.path_params["id"]}))


async def every(request: HttpRequest) -> Response:
    """Those of all models, a page of them."""
    query = parse_query(ListQuery, request.query_params)
    found = []
    for engine in request.app.state.engines.values():
        if engine.store is not None and query.model in (None, engine.model.name):
            found += [(engine, info) for info in await in_store(engine.store.list, tenant(request))]
    if query.after is not None:
        places = [place for place, (_, info) in enumerate(found) if info.id == query.after]
        if not places:
            raise ApiError(404, f"There is no state {query.after[:80]!r}.", param="after", code="state_not_found")
        found = found[places[0] + 1 :]
    limit = query.limit or MOST_LISTED
    data = [described(engine, info) for engine, info in found[:limit]]
    return JSONResponse(StateList(data=data, has_more=len(found) > limit).model_dump())


async def get(request: HttpRequest) -> Response:
    return JSONResponse(described(*await find(request, request.path_params["id"])).model_dump())


async def fork(request: HttpRequest) -> Response:
    """Another state that is the same, and goes its own way."""
    body = await read_bytes(request)
    asked = parse(ForkRequest, body) if body else ForkRequest()
    engine, info = await find(request, request.path_params["id"])
    copy = await in_store(engine.store.fork, tenant(request), info.id, asked.name)
    return JSONResponse(described(engine, copy).model_dump())


async def download(request: HttpRequest) -> Response:
    """The file that `tarnn generate --state-in` reads, and that this server or another one takes back."""
    engine, info = await find(request, request.path_params["id"])
    data = await in_store(engine.store.export, tenant(request), info.id)
    headers = {"content-disposition": f'attachment; filename="{info.name or info.id}.safetensors"'}
    return Response(data, media_type=BYTES, headers=headers)


async def delete(request: HttpRequest) -> Response:
    engine, info = await find(request, request.path_params["id"])
    await in_store(engine.store.delete, tenant(request), info.id)
    return JSONResponse(DeletedState(id=info.id).model_dump())


def described(engine: Any, info: StateInfo, usage: StateUsage | None = None) -> StateObject:
    return StateObject(
        id=info.id,
        model=engine.model.name,
        name=info.name,
        tokens=info.tokens,
        bytes=info.bytes,
        created=int(info.created),
        parent=info.parent,
        where=info.where,
        usage=usage,
    )


def utf8(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise bad(f"The text is not UTF-8: byte {error.start} of {len(data):,}.", "text") from None


routes = [
    Route("/v1/states", create, methods=["POST"]),
    Route("/v1/states", every),
    Route("/v1/states/{id}", get),
    Route("/v1/states/{id}", delete, methods=["DELETE"]),
    Route("/v1/states/{id}/fork", fork, methods=["POST"]),
    Route("/v1/states/{id}/file", download),
    Route("/v1/states/{id}/file", put, methods=["PUT"]),
]
