"""Read a request's body: bounded in bytes and in time, then as JSON of a bounded number of values, then by its schema."""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from tarnn.serving.http.errors import ApiError, bad, unavailable
from tarnn.serving.http.request_schemas import RequestSchema
from tarnn.serving.http.settings import ServerSettings

MOST_VALUES = 2**20 + 2**16  # of a body: the ids of the longest prompt, and other parameters
MOST_NESTED = 2**16  # lists and objects of a body
MOST_KEYS = 2**14  # named values in its objects: each may be wrong, and each wrong one is an error to report
SHORT = 2**14  # bytes of a body that can't have too many of anything, and is parsed on the loop
LONGEST_VALUE = 60  # characters of a value that an error quotes
# pydantic's names, in the place of an error, for the kinds that a value may be of
TAG = re.compile(r"str|int|float|bool|(list|dict|function-\w+|nullable|constrained-\w+)(\[.*\]|\(.*\))?")
Schema = TypeVar("Schema", bound=RequestSchema)


async def read_bytes(request: Request, most: int | None = None) -> bytes:
    """Return the whole body of at most `most` bytes (default: the server's limit).

    Raises ApiError: 413 for one that is too large, before it is read if it declares its size; 408 for a slow one; 503 for
    one that has not arrived when the server stops.
    """
    settings: ServerSettings = request.app.state.settings
    most = settings.max_body if most is None else most
    too_large = ApiError(413, f"The body is larger than {most:,} bytes. Send less.", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    pieces, size, state = [], 0, request.app.state
    limit = asyncio.timeout(settings.body_seconds)
    state.bodies.add(limit)
    try:
        async with limit:
            async for piece in request.stream():
                size += len(piece)
                if size > most:
                    raise too_large
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


async def read_request(request: Request, schema: type[Schema]) -> Schema:
    """Return the body by its schema. A large one is parsed in a thread. Raises ApiError for anything wrong with it."""
    body = await read_bytes(request)
    return parse(schema, body) if len(body) <= SHORT else await asyncio.to_thread(parse, schema, body)


def parse(schema: type[Schema], body: bytes) -> Schema:
    """Return the body by its schema. Raises ApiError (400) with one sentence that names the parameter."""
    try:
        return schema.model_validate(read_json(body))
    except ValidationError as error:
        raise api_error_of(error, schema) from None


def parse_query(schema: type[Schema], query: Mapping[str, str]) -> Schema:
    """Return the parameters after a path's question mark by their schema. Raises ApiError as `parse` does."""
    try:
        return schema.model_validate_strings(dict(query))
    except ValidationError as error:
        raise api_error_of(error, schema) from None


def read_json(body: bytes) -> Any:
    """Return the JSON value. Raises ApiError (400) for a body that is no JSON, or has too many values."""
    if len(body) > SHORT:
        check_counts(body)
    try:
        return from_json(body, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad(f"The body is not JSON: {error}.") from None


def check_counts(body: bytes) -> None:
    """Raise ApiError for a body of too many values, before any is made: no body takes seconds or gigabytes.

    Characters inside strings are not counted.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    characters = np.frombuffer(body, np.uint8)
    outside = ~np.logical_xor.accumulate(characters == ord('"'))
    for signs, most, name in (
        (",", MOST_VALUES - 1, "values"),
        ("[{", MOST_NESTED, "lists and objects"),
        (":", MOST_KEYS, "named values"),
    ):
        count = sum(int(np.count_nonzero((characters == ord(sign)) & outside)) for sign in signs)
        if count > most:
            raise bad(f"The body has {count:,} {name}; at most {most:,} are read at once.", code="too_many_values")


def api_error_of(error: ValidationError, schema: type[RequestSchema]) -> ApiError:
    """Return the most deeply nested error as a sentence: for a union, about the kind that the value came nearest to."""
    errors = error.errors(include_url=False, include_context=False)
    wrong = max(errors, key=lambda each: len(each["loc"]))
    place = [str(part) for i, part in enumerate(wrong["loc"]) if i == 0 or not TAG.fullmatch(str(part))]
    if not place:
        return bad("The body must be a JSON object.")
    name, param = place[0], ".".join(place)[:LONGEST_VALUE]
    if name in schema.refused:
        return bad(schema.refused[name], name, "unsupported_parameter")
    if wrong["type"] == "not_text":
        return bad(wrong["msg"], param, "unsupported_parameter")
    if wrong["type"] == "extra_forbidden":
        return bad(f"Unknown parameter: {quoted(param)}.", param, "unknown_parameter")
    if wrong["type"] == "missing":
        return bad(f"The parameter {param} is missing.", param, "missing_required_parameter")
    sentence = wrong["msg"].partition(" should ")[2] or wrong["msg"]
    return bad(f"{param} must {sentence}; got {quoted(wrong['input'])}.", param, "invalid_value")


def quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} …"
