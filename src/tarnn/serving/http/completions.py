"""POST /v1/completions and /v1/chat/completions: texts that go on, and the next messages of conversations."""

import asyncio
from math import isnan, nan
from typing import Any

import torch
from jaxtyping import Float
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from tarnn.decoding.caches import copy_of
from tarnn.serving.http.body import read_request
from tarnn.serving.http.chat_template import check_template, opened
from tarnn.serving.http.errors import bad
from tarnn.serving.http.gather import answer
from tarnn.serving.http.openapi import Operation
from tarnn.serving.http.prompts import (
    SHORT,
    Ids,
    Vocabulary,
    finite,
    num_prompts,
    prompt_ids,
    split,
    text_of,
    vocabulary,
)
from tarnn.serving.http.reader import attended
from tarnn.serving.http.request_schemas import ChatRequest, CompletionRequest
from tarnn.serving.http.response_schemas import ChatChunk, ChatCompletion, Completion, CompletionChunk
from tarnn.serving.http.sse import Style
from tarnn.serving.http.store_errors import held_state
from tarnn.serving.http.to_engine import check_choices, check_gathered, engine_of, make_request, refuse_when_full
from tarnn.serving.model import ServedModel
from tarnn.serving.pool import new_state
from tarnn.serving.request import Event, Request, TokenLogprob, check_request
from tarnn.serving.snapshot import Snapshot

MAX_TOKENS = 16  # the default of completions, as in OpenAI's API
MAX_TOKENS_OF_CHATS = 1024  # theirs: a model whose past never fills up may never end
NUMBERS = 2**21  # logits of a piece of a prompt that is scored: tokens x vocabulary
COMPLETION = Style("cmpl", "text_completion", "text_completion", lambda text: {"text": text}, b'"text":', b'"text":')

CHAT = Style(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    opened=b'"delta":{"content":',
    first=b'"delta":{"role":"assistant","content":',
    closed=b"}",
)


async def complete(request: HttpRequest) -> Response:
    """Continue a text."""
    body = await read_request(request, CompletionRequest)
    engine = engine_of(request, body.model)
    prompt = "" if body.prompt is None else body.prompt
    check_choices(request, num_prompts(prompt), body.n or 1)
    refuse_when_full(engine)
    prompts = [prompt] if isinstance(prompt, str) else await asyncio.to_thread(split, prompt)
    begin = await held_state(request, engine, body.state)
    most, goes_on = request.app.state.settings.max_prompt, begin is not None
    texts = [await prompt_ids(engine.model, prompt, "prompt", most=most, goes_on=goes_on) for prompt in prompts]
    options: dict[str, Any] = {
        "max_tokens": MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        "n": body.n or 1,
        "begin": begin,
        "end_ids": frozenset() if body.ignore_eos else None,
        "logprobs": body.logprobs,
    }
    requests = [make_request(request, engine, body, prompt=ids, **options) for ids in texts]
    if not body.stream or (body.echo and body.logprobs is not None):
        check_gathered(request, engine, requests, "max_tokens", echo=bool(body.echo))
    echoes = await echoes_of(request, engine.model, body, prompts, requests) if body.echo else []
    logprobs = None if body.logprobs is None else Logprobs(vocabulary(engine.model))
    return await answer(request, engine, body, requests, COMPLETION, logprobs, echoes)


async def chat(request: HttpRequest) -> Response:
    """Answer a conversation."""
    body = await read_request(request, ChatRequest)
    engine = engine_of(request, body.model)
    check_choices(request, 1, body.n or 1)
    check_template(engine.model)
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs needs logprobs: true.", "top_logprobs", "invalid_value")
    refuse_when_full(engine)
    begin = await held_state(request, engine, body.state)
    messages = [message.plain for message in body.messages]
    if sum(len(message["content"]) for message in messages) > SHORT:
        ids, boundaries = await asyncio.to_thread(opened, engine.model, messages)
    else:
        ids, boundaries = opened(engine.model, messages)
    most = request.app.state.settings.max_prompt
    engine_request = make_request(
        request,
        engine,
        body,
        prompt=await prompt_ids(engine.model, ids, "messages", most=most, goes_on=begin is not None),
        max_tokens=max_tokens_of(body),
        n=body.n or 1,
        begin=begin,
        end_ids=frozenset() if body.ignore_eos else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        boundaries=boundaries,
    )
    if not body.stream:
        param = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
        check_gathered(request, engine, [engine_request], param)
    words = vocabulary(engine.model)

    def logprobs(event: Event) -> dict[str, Any]:
        return {"content": words.described(event.logprobs), "refusal": None}

    return await answer(request, engine, body, [engine_request], CHAT, logprobs if body.logprobs else None)


