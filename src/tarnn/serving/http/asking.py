"""From a request on the wire to requests of the engine; what the texts of both APIs share."""

import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest

from tarnn.serving.engine import Busy, Engine
from tarnn.serving.http.errors import ApiError, bad, overloaded, unavailable
from tarnn.serving.http.prompts import Ids
from tarnn.serving.http.reader import Reader
from tarnn.serving.http.wire import Generation, Sampled
from tarnn.serving.request import Request, Sampling, Usage
from tarnn.serving.snapshot import Snapshot

SAMPLING = [x.name for x in fields(Sampling) if x.name != "logit_bias"]


def engine_of(request: HttpRequest, name: str | None) -> Engine:
    """The engine of the model of that name; there may be no name where there is one model. Raises ApiError: 400, 404."""
    engines = request.app.state.engines
    if name is None:
        if len(engines) > 1:
            raise bad(f"The parameter model is missing; expected one of {listed(engines)}.", "model")
        return next(iter(engines.values()))
    if name not in engines:
        message = f"There is no model {name[:100]!r}; expected one of {listed(engines)}."
        raise ApiError(404, message, param="model", code="model_not_found")
    return engines[name]


def listed(names: Any) -> str:
    return ", ".join(map(repr, sorted(names)))


def tenant(request: HttpRequest) -> str:
    return str(request.scope.get("tarnn.tenant", ""))


def client(request: HttpRequest) -> str:
    """Who shares the machine fairly with others: a tenant, or, where there are none, an address."""
    return tenant(request) or (request.client.host if request.client else "")


def sampling_of(asked: Sampled, vocab_size: int) -> Sampling:
    """The sampling of a request. Raises ApiError for a bias of a token that the model doesn't have."""
    bias = {}
    for name, value in (asked.logit_bias or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10 and int(name) < vocab_size):
            raise bad(f"logit_bias: this model has no token {name[:40]!r}.", "logit_bias", "invalid_value")
        bias[int(name)] = value
    fields_set = {name: getattr(asked, name) for name in SAMPLING}
    return Sampling(**{name: value for name, value in fields_set.items() if value is not None}, logit_bias=bias)


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
    """Raises ApiError (400) where the answers to these, kept until they are whole, would take more than a request may."""
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
    """Submit them all. Raises ApiError: 429 where the queue is full, 400 for what can't be."""
    state = request.app.state
    reader = Reader(state.mailbox(), state.times, state.settings.ping_seconds)
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
    """Raises ApiError (429) before any work is done for a request that would not be taken."""
    try:
        engine.check_room()
    except Busy as busy:
        raise overloaded(busy.retry_after) from None


def engine_request(
    request: HttpRequest,
    engine: Engine,
    asked: Generation,
    prompt: Ids,
    *,
    begin: Snapshot | None,
    max_tokens: int,
    logprobs: int | None,
    boundaries: tuple[int, ...] = (),
) -> Request:
    return Request(
        prompt=prompt,
        max_tokens=max_tokens,
        sampling=sampling_of(asked, engine.model.model.config.vocab_size),
        n=asked.n or 1,
        begin=begin,
        stop=tuple(asked.stop or ()),
        end_ids=frozenset() if asked.ignore_eos else None,
        logprobs=logprobs,
        boundaries=boundaries,
        tenant=tenant(request),
        client=client(request),
    )


def head_of(kind: str, name: str, engine: Engine) -> dict[str, Any]:
    """What an answer, or each of its chunks, begins with."""
    return {
        "id": new_id(kind),
        "object": name,
        "created": now(),
        "model": engine.model.name,
        "system_fingerprint": fingerprint_of(engine),
    }


def new_id(kind: str) -> str:
    return f"{kind}-{uuid4().hex}"


def now() -> int:
    return int(time.time())


def usage_of(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def state_header(reader: Reader) -> dict[str, str]:
    """How much of the prompt was not read again."""
    usage = reader.usage
    return {"x-tarnn-state": f"hit={usage.cached_tokens}/{usage.prompt_tokens}"} if reader.begun else {}


def fingerprint_of(engine: Engine) -> str:
    return f"fp_{engine.model.key.fingerprint[:12]}_{engine.model.key.weights}"
