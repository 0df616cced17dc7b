"""/v1/responses: conversations that the server remembers, each as the one state after its last answer.

`previous_response_id` goes on from there: only the new message is read. What a response's state has seen can't be taken out
again, so instructions stay for the rest of a conversation.
"""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn.serving.http.answers import check
from tarnn.serving.http.asking import (
    check_gathered,
    client,
    engine_of,
    refuse_when_full,
    sampling_of,
    start,
    state_header,
    tenant,
)
from tarnn.serving.http.body import read_request
from tarnn.serving.http.errors import ApiError
from tarnn.serving.http.held import find, in_store
from tarnn.serving.http.live import LiveStream, attended
from tarnn.serving.http.prompts import vocabulary
from tarnn.serving.http.reader import Reader
from tarnn.serving.http.response_events import ResponseEvents
from tarnn.serving.http.response_prompt import Prompt, prompt_of
from tarnn.serving.http.response_wire import (
    DeletedResponse,
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponseFailure,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
)
from tarnn.serving.http.sse import PING
from tarnn.serving.request import Event, Request, Usage
from tarnn.serving.storage.holds import new_id

MAX_TOKENS = 1024  # where a request says nothing
LOGPROBS = "message.output_text.logprobs"


async def create(request: HttpRequest) -> Response:
    asked = await read_request(request, ResponseRequest)
    engine = engine_of(request, asked.model)
    refuse_when_full(engine)
    prompt = await prompt_of(request, engine, asked)
    answering = Answering(request, engine, asked, prompt)
    if asked.stream:
        return LiveStream(answering.frames(), lambda: state_header(answering.reader))
    response = await attended(request.receive, answering.whole())
    return JSONResponse(response.model_dump(), headers=state_header(answering.reader))


async def get(request: HttpRequest) -> Response:
    _, info = await find_response(request)
    return JSONResponse(json.loads(info.note) | {"where": info.where})


async def delete(request: HttpRequest) -> Response:
    engine, info = await find_response(request)
    await in_store(engine.store.delete, tenant(request), info.id)
    return JSONResponse(DeletedResponse(id=info.id).model_dump())


async def find_response(request: HttpRequest) -> tuple[Any, Any]:
    name = request.path_params["id"]
    engine, info = await find(request, name)
    if not info.note:
        raise ApiError(404, f"There is no response {name[:100]!r}; it is a state.", code="response_not_found")
    return engine, info


class Answering:
    """One response, from its prompt to the state that is held behind it."""

    def __init__(self, request: HttpRequest, engine: Any, asked: ResponseRequest, prompt: Prompt):
        self.request, self.engine, self.asked, self.prompt = request, engine, asked, prompt
        self.sampling = sampling_of(asked, engine.model.model.config.vocab_size)
        self.stored = asked.store is not False and engine.store is not None
        self.with_logprobs = LOGPROBS in (asked.include or ()) or asked.top_logprobs is not None
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
        """Server-sent events. What fails before the first text is an ApiError, and behind it a failed response."""
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
        asked = Request(
            prompt=self.prompt.ids,
            max_tokens=self.asked.max_output_tokens or MAX_TOKENS,
            sampling=self.sampling,
            begin=self.prompt.begin,
            stop=tuple(self.asked.stop or ()),
            logprobs=(self.asked.top_logprobs or 0) if self.with_logprobs else None,
            boundaries=self.prompt.boundaries,
            keep=self.stored,
            tenant=tenant(self.request),
            client=client(self.request),
        )
        check_gathered(
            self.request, self.engine, [asked], "max_output_tokens"
        )  # a streamed response ends with all of it
        self.reader = start(self.request, self.engine, [asked])
        try:
            yield self.reader
        finally:
            self.reader.leave()

    def _take(self, events: list[Event]) -> list[tuple[str, list[dict[str, Any]]]]:
        """The texts of some events, and their logprobs."""
        pieces = []
        for event in events:
            check(event)
            self.end = event
            logprobs = self.words.described(event.logprobs) if self.with_logprobs else []
            self.texts.append(event.text)
            self.logprobs += logprobs
            if event.text or logprobs:
                pieces.append((event.text, logprobs))
        return pieces

    def _begun(self) -> ResponseObject:
        asked, sampling = self.asked, self.sampling
        return ResponseObject(
            id=new_id("resp"),
            created_at=int(time.time()),
            model=self.engine.model.name,
            previous_response_id=asked.previous_response_id,
            instructions=asked.instructions,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            top_logprobs=asked.top_logprobs or 0,
            max_output_tokens=asked.max_output_tokens,
            store=self.stored,
            metadata=asked.metadata or {},
            user=asked.user,
            safety_identifier=asked.safety_identifier,
            prompt_cache_key=asked.prompt_cache_key,
        )

    async def _ended(self, response: ResponseObject, usage: Usage) -> ResponseObject:
        """The response, whole. Its state is held before its client hears of it."""
        complete = self.end.finish == "stop"
        ended = response.model_copy(
            update={
                "status": "completed" if complete else "incomplete",
                "completed_at": int(time.time()),
                "incomplete_details": None if complete else IncompleteDetails(),
                "output": [self._message("completed" if complete else "incomplete")],
                "usage": usage_of(usage),
            }
        )
        if self.stored:
            hold, parent = self.engine.store.hold, self.prompt.parent
            note = ended.model_dump_json()
            info = await in_store(hold, tenant(self.request), self.end.snapshot, id=ended.id, parent=parent, note=note)
            ended.where = info.where
        return ended

    def _failed(self, response: ResponseObject, error: ApiError) -> ResponseObject:
        output = [self._message("incomplete")]
        failure = ResponseFailure(message=error.message)
        return response.model_copy(update={"status": "failed", "error": failure, "output": output, "store": False})

    def _message(self, status: Literal["completed", "incomplete"]) -> OutputMessage:
        text = OutputText(text="".join(self.texts), logprobs=self.logprobs)
        return OutputMessage(id=self.message_id, status=status, content=[text])


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


routes = [
    Route("/v1/responses", create, methods=["POST"]),
    Route("/v1/responses/{id}", get),
    Route("/v1/responses/{id}", delete, methods=["DELETE"]),
]
