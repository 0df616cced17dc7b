"""POST /v1/completions: texts that go on."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn.serving.http.answers import Answer, gather
from tarnn.serving.http.asking import (
    check_choices,
    engine_request,
    head_of,
    held_state,
    refuse_when_full,
    start,
    state_header,
    text_engine_of,
    usage_of,
    wants_usage,
)
from tarnn.serving.http.body import read_request
from tarnn.serving.http.chunks import Chunks
from tarnn.serving.http.prompts import prompt_ids, split, vocabulary
from tarnn.serving.http.sse import EventStream
from tarnn.serving.http.vocabulary import Vocabulary
from tarnn.serving.http.wire import CompletionRequest
from tarnn.serving.request import Event, TokenLogprob

MAX_TOKENS = 16  # where a request says nothing, as in OpenAI's API


async def create(request: HttpRequest) -> Response:
    asked = await read_request(request, CompletionRequest)
    engine = text_engine_of(request, asked.model)
    prompts = split("" if asked.prompt is None else asked.prompt)
    check_choices(request, len(prompts), asked.n or 1)
    refuse_when_full(engine)
    begin = await held_state(request, engine, asked.state)
    most, goes_on = request.app.state.settings.max_prompt, begin is not None
    requests = [
        engine_request(
            request,
            engine,
            asked,
            await prompt_ids(engine.model, prompt, "prompt", most=most, goes_on=goes_on),
            begin=begin,
            max_tokens=MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
            logprobs=asked.logprobs,
        )
        for prompt in prompts
    ]
    reader = start(request, engine, requests)
    head = head_of("cmpl", "text_completion", engine)
    words = vocabulary(engine.model)
    if asked.stream:
        told = None if asked.logprobs is None else Logprobs(words)
        chunks = Chunks(head, reader, opened=b'"text":', with_usage=wants_usage(asked), logprobs=told)
        return EventStream(reader, chunks.encode, chunks.last, partial(state_header, reader))
    answers = await gather(request, reader)
    choices = [choice_of(index, answer, words, asked.logprobs is not None) for index, answer in enumerate(answers)]
    return JSONResponse(head | {"choices": choices, "usage": usage_of(reader.usage)}, headers=state_header(reader))


def choice_of(index: int, answer: Answer, words: Vocabulary, with_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "text": answer.text,
        "logprobs": logprobs_of(answer.logprobs, words)[0] if with_logprobs else None,
        "finish_reason": answer.finish,
    }


def logprobs_of(rows: Sequence[TokenLogprob], words: Vocabulary, offset: int = 0) -> tuple[dict[str, Any], int]:
    """In the shape of this API, and the place in the text behind them. offset: the place before them."""
    offsets = []
    for row in rows:
        offsets.append(offset)
        offset += words.width_of(row.token)
    shape = {
        "tokens": [words.text_of(row.token) for row in rows],
        "token_logprobs": [row.logprob for row in rows],
        "top_logprobs": [{words.text_of(token): value for token, value in row.likeliest} for row in rows],
        "text_offset": offsets,
    }
    return shape, offset


class Logprobs:
    """The same, event by event."""

    def __init__(self, words: Vocabulary):
        self._words = words
        self._offsets: dict[int, int] = {}

    def __call__(self, event: Event) -> dict[str, Any]:
        shape, offset = logprobs_of(event.logprobs, self._words, self._offsets.get(event.choice, 0))
        self._offsets[event.choice] = offset
        return shape


routes = [Route("/v1/completions", create, methods=["POST"])]