def max_tokens_of(body: ChatRequest) -> int:
    """Return the limit, by either of its two names. Raises ApiError if they differ."""
    both = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(both) > 1:
        raise bad("max_tokens and max_completion_tokens are the same, and differ here. Give one.", "max_tokens")
    return next(iter(both)) or 0 if both else MAX_TOKENS_OF_CHATS


async def echoes_of(
    request: HttpRequest, model: ServedModel, body: CompletionRequest, prompts: list[Any], requests: list[Request]
) -> list[Event]:
    """Return the event before each choice: its prompt, with its logprobs if they are requested."""
    events: list[Event] = []
    for prompt, engine_request in zip(prompts, requests):
        try:
            check_request(engine_request, model)
        except ValueError as error:
            raise bad(str(error)) from None
        text = prompt if isinstance(prompt, str) else await asyncio.to_thread(text_of, model, engine_request.prompt)
        scores: tuple[TokenLogprob, ...] = ()
        if body.logprobs is not None:
            async with request.app.state.scoring:  # one at a time: it takes the machine from running texts
                work = score(model, engine_request.prompt, engine_request.begin, body.logprobs)
                scores = tuple(await attended(request.receive, work))
        for _ in range(engine_request.n):
            events.append(Event(len(events), text, logprobs=scores))
    return events


class Logprobs:
    """Writes the logprobs of events in the shape of this API, with places in the text of each choice."""

    def __init__(self, words: Vocabulary):
        self._words = words
        self._offsets: dict[int, int] = {}

    def __call__(self, event: Event) -> dict[str, Any]:
        words, rows, offset, offsets = self._words, event.logprobs, self._offsets.get(event.choice, 0), []
        for row in rows:
            offsets.append(offset)
            offset += words.width_of(row.token)
        self._offsets[event.choice] = offset
        return {
            "tokens": [words.text_of(row.token) for row in rows],
            "token_logprobs": [finite(row.logprob) for row in rows],
            "top_logprobs": [
                None if isnan(row.logprob) else {words.text_of(token): finite(value) for token, value in row.likeliest}
                for row in rows
            ],
            "text_offset": offsets,
        }


async def score(model: ServedModel, ids: Ids, begin: Snapshot | None, likeliest: int) -> list[TokenLogprob]:
    """Return the logprob of each token of a prompt, and those of the `likeliest` ones in its place.

    The first is NaN if nothing stands before it.
    """
    room = len(ids) + (0 if begin is None else len(begin.tokens))
    state = new_state(model, 1, capacity=room) if begin is None else copy_of(begin.state, room)
    before = None if begin is None else begin.logits
    scores: list[TokenLogprob] = []
    piece = max(1, NUMBERS // model.step.num_outputs)

    def read(part: Ids) -> Float[Tensor, "t v"]:
        nonlocal state
        with torch.no_grad():
            tokens = torch.from_numpy(part).long()[None]
            logits, state = model.step.prefill(tokens, state, inplace=True, every=True)
            return logits[0]

    for place in range(0, len(ids), piece):
        part = ids[place : place + piece]
        logits = await asyncio.to_thread(read, part)  # between two pieces a disconnect is noticed
        if before is None:
            scores.append(TokenLogprob(int(ids[0]), nan))
            rows, tokens = logits[:-1], part[1:]
        else:
            rows, tokens = torch.cat((before, logits[:-1])), part
        before = logits[-1:]
        scores += scored(rows, tokens, likeliest)
    return scores


def scored(logits: Float[Tensor, "t v"], tokens: Ids, likeliest: int) -> list[TokenLogprob]:
    logs = logits.double().log_softmax(-1)
    own = logs.gather(-1, torch.from_numpy(tokens).long()[:, None])[:, 0].float().tolist()
    top = logs.topk(min(likeliest, logs.shape[-1]))
    rows = zip(tokens.tolist(), own, top.indices.tolist(), top.values.float().tolist())
    return [TokenLogprob(token, value, tuple(zip(ids, values))) for token, value, ids, values in rows]


routes = [
    Operation("POST", "/v1/completions", complete, Completion, body=CompletionRequest, events=CompletionChunk),
    Operation("POST", "/v1/chat/completions", chat, ChatCompletion, body=ChatRequest, events=ChatChunk),
]
