"""GET /openapi.json: all routes in OpenAPI 3.1, from the models that check the bodies."""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn._version import __version__
from tarnn.serving.http.answer_wire import ErrorAnswer
from tarnn.serving.http.operations import EVENTS, JSON, OPERATIONS, Operation

Fields = dict[str, Any]
PLACE = "#/components/schemas/{model}"
KEYS = {"key": {"type": "http", "scheme": "bearer", "description": "A line of the file in --api-key-file."}}


@cache
def document(with_keys: bool) -> Fields:
    """The whole description. with_keys: whether the server has keys, so that one must be sent."""
    bodies = by_name(op.body for op in OPERATIONS)
    answers = by_name([ErrorAnswer, *(x for op in OPERATIONS for x in (op.answer, op.events))])
    asked, asked_shapes = models_json_schema([(x, "validation") for x in bodies], ref_template=PLACE)
    told, told_shapes = models_json_schema([(x, "serialization") for x in answers], ref_template=PLACE)
    shapes = {model: schema for (model, _), schema in (asked | told).items()}
    paths: dict[str, Fields] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = described(operation, shapes)
    whole: Fields = {
        "openapi": "3.1.0",
        "info": {"title": "tarnn serve", "version": __version__, "description": "Models whose whole past is a state."},
        "paths": paths,
        "components": {"schemas": asked_shapes["$defs"] | told_shapes["$defs"]},
    }
    if with_keys:
        whole["components"]["securitySchemes"] = KEYS
        whole["security"] = [{"key": []}]
    return whole


def by_name(models: Iterable[type[BaseModel] | None]) -> list[type[BaseModel]]:
    return sorted({x for x in models if x is not None}, key=lambda model: model.__name__)


def described(operation: Operation, shapes: Mapping[Any, Fields]) -> Fields:
    whole: Fields = {"summary": operation.summary, "operationId": operation.name}
    if parameters := list(parameters_of(operation)):
        whole["parameters"] = parameters
    content: Fields = {kind: {"schema": {}} for kind in operation.other_bodies}
    if operation.body is not None:
        content[JSON] = {"schema": shapes[operation.body]}
    if content:
        whole["requestBody"] = {"content": content, "required": not operation.optional}
    answers: Fields = {kind: {"schema": {}} for kind in operation.other_answers}
    if operation.answer is not None:
        answers[JSON] = {"schema": shapes[operation.answer]}
    if operation.events is not None:
        data = [shapes[operation.events], shapes[ErrorAnswer]]
        answers[EVENTS] = {"schema": {"anyOf": data, "description": "The data of an event; the last one is [DONE]."}}
    error = {"content": {JSON: {"schema": shapes[ErrorAnswer]}}}
    whole["responses"] = {
        "200": {"description": "Done.", "content": answers},
        "4XX": {"description": "What was wrong, in a sentence that names the parameter.", **error},
        "5XX": {"description": "The server failed, is stopping, or has no room.", **error},
    }
    return whole


def parameters_of(operation: Operation) -> Iterator[Fields]:
    for name in operation.in_path:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    fields = {} if operation.query is None else operation.query.model_json_schema()["properties"]
    for name, schema in fields.items():
        values = [x for x in schema.pop("anyOf") if x != {"type": "null"}]  # nothing in a query is null
        yield {"name": name, "in": "query", "schema": values[0]}


async def openapi(request: Request) -> Response:
    return JSONResponse(document(bool(request.app.state.settings.keys)))


routes = [Route("/openapi.json", openapi)]
