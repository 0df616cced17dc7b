"""POST /v1/completions: texts that go on."""

import json
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn.serving.http.answers import Answer, check, gather
from tarnn.serving.http.asking import (
    check_choices,
    client,
    fingerprint_of,
    held_state,
    new_id,
    now,
    sampling_of,
    start,
    state_header,
    tenant,
    text_engine_of,
    usage_of,
)
from tarnn.serving.http.body import read_request
from tarnn.serving.http.prompts import prompt_ids, split, vocabulary
from tarnn.serving.http.reader import Reader
from tarnn.serving.http.sse import DONE, EventStream, escaped
from tarnn.serving.http.vocabulary import Vocabulary
from tarnn.serving.http.wire import CompletionRequest
from tarnn.serving.request import Event, Request, TokenLogprob

MAX_TOKENS = 16  # where a request says nothing, as in OpenAI's API


async def create(request: HttpRequest) -> Response:
    asked = await read_request(request, CompletionRequest)
    engine = text_engine_of(request, asked.model)
    begin = await held_state(request, engine, asked.state)
    settings = request.app.state.settings
    prompts = split("" if asked.prompt is None else asked.prompt)
    n = asked.n or 1
    check_choices(request, len(prompts), n)
    sampling = sampling_of(asked, engine.model.model.config.vocab_size)
    requests = []
    for prompt in prompts:
        ids = await prompt_ids(engine.model, prompt, "prompt", most=settings.max_prompt, goes_on=begin is not None)
        requests.append(
            Request(
                prompt=ids,
                max_tokens=MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
                sampling=sampling,
                n=n,
                begin=begin,
                stop=tuple(asked.stop or ()),
                end_ids=frozenset() if asked.ignore_eos else None,
                logprobs=asked.logprobs,
                tenant=tenant(request),
                client=client(request),
            )
        )
    reader = start(request, engine, requests)
    head = {
        "id": new_id("cmpl"),
        "object": "text_completion",
        "created": now(),
        "model": engine.model.name,
        "system_fingerprint": fingerprint_of(engine),
    }
    words = vocabulary(engine.model)
    if asked.stream:
        usage = bool(asked.stream_options and asked.stream_options.include_usage)
        chunks = Chunks(head, reader, words, usage, asked.logprobs is not None)
        return EventStream(reader, chunks.encode, chunks.last, lambda: state_header(reader))
    answers = await gather(request, reader)
    choices = [choice_of(index, answer, words, asked.logprobs is not None) for index, answer in enumerate(answers)]
    return JSONResponse(head | {"choices": choices, "usage": usage_of(reader.usage)}, headers=state_header(reader))


def choice_of(index: int, answer: Answer, words: Vocabulary, with_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "text": answer.text,
        "logprobs": logprobs_of(answer.logprobs, words, 0)[0] if with_logprobs else None,
        "finish_reason": answer.finish,
    }


def logprobs_of(rows: list[TokenLogprob] | tuple[TokenLogprob, ...], words: Vocabulary, offset: int) -> tuple[Any, int]:
    """In the shape of this API, and the offset of what comes next."""
    tokens, offsets = [], []
    for row in rows:
        tokens.append(words.text_of(row.token))
        offsets.append(offset)
        offset += words.width_of(row.token)
    shape = {
        "tokens": tokens,
        "token_logprobs": [row.logprob for row in rows],
        "top_logprobs": [{words.text_of(token): value for token, value in row.likeliest} for row in rows],
        "text_offset": offsets,
    }
    return shape, offset


@dataclass
class Chunks:
    """Events as chunks of a stream. All but the text is the same each time, and so is written once."""

    head: dict[str, Any]
    reader: Reader
    words: Vocabulary
    with_usage: bool
    with_logprobs: bool

    def __post_init__(self) -> None:
        self._usage = b',"usage":null' if self.with_usage else b""
        self._open = b"data: " + json.dumps(self.head).encode()[:-1] + b',"choices":[{"index":'
        self._offsets: dict[int, int] = {}

    def encode(self, events: list[Event]) -> bytes:
        return b"".join(map(self._chunk, events))

    def _chunk(self, event: Event) -> bytes:
        choice, finish = event.choice, b"null"
        if event.finish:
            check(event)
            finish = escaped(event.finish)
        logprobs = self._logprobs(event) if self.with_logprobs else b"null"
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            self._open,
            choice,
            escaped(event.text),
            logprobs,
            finish,
            self._usage,
        )

    def _logprobs(self, event: Event) -> bytes:
        shape, offset = logprobs_of(event.logprobs, self.words, self._offsets.get(event.choice, 0))
        self._offsets[event.choice] = offset
        return json.dumps(shape).encode()

    def last(self) -> bytes:
        if not self.with_usage:
            return DONE
        whole = self.head | {"choices": [], "usage": usage_of(self.reader.usage)}
        return b"data: " + json.dumps(whole).encode() + b"\n\n" + DONE


routes = [Route("/v1/completions", create, methods=["POST"])]
