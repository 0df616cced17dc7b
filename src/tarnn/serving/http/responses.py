"""/v1/responses: conversations that the server remembers, each as the one state after its last answer.

`previous_response_id` goes on from there: only the new message is read. A state can't forget, so instructions stay for the
rest of a conversation.
"""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from tarnn.serving.http.body import read_request
from tarnn.serving.http.chat_template import continued, opened
from tarnn.serving.http.errors import ApiError, bad
from tarnn.serving.http.openapi import Operation
from tarnn.serving.http.prompts import Ids, prompt_ids, vocabulary
from tarnn.serving.http.reader import Reader, attended
from tarnn.serving.http.request_schemas import ResponseRequest
from tarnn.serving.http.response_events import ResponseEvents
from tarnn.serving.http.response_schemas import (
    Deleted,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
)
from tarnn.serving.http.sse import PING, EventStream
from tarnn.serving.http.store_errors import find, in_store, store_of
from tarnn.serving.http.to_engine import (
    check_gathered,
    engine_of,
    make_request,
    refuse_when_full,
    start,
    state_header,
    tenant,
)
from tarnn.serving.request import Event, Usage
from tarnn.serving.snapshot import Snapshot
from tarnn.serving.storage.ids import new_id

MAX_TOKENS = 1024  # the default
LOGPROBS = "message.output_text.logprobs"
SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
REPEATED = {  # parameters that a response repeats
    "previous_response_id", "instructions", "max_output_tokens", "user", "safety_identifier", "prompt_cache_key",
}  # fmt: skip


async def respond(request: HttpRequest) -> Response:
    """Answer, and remember the conversation as a state."""
    body = await read_request(request, ResponseRequest)
    engine = engine_of(request, body.model)
    refuse_when_full(engine)
    prompt = await prompt_of(request, engine, body)
    work = ResponseWork(request, engine, body, prompt)
    if body.stream:
        return EventStream(work.frames(), lambda: state_header(work.reader))
    response = await attended(request.receive, work.whole())
    return JSONResponse(response.model_dump(), headers=state_header(work.reader))


async def get_response(request: HttpRequest) -> Response:
    """Return a response."""
    _, info = await find_response(request)
    return JSONResponse(json.loads(info.note) | {"where": info.where})


async def delete_response(request: HttpRequest) -> Response:
    """Forget a response."""
    engine, info = await find_response(request)
    await in_store(engine.store.delete, tenant(request), info.id)
    return JSONResponse(Deleted(id=info.id, object="response").model_dump())


async def find_response(request: HttpRequest) -> tuple[Any, Any]:
    name = request.path_params["id"]
    engine, info = await find(request, name)
    if not info.note:
        raise ApiError(404, f"There is no response {name[:100]!r}; it is a state.", code="response_not_found")
    return engine, info


# ---- the prompt ----


class Prompt(NamedTuple):
    """ids: after `begin`, a state of the id `parent`. boundaries: places in `ids` where messages end."""

    ids: Ids
    begin: Snapshot | None
    parent: str | None
    boundaries: Sequence[int] = ()


async def prompt_of(request: HttpRequest, engine: Any, body: ResponseRequest) -> Prompt:
    """Return the input of a response, and the state of the response before.

    Raises ApiError: 404 for a response or a state that this tenant doesn't have, 400 for an input that can't be read.
    """
    previous, most = body.previous_response_id, request.app.state.settings.max_prompt
    if previous is not None and body.state is not None:
        raise bad("Give previous_response_id or state: a response goes on from one place.", "state")
    param = "state" if previous is None else "previous_response_id"
    parent, begin, answered = previous or body.state, None, False
    if parent is not None:
        store = store_of(engine)
        info = await in_store(store.info, tenant(request), parent, param=param)
        begin, parent = await in_store(store.get, tenant(request), info.id, param=param), info.id
        answered = previous is not None or bool(info.note)
    if not engine.model.chats:
        check_plain(engine, body)
        ids = await prompt_ids(engine.model, str(body.input or ""), "input", most=most, goes_on=begin is not None)
        return Prompt(ids, begin, parent)
    messages, boundaries = messages_of(body), list[int]()
    if begin is not None and answered:
        ids = await asyncio.to_thread(continued, engine.model, messages, int(begin.tokens[-1]))
    else:  # the beginning of a conversation, maybe after a text that was read
        ids, boundaries = await asyncio.to_thread(opened, engine.model, messages)
    ids = await prompt_ids(engine.model, ids, "input", most=most)
    return Prompt(ids, begin, parent, boundaries)


def messages_of(body: ResponseRequest) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [message.plain for message in body.input or ()]
    if not messages:
        raise bad("The parameter input is missing.", "input", "missing_required_parameter")
    return messages


