"""POST /v1/completions: texts that go on."""

import asyncio
from collections.abc import Sequence
from functools import partial
from math import isnan
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from tarnn.serving.checks import check_request
from tarnn.serving.http.answers import Answer, gather, numbers_of, whole
from tarnn.serving.http.asking import (
    check_choices,
    check_gathered,
    engine_of,
    engine_request,
    head_of,
    refuse_when_full,
    start,
    state_header,
    usage_of,
)
from tarnn.serving.http.body import read_request
from tarnn.serving.http.chunks import Chunks
from tarnn.serving.http.errors import bad
from tarnn.serving.http.held import held_state
from tarnn.serving.http.live import attended
from tarnn.serving.http.prompts import num_prompts, prompt_ids, split, text_of, vocabulary
from tarnn.serving.http.scoring import score
from tarnn.serving.http.sse import Encode, EventStream
from tarnn.serving.http.vocabulary import Vocabulary, as_json
from tarnn.serving.http.wire import CompletionRequest
from tarnn.serving.model import ServedModel
from tarnn.serving.request import Event, Request, TokenLogprob

MAX_TOKENS = 16  # where a request says nothing, as in OpenAI's API


async def create(request: HttpRequest) -> Response:
    asked = await read_request(request, CompletionRequest)
    engine = engine_of(request, asked.model)
    prompt = "" if asked.prompt is None else asked.prompt
    check_choices(request, num_prompts(prompt), asked.n or 1)
    refuse_when_full(engine)
    prompts = [prompt] if isinstance(prompt, str) else await asyncio.to_thread(split, prompt)
    begin = await held_state(request, engine, asked.state)
    most, goes_on = request.app.state.settings.max_prompt, begin is not None
    texts = [await prompt_ids(engine.model, prompt, "prompt", most=most, goes_on=goes_on) for prompt in prompts]
    requests = [
        engine_request(
            request,
            engine,
            asked,
            ids,
            begin=begin,
            max_tokens=MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
            logprobs=asked.logprobs,
        )
        for ids in texts
    ]
    if not asked.stream or (asked.echo and asked.logprobs is not None):
        check_gathered(request, engine, requests, "max_tokens", echo=bool(asked.echo))
    echoes = await echoes_of(request, engine.model, asked, prompts, requests) if asked.echo else []
    reader = start(request, engine, requests)
    head = head_of("cmpl", "text_completion", engine)
    words = vocabulary(engine.model)
    if asked.stream:
        told = None if asked.logprobs is None else Logprobs(words)
        chunks = Chunks(head, reader, opened=b'"text":', options=asked.stream_options, logprobs=told)
        encode = Echoed(chunks.encode, echoes) if echoes else chunks.encode
        return EventStream(reader, encode, chunks.last, partial(state_header, reader))
    answers = await gather(request, reader, echoes)

    def build() -> dict[str, Any]:
        choices = [choice_of(index, answer, words, asked.logprobs is not None) for index, answer in enumerate(answers)]
        return head | {"choices": choices, "usage": usage_of(reader.usage)}

    return await whole(build, numbers_of(answers), state_header(reader))


async def echoes_of(
    request: HttpRequest, model: ServedModel, asked: CompletionRequest, prompts: list[Any], requests: list[Request]
) -> list[Event]:
    """What stands before each choice: its prompt, with logarithms where they are wanted."""
    events: list[Event] = []
    for prompt, made in zip(prompts, requests):
        try:
            check_request(made, model)
        except ValueError as error:
            raise bad(str(error)) from None
        text = prompt if isinstance(prompt, str) else await asyncio.to_thread(text_of, model, made.prompt)
        scores: tuple[TokenLogprob, ...] = ()
        if asked.logprobs is not None:
            async with request.app.state.scoring:  # one at a time: it takes the machine from those who write
                work = score(model, made.prompt, made.begin, asked.logprobs)
                scores = tuple(await attended(request.receive, work))
        for _ in range(made.n):
            events.append(Event(len(events), text, logprobs=scores))
    return events


class Echoed:
    """Prompts before the events of their choices."""

    def __init__(self, encode: Encode, echoes: list[Event]):
        self._encode, self._left = encode, {event.choice: event for event in echoes}

    def __call__(self, events: list[Event]) -> bytes:
        first = [self._left.pop(event.choice) for event in events if event.choice in self._left]
        return self._encode(first + events)


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
        "token_logprobs": [as_json(row.logprob) for row in rows],
        "top_logprobs": [
            None if isnan(row.logprob) else {words.text_of(token): as_json(value) for token, value in row.likeliest}
            for row in rows
        ],
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
