"""POST /v1/chat/completions: the next message of a conversation."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

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
from tarnn.serving.http.prompts import SHORT, Ids, prompt_ids, vocabulary
from tarnn.serving.http.sse import EventStream
from tarnn.serving.http.template import Messages, check_template, encoded, rendered
from tarnn.serving.http.vocabulary import Vocabulary
from tarnn.serving.http.wire import ChatRequest
from tarnn.serving.model import ServedModel
from tarnn.serving.request import Event, TokenLogprob

MAX_TOKENS = 1024  # where a request says nothing: a model whose past never fills up may never end
LAST = 3  # messages before the last one whose ends are kept; those before them were the last ones of earlier requests


async def create(request: HttpRequest) -> Response:
    asked = await read_request(request, ChatRequest)
    engine = engine_of(request, asked.model)
    check_choices(request, 1, asked.n or 1)
    check_template(engine.model)
    if asked.top_logprobs and not asked.logprobs:
        raise bad("top_logprobs needs logprobs: true.", "top_logprobs", "invalid_value")
    refuse_when_full(engine)
    begin = await held_state(request, engine, asked.state)
    messages = [message.plain for message in asked.messages]
    if sum(len(message["content"]) for message in messages) > SHORT:
        ids, boundaries = await asyncio.to_thread(opened, engine.model, messages)
    else:
        ids, boundaries = opened(engine.model, messages)
    most = request.app.state.settings.max_prompt
    ids = await prompt_ids(engine.model, ids, "messages", most=most, goes_on=begin is not None)
    past = 0 if begin is None else len(begin.tokens)
    made = engine_request(
        request,
        engine,
        asked,
        ids,
        begin=begin,
        max_tokens=max_tokens_of(asked),
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        boundaries=tuple(past + place for place in boundaries),
    )
    if not asked.stream:
        check_gathered(request, engine, [made], "max_completion_tokens" if asked.max_tokens is None else "max_tokens")
    reader = start(request, engine, [made])
    words = vocabulary(engine.model)
    if asked.stream:
        chunks = Chunks(
            head_of("chatcmpl", "chat.completion.chunk", engine),
            reader,
            opened=b'"delta":{"content":',
            first=b'"delta":{"role":"assistant","content":',
            closed=b"}",
            options=asked.stream_options,
            logprobs=partial(logprobs_of_event, words=words) if asked.logprobs else None,
        )
        return EventStream(reader, chunks.encode, chunks.last, partial(state_header, reader))
    answers = await gather(request, reader)
    head = head_of("chatcmpl", "chat.completion", engine)

    def build() -> dict[str, Any]:
        choices = [choice_of(index, answer, words, bool(asked.logprobs)) for index, answer in enumerate(answers)]
        return head | {"choices": choices, "usage": usage_of(reader.usage)}

    return await whole(build, numbers_of(answers), state_header(reader))


def opened(model: ServedModel, messages: Messages, *, answer_follows: bool = True) -> tuple[Ids, list[int]]:
    """The tokens of a conversation, up to where the next answer begins, and places in them where messages end."""
    text = rendered(model, messages, answer_follows=answer_follows)
    ids, ends = encoded(model, text)
    places = set()
    for n in {1, *range(max(1, len(messages) - LAST), len(messages))} - {len(messages)}:
        try:
            beginning = rendered(model, messages[:n], answer_follows=False)
        except Exception:  # a template that wants more than the beginning of a conversation
            continue
        if text.startswith(beginning):
            places.add(int(np.searchsorted(ends, len(beginning), "right")))
    return ids, sorted(places - {0})


def max_tokens_of(asked: ChatRequest) -> int:
    """By either of its two names. Raises ApiError where they differ."""
    both = {asked.max_tokens, asked.max_completion_tokens} - {None}
    if len(both) > 1:
        raise bad("max_tokens and max_completion_tokens are the same, and differ here. Give one.", "max_tokens")
    return next(iter(both)) or 0 if both else MAX_TOKENS


def choice_of(index: int, answer: Answer, words: Vocabulary, with_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": logprobs_of(answer.logprobs, words) if with_logprobs else None,
        "finish_reason": answer.finish,
    }


def logprobs_of(rows: Sequence[TokenLogprob], words: Vocabulary) -> dict[str, Any]:
    """In the shape of this API."""
    return {"content": words.described(rows), "refusal": None}


def logprobs_of_event(event: Event, words: Vocabulary) -> dict[str, Any]:
    return logprobs_of(event.logprobs, words)


routes = [Route("/v1/chat/completions", create, methods=["POST"])]
