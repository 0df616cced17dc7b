"""GET /openapi.json: all routes in OpenAPI 3.1, from the models that check the bodies."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn._version import __version__
from tarnn.serving.http.answer_wire import ErrorAnswer
from tarnn.serving.http.operations import EVENTS, JSON, OPERATIONS, Operation

Schemas = dict[tuple[type[BaseModel], JsonSchemaMode], dict[str, Any]]
PLACE = "#/components/schemas/{model}"
KEYS = {"key": {"type": "http", "scheme": "bearer", "description": "A line of the file in --api-key-file."}}


@cache
def document(with_keys: bool) -> dict[str, Any]:
    """The whole description. with_keys: whether the server has keys, so that one must be sent."""
    bodies = {x for op in OPERATIONS for x in (op.body, op.query) if x is not None}
    answers = {x for op in OPERATIONS for x in (op.answer,) if x is not None} | {ErrorAnswer}
    shapes = [(x, "validation") for x in by_name(bodies)] + [(x, "serialization") for x in by_name(answers)]
    schemas, definitions = models_json_schema(shapes, ref_template=PLACE)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = described(operation, schemas)
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "tarnn serve", "version": __version__, "description": "Models whose whole past is a state."},
        "paths": paths,
        "components": {"schemas": definitions["$defs"]},
    }
    if with_keys:
        whole["components"]["securitySchemes"] = KEYS
        whole["security"] = [{"key": []}]
    return whole


def by_name(models: set[type[BaseModel]]) -> list[type[BaseModel]]:
    return sorted(models, key=lambda model: model.__name__)


def described(operation: Operation, schemas: Schemas) -> dict[str, Any]:
    whole: dict[str, Any] = {"summary": operation.summary, "operationId": operation.name}
    if parameters := list(parameters_of(operation)):
        whole["parameters"] = parameters
    content = {kind: {"schema": {}} for kind in operation.other_bodies}
    if operation.body is not None:
        content[JSON] = {"schema": schemas[operation.body, "validation"]}
    if content:
        whole["requestBody"] = {"content": content, "required": not operation.optional}
    answers = {kind: {"schema": {}} for kind in operation.other_answers}
    if operation.answer is not None:
        answers[JSON] = {"schema": schemas[operation.answer, "serialization"]}
    if operation.streams:
        answers[EVENTS] = {"schema": {"type": "string"}}
    error = {"content": {JSON: {"schema": schemas[ErrorAnswer, "serialization"]}}}
    whole["responses"] = {
        "200": {"description": "Done.", "content": answers},
        "4XX": {"description": "What was wrong, in a sentence that names the parameter.", **error},
        "5XX": {"description": "The server failed, is stopping, or has no room.", **error},
    }
    return whole


def parameters_of(operation: Operation) -> Iterator[dict[str, Any]]:
    for name in operation.in_path:
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    fields = {} if operation.query is None else operation.query.model_json_schema()["properties"]
    for name, schema in fields.items():
        values = [x for x in schema.pop("anyOf") if x != {"type": "null"}]  # nothing in a query is null
        yield {"name": name, "in": "query", "schema": values[0]}


async def openapi(request: Request) -> Response:
    return JSONResponse(document(bool(request.app.state.settings.keys)))


routes = [Route("/openapi.json", openapi)]
