"""GET /v1/models: what is served. POST /tokenize and /detokenize: what its tokens are."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn._version import __version__
from tarnn.serving.engine import Engine
from tarnn.serving.http.answers import whole
from tarnn.serving.http.asking import engine_of
from tarnn.serving.http.body import read_request
from tarnn.serving.http.prompts import ids_of, prompt_ids, text_of
from tarnn.serving.http.wire import DetokenizeRequest, TokenizeRequest
from tarnn.serving.sizes import sizes_of


def described(name: str, engine: Engine, created: int) -> dict[str, Any]:
    model = engine.model
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "tarnn",
        "max_model_len": model.model.config.max_position_embeddings,
        "task": "text",
        "chat": model.chats,
        "weights": model.key.weights,
        "fingerprint": model.key.fingerprint,
        **sizes_of(model)._asdict(),
    }


async def all_models(request: Request) -> Response:
    state = request.app.state
    data = [described(name, engine, state.started) for name, engine in state.engines.items()]
    return JSONResponse({"object": "list", "data": data})


async def one_model(request: Request) -> Response:
    name = request.path_params["name"]
    return JSONResponse(described(name, engine_of(request, name), request.app.state.started))


async def tokenize(request: Request) -> Response:
    asked = await read_request(request, TokenizeRequest)
    model, most = engine_of(request, asked.model).model, request.app.state.settings.max_prompt
    ids = await prompt_ids(model, asked.prompt, "prompt", most=most, goes_on=True)
    return await whole(lambda: {"tokens": ids.tolist(), "count": len(ids)}, len(ids))


async def detokenize(request: Request) -> Response:
    asked = await read_request(request, DetokenizeRequest)
    model, most = engine_of(request, asked.model).model, request.app.state.settings.max_prompt
    ids = await asyncio.to_thread(ids_of, asked.tokens, "tokens")
    ids = await prompt_ids(model, ids, "tokens", most=most)
    return JSONResponse({"prompt": await asyncio.to_thread(text_of, model, ids)})


async def version(_: Request) -> Response:
    return JSONResponse({"version": __version__})


routes = [
    Route("/v1/models", all_models),
    Route("/v1/models/{name:path}", one_model),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/version", version),
]
