"""Thousands of requests at once, of all kinds: no token of one is found in another."""

import random

import pytest
from support.served import NO_ENDS, alone, answer, prompt

from tarnn.serving.engine import Engine
from tarnn.serving.request import Request, Sampling
from tarnn.serving.store import StateStore


def requests(number):
    """Half of them share the beginnings of their prompts; half are greedy, half seeded."""
    draw = random.Random(0)
    for i in range(number):
        way = Sampling(temperature=0) if i % 2 else Sampling(seed=i, top_k=draw.choice([0, 5, 50]))
        tokens = prompt(draw.randrange(1, 50), seed=draw.choice([0, i]))
        yield Request(tokens, draw.randrange(14), way, end_ids=NO_ENDS, client=str(draw.randrange(7)))


@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_all_at_once(served, number):
    asked = list(requests(number))
    with Engine(served("decay"), store=StateStore(served("decay"), memory=2**25), max_queue=number) as one:
        streams = [one.submit(request) for request in asked]
        for request, stream in zip(asked, streams):
            [(_, tokens, finish, _)] = answer(stream)
            assert (tokens, finish) == (alone(served("decay"), request)[0], "length")
        assert one.stats.tokens_cached > 0
        assert one.stats.tokens_written == sum(request.max_tokens for request in asked)


@pytest.mark.slow
def test_a_million_tokens_take_no_memory(served):
    """The first tenth makes whatever is made once."""
    import resource

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    model = served("decay")
    with Engine(model, store=StateStore(model, memory=2**20)) as one:
        for i in range(100):
            streams = [
                one.submit(Request(prompt(9, seed=j), 200, Sampling(seed=i * 50 + j), end_ids=NO_ENDS))
                for j in range(50)
            ]
            for stream in streams:
                answer(stream)
            if i == 20:
                before = peak()
        assert one.stats.tokens_written > 900_000
    growth = peak() - before
    assert growth < 2**23
