"""Requests of the engine from requests over HTTP, and parts of an answer that all APIs for text share."""

import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest

from tarnn.decoding.draws import Sampling
from tarnn.decoding.opened import Opened
from tarnn.serving.engine import Busy, Engine
from tarnn.serving.http.errors import ApiError, bad, overloaded, unavailable
from tarnn.serving.http.reader import Reader
from tarnn.serving.http.request_schemas import TextRequest
from tarnn.serving.request import Request, Usage
from tarnn.serving.snapshot import Snapshot

SAMPLING = [x.name for x in fields(Sampling) if x.name != "logit_bias"]


def engine_of(request: HttpRequest, name: str | None) -> Engine:
    """Return the engine of the model of that name, or of the only model. Raises ApiError: 400, 404."""
    engines = request.app.state.engines
    known = ", ".join(map(repr, sorted(engines)))
    if name is None:
        if len(engines) > 1:
            raise bad(f"The parameter model is missing; expected one of {known}.", "model")
        return next(iter(engines.values()))
    if name not in engines:
        message = f"There is no model {name[:100]!r}; expected one of {known}."
        raise ApiError(404, message, param="model", code="model_not_found")
    return engines[name]


def tenant(request: HttpRequest) -> str:
    return str(request.scope.get("tarnn.tenant", ""))


def client(request: HttpRequest) -> str:
    """Return the name by which clients share the machine fairly: of a tenant, or, if there are none, an address."""
    return tenant(request) or (request.client.host if request.client else "")


def make_request(
    request: HttpRequest,
    engine: Engine,
    body: TextRequest,
    *,
    begin: Snapshot | None,
    boundaries: Sequence[int] = (),
    **options: Any,
) -> Request:
    """Return the request of this client, with the sampling of its body.

    boundaries: places in the prompt; those of a `Request` count from the beginning of `begin`. options: its other fields.
    """
    past = 0 if begin is None else len(begin.tokens)
    return Request(
        begin=begin,
        boundaries=tuple(past + place for place in boundaries),
        sampling=sampling_of(body, engine.model.model),
        stop=tuple(body.stop or ()),
        tenant=tenant(request),
        client=client(request),
        **options,
    )


def sampling_of(body: TextRequest, model: Opened) -> Sampling:
    """Return the sampling of a request, and for what it leaves open that of the model's makers.

    Raises ApiError for a bias of a token that the model doesn't have.
    """
    bias, vocab_size = {}, model.config.vocab_size
    for name, value in (body.logit_bias or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < vocab_size):
            raise bad(f"logit_bias: this model has no token {name[:40]!r}.", "logit_bias", "invalid_value")
        bias[int(name)] = value
    options = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    return Sampling(**{**model.sampling, **options}, logit_bias=bias)


def check_choices(request: HttpRequest, num_prompts: int, n: int) -> None:
    most = request.app.state.settings.max_choices
    if num_prompts * n > most:
        raise bad(
            f"{num_prompts} prompts with n = {n} are {num_prompts * n:,} texts; at most {most} are written at once.",
            "n",
        )


def check_gathered(
    request: HttpRequest, engine: Engine, requests: Sequence[Request], param: str, *, echo: bool = False
) -> None:
    """Raise ApiError (400) if the answers, which are kept until they are whole, may have more numbers than allowed."""
    most = request.app.state.settings.max_gathered
    limit = engine.model.model.config.max_position_embeddings or sys.maxsize
    numbers = 0
    for x in requests:
        echoed = len(x.prompt) if echo and x.logprobs is not None else 0
        numbers += x.n * (min(x.max_tokens, limit) + echoed) * (1 + (x.logprobs or 0))
    if numbers > most:
        raise bad(
            f"{param}: this answer may have {numbers:,} tokens and logprobs; what is not streamed as it is written has at "
            f"most {most:,}. Ask for fewer, or stream it.",
            param,
            "invalid_value",
        )


def start(request: HttpRequest, engine: Engine, requests: list[Request]) -> Reader:
    """Submit them all. Raises ApiError: 429 if the queue is full, 400 for an impossible request."""
    state = request.app.state
    reader = Reader(state.bridge(), state.latencies, state.settings.ping_seconds)
    try:
        reader.submit(engine, requests)
    except Busy as busy:
        raise overloaded(busy.retry_after) from None
    except ValueError as error:
        raise bad(str(error)) from None
    except RuntimeError:  # the engine is closed, or has failed
        raise unavailable() from None
    return reader


def refuse_when_full(engine: Engine) -> None:
    """Raise ApiError (429) before any work is done for a request that would be refused."""
    try:
        engine.check_room()
    except Busy as busy:
        raise overloaded(busy.retry_after) from None


def head_of(kind: str, name: str, engine: Engine) -> dict[str, Any]:
    """Return the first fields of an answer, or of each of its chunks."""
    key = engine.model.key
    return {
        "id": f"{kind}-{uuid4().hex}",
        "object": name,
        "created": int(time.time()),
        "model": engine.model.name,
        "system_fingerprint": f"fp_{key.fingerprint[:12]}_{key.weights}",
    }


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def state_header(reader: Reader) -> dict[str, str]:
    """Return the header that says how much of the prompt was not read again."""
    usage = reader.usage
    return {"x-tarnn-state": f"hit={usage.cached_tokens}/{usage.prompt_tokens}"} if reader.begun else {}
