"""GET /v1/models: the served models. POST /tokenize and /detokenize: texts as their tokens, and back."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tarnn.serving.engine import Engine
from tarnn.serving.http.body import read_request
from tarnn.serving.http.gather import as_json
from tarnn.serving.http.openapi import Operation
from tarnn.serving.http.prompts import ids_of, prompt_ids, text_of
from tarnn.serving.http.request_schemas import DetokenizeRequest, TokenizeRequest
from tarnn.serving.http.response_schemas import DecodedText, ModelList, ModelObject, TokenIds
from tarnn.serving.http.to_engine import engine_of
from tarnn.serving.model import sizes_of


def described(engine: Engine, created: int) -> dict[str, Any]:
    model = engine.model
    return ModelObject(
        id=model.name,
        created=created,
        max_model_len=model.model.config.max_position_embeddings,
        chat=model.chats,
        weights=model.key.weights,
        parameters=model.model.num_parameters,
        fingerprint=model.key.fingerprint,
        **sizes_of(model)._asdict(),
    ).model_dump()


async def list_models(request: Request) -> Response:
    """List the models."""
    state = request.app.state
    data = [described(engine, state.started) for engine in state.engines.values()]
    return JSONResponse({"object": "list", "data": data})


async def get_model(request: Request) -> Response:
    """Return a model."""
    return JSONResponse(described(engine_of(request, request.path_params["name"]), request.app.state.started))


async def tokenize(request: Request) -> Response:
    """Return the tokens of a text."""
    body = await read_request(request, TokenizeRequest)
    model, most = engine_of(request, body.model).model, request.app.state.settings.max_prompt
    ids = await prompt_ids(model, body.prompt, "prompt", most=most, goes_on=True)
    return await as_json(lambda: {"tokens": ids.tolist(), "count": len(ids)}, len(ids))


async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    body = await read_request(request, DetokenizeRequest)
    model, most = engine_of(request, body.model).model, request.app.state.settings.max_prompt
    ids = await asyncio.to_thread(ids_of, body.tokens, "tokens")
    ids = await prompt_ids(model, ids, "tokens", most=most)
    return JSONResponse({"prompt": await asyncio.to_thread(text_of, model, ids)})


routes = [
    Operation("GET", "/v1/models", list_models, ModelList),
    Operation("GET", "/v1/models/{name:path}", get_model, ModelObject),
    Operation("POST", "/tokenize", tokenize, TokenIds, body=TokenizeRequest),
    Operation("POST", "/detokenize", detokenize, DecodedText, body=DetokenizeRequest),
]
