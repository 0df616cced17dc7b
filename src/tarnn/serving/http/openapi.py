"""GET /openapi.json: the routes in OpenAPI 3.1, derived from the schemas that stand beside each route."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn._version import __version__
from tarnn.serving.http.response_schemas import ErrorAnswer, OpenApiDocument

JSON, TEXT, BYTES, EVENTS = "application/json", "text/plain", "application/octet-stream", "text/event-stream"
PLACE = "#/components/schemas/{model}"
KEYS = {"key": {"type": "http", "scheme": "bearer", "description": "A line of the file in --api-key-file."}}
Model = type[BaseModel] | None
Fields = dict[str, Any]


class Operation(Route):
    """A route that OpenAPI's document describes. Its name and summary are those of the endpoint and its docstring.

    body, answer: schemas of JSON; query: of the parameters in the address; events: of an event's data, if the answer may be
    server-sent events. other_bodies, other_answers: media types besides, or instead of, JSON. optional: the body may be
    left out.
    """

    def __init__(
        self,
        method: str,
        path: str,
        endpoint: Any,
        answer: Model = None,
        *,
        body: Model = None,
        query: Model = None,
        events: Model = None,
        other_bodies: tuple[str, ...] = (),
        other_answers: tuple[str, ...] = (),
        optional: bool = False,
    ):
        super().__init__(path, endpoint, methods=[method])
        self.method, self.body, self.answer, self.query, self.events = method, body, answer, query, events
        self.other_bodies, self.other_answers, self.optional = other_bodies, other_answers, optional

    @property
    def template(self) -> str:
        """The path without types of its parameters."""
        return re.sub(r":\w+}", "}", self.path)

    @property
    def summary(self) -> str:
        return re.split(r"[.:]\s", f"{self.endpoint.__doc__} ")[0]

    def described(self, schemas: Mapping[Model, Fields]) -> Fields:
        """Return the operation object. schemas: of each model, where it stands."""
        whole: Fields = {"summary": self.summary, "operationId": self.name}
        if parameters := [*map(path_parameter, self.param_convertors), *query_parameters(self.query)]:
            whole["parameters"] = parameters
        content: Fields = {kind: {"schema": {}} for kind in self.other_bodies}
        if self.body is not None:
            content[JSON] = {"schema": schemas[self.body]}
        if content:
            whole["requestBody"] = {"content": content, "required": not self.optional}
        answers: Fields = {kind: {"schema": {}} for kind in self.other_answers}
        if self.answer is not None:
            answers[JSON] = {"schema": schemas[self.answer]}
        if self.events is not None:
            data = [schemas[self.events], schemas[ErrorAnswer]]
            answers[EVENTS] = {
                "schema": {"anyOf": data, "description": "The data of an event; the last one is [DONE]."}
            }
        error = {"content": {JSON: {"schema": schemas[ErrorAnswer]}}}
        whole["responses"] = {
            "200": {"description": "Done.", "content": answers},
            "4XX": {"description": "A sentence that names the wrong parameter.", **error},
            "5XX": {"description": "The server failed, is stopping, or has no room.", **error},
        }
        return whole


def path_parameter(name: str) -> Fields:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def query_parameters(query: Model) -> list[Fields]:
    """Return the parameters of an address, none of which is required or may be null."""
    fields = {} if query is None else query.model_json_schema()["properties"]
    kinds = {name: [x for x in schema["anyOf"] if x != {"type": "null"}] for name, schema in fields.items()}
    return [{"name": name, "in": "query", "schema": kind} for name, [kind] in kinds.items()]


def document(routes: Iterable[Any], with_keys: bool) -> Fields:
    """Return the whole description of the operations among these routes. with_keys: a key must be sent."""
    operations = [route for route in routes if isinstance(route, Operation)]
    bodies = {(x.body, "validation") for x in operations if x.body}
    answers = {(x, "serialization") for op in operations for x in (op.answer, op.events, ErrorAnswer) if x}
    models: Any = sorted(bodies | answers, key=lambda pair: pair[0].__name__)
    references, shared = models_json_schema(models, ref_template=PLACE)
    schemas: dict[Any, Fields] = {model: reference for (model, _), reference in references.items()}
    paths: dict[str, Fields] = {}
    for operation in operations:
        paths.setdefault(operation.template, {})[operation.method.lower()] = operation.described(schemas)
    whole: Fields = {
        "openapi": "3.1.0",
        "info": {"title": "tarnn serve", "version": __version__, "description": "Models whose whole past is a state."},
        "paths": paths,
        "components": {"schemas": shared["$defs"]},
    }
    if with_keys:
        whole["components"]["securitySchemes"] = KEYS
        whole["security"] = [{"key": []}]
    return whole


async def openapi(request: Request) -> Response:
    """Return this description."""
    return JSONResponse(request.app.state.document())


routes = [Operation("GET", "/openapi.json", openapi, OpenApiDocument)]
