"""/v1/states: texts that were read once, to begin from any number of times."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tarnn.serving.http.body import parse, parse_query, read_bytes, read_request
from tarnn.serving.http.chat_template import check_template, opened
from tarnn.serving.http.chunked_prefill import chunked_prefill
from tarnn.serving.http.errors import ApiError, bad
from tarnn.serving.http.openapi import BYTES, JSON, TEXT, Operation
from tarnn.serving.http.prompts import Ids, ids_of, prompt_ids
from tarnn.serving.http.reader import attended
from tarnn.serving.http.request_schemas import (
    MOST_LISTED,
    ForkRequest,
    ListQuery,
    ModelQuery,
    StateQuery,
    StateRequest,
    UploadQuery,
)
from tarnn.serving.http.response_schemas import Deleted, StateList, StateObject, StateProgress
from tarnn.serving.http.sse import DONE, EventStream
from tarnn.serving.http.store_errors import find, held_state, in_store, store_of
from tarnn.serving.http.to_engine import engine_of, refuse_when_full, tenant, usage_of
from tarnn.serving.request import Usage
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.state_info import StateInfo


async def create_state(request: HttpRequest) -> Response:
    """Read a text into a state, or take the file of one: the body's type says which."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind == BYTES:
        return await add(request, parse_query(UploadQuery, request.query_params))
    if kind == TEXT:
        query = parse_query(StateQuery, request.query_params)
        body = StateRequest(text=utf8(await read_bytes(request)), **query.model_dump())
    elif kind == JSON:
        body = await read_request(request, StateRequest)
    else:
        raise ApiError(415, f"The body must be {JSON}, {TEXT} or {BYTES}; got {kind[:100]!r}.")
    return await read(request, body)


async def read(request: HttpRequest, body: StateRequest) -> Response:
    if sum(x is not None for x in (body.text, body.tokens, body.messages)) != 1:
        raise bad("Give one of text, tokens and messages.", code="one_source")
    engine = engine_of(request, body.model)
    store_of(engine)
    refuse_when_full(engine)
    begin = await held_state(request, engine, body.state)
    ids, boundaries = await ids_to_read(request, engine, body, goes_on=begin is not None)
    if not len(ids):
        raise bad("There is nothing to read after this state; POST /v1/states/ID/fork copies one.", "text")
    making = state_making(request, engine, body, ids, begin, boundaries)
    if body.stream:
        return EventStream(frames(making))
    last = await attended(request.receive, last_of(making))
    return JSONResponse(last.model_dump()["state"])


async def ids_to_read(
    request: HttpRequest, engine: Any, body: StateRequest, *, goes_on: bool
) -> tuple[Ids, Sequence[int]]:
    """Return the tokens to read, and places in them where messages end."""
    model, most = engine.model, request.app.state.settings.max_prompt
    if body.text is not None:
        return await prompt_ids(model, body.text, "text", most=most, goes_on=goes_on), ()
    if body.messages is not None:
        check_template(model)
        messages = [message.plain for message in body.messages]
        ids, boundaries = await asyncio.to_thread(opened, model, messages, answer_follows=False)
        return await prompt_ids(model, ids, "messages", most=most), boundaries
    ids = await asyncio.to_thread(ids_of, body.tokens, "tokens")
    if not len(ids):
        raise bad("tokens must be a list of token ids that is not empty.", "tokens", "invalid_value")
    return await prompt_ids(model, ids, "tokens", most=most), ()


async def state_making(
    request: HttpRequest, engine: Any, body: StateRequest, ids: Ids, begin: Snapshot | None, boundaries: Sequence[int]
) -> AsyncGenerator[StateProgress]:
    """Read the tokens and hold their state. Progress is reported after each piece, and at the end with the state."""
    past = 0 if begin is None else len(begin.tokens)
    places = tuple(past + place for place in boundaries)
    async for piece in chunked_prefill(request, engine, ids, begin, places):
        read = piece
        yield StateProgress(tokens_read=read.tokens_read, tokens=len(ids))
    store, parent = engine.store, None
    if body.state is not None:
        parent = (await in_store(store.info, tenant(request), body.state, param="state")).id
    info = await in_store(store.hold, tenant(request), read.snapshot, name=body.name, parent=parent)
    usage = usage_of(Usage(len(read.snapshot.tokens), read.cached, 0))
    state = described(engine, info, usage)
    yield StateProgress(tokens_read=len(ids), tokens=len(ids), state=state)


