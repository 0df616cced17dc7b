"""The engine against the token loop alone: whatever else is going on, no bit of an answer changes."""

import asyncio

import numpy as np
import pytest
import torch
from support.served import alone

from tarnn.serving.engine import Busy, Engine
from tarnn.serving.request import Request, Sampling

NO_ENDS = frozenset()


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def answer(stream):
    """(text, tokens, finish, snapshot) of each choice, all events together."""
    texts, tokens, last = {}, {}, {}
    for event in stream:
        texts[event.choice] = texts.get(event.choice, "") + event.text
        tokens.setdefault(event.choice, []).extend(event.tokens)
        last[event.choice] = event
    return [(texts[i], tokens[i], last[i].finish, last[i].snapshot) for i in sorted(last)]


@pytest.fixture
def engine(served):
    """engine(kind, **options): a running engine, closed after the test."""
    engines = []

    def start(kind="linear", weights="float32", **options):
        engines.append(Engine(served(kind, weights), **options))
        engines[-1].start()
        return engines[-1]

    yield start
    for one in engines:
        one.close()


SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(seed=7),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    Sampling(seed=3, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, logit_bias={5: 2.0}),
]


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["linear", "decay", "rotary", "log-weighted"])
def test_equals_the_token_loop_alone(engine, served, kind, weights):
    one = engine(kind, weights, max_rows=5, prefill_piece=16)
    requests = [
        Request(prompt(1 + 7 * i, seed=i), 3 + i % 11, SAMPLINGS[i % 4], end_ids=NO_ENDS, keep=True, client=str(i % 3))
        for i in range(13)
    ]
    streams = [one.submit(request) for request in requests]
    for request, stream in zip(requests, streams):
        [(_, tokens, finish, snapshot)] = answer(stream)
        expected, logits, state = alone(served(kind, weights), request)
        assert (tokens, finish) == (expected, "length")
        assert torch.equal(snapshot.logits, logits)
        assert snapshot.tokens.tolist() == [*request.prompt, *tokens]
        for mine, theirs in zip(snapshot.state.layers, state.layers):
            assert torch.equal(mine.S, theirs.S)
        assert stream.usage == (len(request.prompt), 0, len(tokens))


def test_choices_of_one_prompt(engine, served):
    request = Request(prompt(40), 6, Sampling(seed=5), n=7, end_ids=NO_ENDS)
    one = engine(max_rows=4)
    choices = [tokens for _, tokens, _, _ in answer(one.submit(request))]
    assert choices == [alone(served(), request, choice)[0] for choice in range(7)]
    assert one.stats.tokens_read == 40


def test_async_readers(engine, served):
    one = engine(max_rows=4)
    requests = [Request(prompt(9, seed=i), 12, Sampling(seed=i), end_ids=NO_ENDS) for i in range(9)]

    async def read(request):
        return [token async for event in one.submit(request) for token in event.tokens]

    async def all_of_them():
        return await asyncio.gather(*map(read, requests))

    assert asyncio.run(all_of_them()) == [alone(served(), request)[0] for request in requests]


def test_a_cancelled_request_ends(engine):
    one = engine()
    stream = one.submit(Request(prompt(5), 10**6, Sampling(temperature=0), end_ids=NO_ENDS))
    next(stream)
    stream.cancel()
    assert [event.finish for event in stream][-1] == "cancelled"
    assert one.stats.running == 0


def test_a_full_queue(served):
    one = Engine(served(), max_queue=2)
    streams = [one.submit(Request(prompt(5), 1)) for _ in range(2)]
    with pytest.raises(Busy, match="the queue is full"):
        one.submit(Request(prompt(5), 1))
    one.start()
    assert [answer(x)[0][2] for x in streams] == ["length"] * 2
    one.close()


def test_stop_strings(engine, served):
    free = Request(prompt(20), 40, Sampling(seed=11), end_ids=NO_ENDS)
    one = engine()
    [(text, tokens, _, _)] = answer(one.submit(free))
    stop = text[7:9]
    request = Request(prompt(20), 40, Sampling(seed=11), end_ids=NO_ENDS, stop=(stop,), keep=True)
    [(cut, fewer, finish, snapshot)] = answer(one.submit(request))
    assert (cut, finish) == (text[: text.index(stop)], "stop")
    assert fewer == tokens[: len(fewer)]
    assert len(fewer) < len(tokens)
    _, logits, _ = alone(served(), Request(prompt(20), len(fewer), Sampling(seed=11), end_ids=NO_ENDS))
    assert torch.equal(snapshot.logits, logits)
