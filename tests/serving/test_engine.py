"""The engine against the token loop alone: whatever else is going on, no bit of an answer changes."""

import pytest
import torch
from support.served import NO_ENDS, alone, answer, prompt

from tarnn.serving.request import Request, Sampling

SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(seed=7),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    Sampling(seed=3, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, logit_bias={5: 2.0}),
]


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("kind", ["linear", "decay", "rotary", "log-weighted", "hybrid"])
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
            assert all(torch.equal(x, theirs.tensors()[name]) for name, x in mine.tensors().items())
        assert stream.usage == (len(request.prompt), 0, len(tokens))


def test_choices_of_one_prompt(engine, served):
    request = Request(prompt(40), 6, Sampling(seed=5), n=7, end_ids=NO_ENDS)
    one = engine(max_rows=4)
    choices = [tokens for _, tokens, _, _ in answer(one.submit(request))]
    assert choices == [alone(served(), request, choice)[0] for choice in range(7)]
    assert one.stats.tokens_read == 40