async def last_of(making: AsyncGenerator[StateProgress]) -> StateProgress:
    async for progress in making:
        last = progress
    return last


async def frames(making: AsyncGenerator[StateProgress]) -> AsyncGenerator[bytes]:
    """Write server-sent events."""
    async for progress in making:
        yield b"data: " + progress.model_dump_json().encode() + b"\n\n"
    yield DONE


async def add(request: HttpRequest, query: UploadQuery) -> Response:
    """Take the file of a state, downloaded here or from another server with the same model."""
    engine = engine_of(request, query.model)
    size = engine.model.model.new_state(1, 0).nbytes if engine.store is not None else 0
    data = await read_bytes(request, request.app.state.settings.max_body + size)
    info = await in_store(store_of(engine).add, tenant(request), data, name=query.name)
    return JSONResponse(described(engine, info).model_dump())


async def upload_state(request: HttpRequest) -> Response:
    """Take the file of a state, under this name: a conversation that moves keeps the id that its client knows."""
    named = parse_query(ModelQuery, request.query_params).model_dump(exclude_none=True)
    return await add(request, parse_query(UploadQuery, named | {"name": request.path_params["id"]}))


async def list_states(request: HttpRequest) -> Response:
    """List states, a page of those of all models."""
    query = parse_query(ListQuery, request.query_params)
    states: list[tuple[Any, StateInfo]] = []
    for engine in request.app.state.engines.values():
        if engine.store is not None and query.model in (None, engine.model.name):
            states += [(engine, info) for info in await in_store(engine.store.list, tenant(request))]
    if query.after is not None:
        places = [place for place, (_, info) in enumerate(states) if info.id == query.after]
        if not places:
            raise ApiError(404, f"There is no state {query.after[:80]!r}.", param="after", code="state_not_found")
        states = states[places[0] + 1 :]
    limit = query.limit or MOST_LISTED
    data = [described(engine, info) for engine, info in states[:limit]]
    return JSONResponse(StateList(data=data, has_more=len(states) > limit).model_dump())


async def get_state(request: HttpRequest) -> Response:
    """Return a state, by its id or its name."""
    return JSONResponse(described(*await find(request, request.path_params["id"])).model_dump())


async def fork_state(request: HttpRequest) -> Response:
    """Copy a state. The copy goes its own way."""
    body = await read_bytes(request)
    fork = parse(ForkRequest, body) if body else ForkRequest()
    engine, info = await find(request, request.path_params["id"])
    copy = await in_store(engine.store.fork, tenant(request), info.id, fork.name)
    return JSONResponse(described(engine, copy).model_dump())


async def download_state(request: HttpRequest) -> Response:
    """Return the file of a state. `tarnn generate --state-in` reads it, and a server takes it back."""
    engine, info = await find(request, request.path_params["id"])
    data = await in_store(engine.store.export, tenant(request), info.id)
    headers = {"content-disposition": f'attachment; filename="{info.name or info.id}.safetensors"'}
    return Response(data, media_type=BYTES, headers=headers)


async def delete_state(request: HttpRequest) -> Response:
    """Forget a state."""
    engine, info = await find(request, request.path_params["id"])
    await in_store(engine.store.delete, tenant(request), info.id)
    return JSONResponse(Deleted(id=info.id, object="state").model_dump())


def described(engine: Any, info: StateInfo, usage: Any = None) -> StateObject:
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
    Operation(
        "POST",
        "/v1/states",
        create_state,
        StateObject,
        body=StateRequest,
        query=StateQuery,
        events=StateProgress,
        other_bodies=(TEXT, BYTES),
    ),
    Operation("GET", "/v1/states", list_states, StateList, query=ListQuery),
    Operation("GET", "/v1/states/{id}", get_state, StateObject),
    Operation("DELETE", "/v1/states/{id}", delete_state, Deleted),
    Operation("POST", "/v1/states/{id}/fork", fork_state, StateObject, body=ForkRequest, optional=True),
    Operation("GET", "/v1/states/{id}/file", download_state, other_answers=(BYTES,)),
    Operation("PUT", "/v1/states/{id}/file", upload_state, StateObject, query=ModelQuery, other_bodies=(BYTES,)),
]