def check_plain(engine: Any, body: ResponseRequest) -> None:
    """Raise ApiError for messages or instructions to a model that was trained on texts alone: it continues the input."""
    for value, param in ((body.instructions, "instructions"), (body.input, "input")):
        if value and not (param == "input" and isinstance(value, str)):
            raise bad(
                f"{engine.model.name} has no chat template: it continues a text and knows no messages or instructions. Give "
                "input as one string, or add a chat template to the tokenizer.",
                param,
                "no_chat_template",
            )


# ---- the answer ----


class ResponseWork:
    """One response, from its prompt to the state that is held after it."""

    def __init__(self, request: HttpRequest, engine: Any, body: ResponseRequest, prompt: Prompt):
        self.request, self.engine, self.body, self.prompt = request, engine, body, prompt
        self.stored = body.store is not False and engine.store is not None
        self.with_logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs is not None
        self.engine_request = make_request(
            request,
            engine,
            body,
            prompt=prompt.ids,
            max_tokens=body.max_output_tokens or MAX_TOKENS,
            begin=prompt.begin,
            logprobs=(body.top_logprobs or 0) if self.with_logprobs else None,
            boundaries=prompt.boundaries,
            keep=self.stored,
        )
        self.words = vocabulary(engine.model)
        self.message_id = f"msg_{secrets.token_hex(24)}"
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.end = Event(0)

    async def whole(self) -> ResponseObject:
        with self._reader() as reader:
            while reader.open:
                self._take(await reader.next())
        return await self._ended(self._begun(), reader.usage)

    async def frames(self) -> AsyncGenerator[bytes]:
        """Write server-sent events. An error before the first text is an ApiError; a later one ends a failed response."""
        with self._reader() as reader:
            pieces = self._take(await reader.next())
            events, response = ResponseEvents(self.message_id), self._begun()
            yield events.begin(response.model_dump())
            try:
                yield b"".join(events.delta(*piece) for piece in pieces)
                while reader.open:
                    pieces = self._take(await reader.next())
                    yield b"".join(events.delta(*piece) for piece in pieces) or PING
                response = await self._ended(response, reader.usage)
            except ApiError as error:
                response = self._failed(response, error)
            yield events.end(response.model_dump())

    @contextmanager
    def _reader(self) -> Iterator[Reader]:
        # a streamed response ends with all of it, so its length has the same limit
        check_gathered(self.request, self.engine, [self.engine_request], "max_output_tokens")
        self.reader = start(self.request, self.engine, [self.engine_request])
        try:
            yield self.reader
        finally:
            self.reader.leave()

    def _take(self, events: list[Event]) -> list[tuple[str, list[dict[str, Any]]]]:
        """Return the texts of some events with their logprobs."""
        pieces = []
        for event in events:
            self.end = event
            logprobs = self.words.described(event.logprobs) if self.with_logprobs else []
            self.texts.append(event.text)
            self.logprobs += logprobs
            if event.text or logprobs:
                pieces.append((event.text, logprobs))
        return pieces

    def _begun(self) -> ResponseObject:
        body, sampling = self.body, self.engine_request.sampling
        return ResponseObject(
            id=new_id("resp"),
            created_at=int(time.time()),
            model=self.engine.model.name,
            top_logprobs=body.top_logprobs or 0,
            store=self.stored,
            metadata=body.metadata or {},
            **{name: getattr(sampling, name) for name in SAMPLED},
            **body.model_dump(include=REPEATED),
        )

    async def _ended(self, response: ResponseObject, usage: Usage) -> ResponseObject:
        """Return the whole response. Its state is held before the client gets its id."""
        response, complete = response.model_copy(), self.end.finish == "stop"
        status: Literal["completed", "incomplete"] = "completed" if complete else "incomplete"
        response.status, response.completed_at, response.output = status, int(time.time()), [self._message(status)]
        response.incomplete_details = None if complete else {"reason": "max_output_tokens"}
        response.usage = usage_of(usage)
        if self.stored:
            hold, parent = self.engine.store.hold, self.prompt.parent
            options = {"id": response.id, "parent": parent, "note": response.model_dump_json()}
            response.where = (await in_store(hold, tenant(self.request), self.end.snapshot, **options)).where
        return response

    def _failed(self, response: ResponseObject, error: ApiError) -> ResponseObject:
        output = [self._message("incomplete")]
        failure = {"code": "server_error", "message": error.message}
        return response.model_copy(update={"status": "failed", "error": failure, "output": output, "store": False})

    def _message(self, status: Literal["completed", "incomplete"]) -> OutputMessage:
        text = OutputText(text="".join(self.texts), logprobs=self.logprobs)
        return OutputMessage(id=self.message_id, status=status, content=[text])


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details={"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


routes = [
    Operation("POST", "/v1/responses", respond, ResponseObject, body=ResponseRequest, events=ResponseEvent),
    Operation("GET", "/v1/responses/{id}", get_response, ResponseObject),
    Operation("DELETE", "/v1/responses/{id}", delete_response, Deleted),
]
