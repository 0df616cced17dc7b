"""Texts that go on, as the official client asks for them: they are what the token loop alone writes."""

import asyncio

import numpy as np
import openai
import pytest
from support.served import alone

from tarnn.serving.request import Request, Sampling

ASK = {"model": "linear", "prompt": "Call me", "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def ids(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def expected(served, choice=0, **sampling):
    request = Request(ids("Call me"), max_tokens=12, sampling=Sampling(**sampling), end_ids=frozenset())
    tokens = alone(served("linear"), request, choice)[0]
    return served("linear").decoder()(list(tokens))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 7, "top_p": 0.9}])
def test_an_answer_is_that_of_the_token_loop(client, served, sampling):
    whole = client.completions.create(**ASK, **sampling)
    assert whole.choices[0].text == expected(served, **sampling)
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (7, 12, 19)
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    pieces = list(client.completions.create(**ASK, **sampling, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


def test_the_clients_own_loop_reads_many_streams_at_once(client, served):
    async def texts():
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as at_once:

            async def text(seed):
                pieces = await at_once.completions.create(**ASK, seed=seed, stream=True)
                return "".join([piece.choices[0].text async for piece in pieces])

            whole = at_once.completions.create(**ASK, seed=9)
            return await asyncio.gather(*map(text, range(4)), whole)

    *streamed, whole = asyncio.run(texts())
    assert streamed == [expected(served, seed=seed) for seed in range(4)]
    assert whole.choices[0].text == expected(served, seed=9)


def test_n_choices_draw_each_for_itself(client, served):
    answer = client.completions.create(**ASK, n=3, seed=5)
    assert [choice.text for choice in answer.choices] == [expected(served, choice, seed=5) for choice in range(3)]
    assert len({choice.text for choice in answer.choices}) == 3


def test_several_prompts(client):
    single = [client.completions.create(**ASK | {"prompt": p}, temperature=0).choices[0].text for p in ("ab", "xyz")]
    for prompts in (["ab", "xyz"], [ids("ab").tolist(), ids("xyz").tolist()]):
        answer = client.completions.create(**ASK | {"prompt": prompts}, temperature=0, n=2)
        assert [choice.text for choice in answer.choices] == [single[0], single[0], single[1], single[1]]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == 5
        assert answer.usage.completion_tokens == 48


def test_usage_at_the_end_of_a_stream(client):
    pieces = list(client.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].choices == []
    assert pieces[-1].usage.completion_tokens == 12
    assert all(piece.usage is None for piece in pieces[:-1])


def test_usage_in_every_chunk_of_a_stream(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    pieces = list(client.completions.create(**ASK, stream=True, stream_options=options))
    written = [piece.usage.completion_tokens for piece in pieces]
    assert written == sorted(written)
    assert written[0] >= 1
    assert written[-1] == 12
    assert pieces[-1].choices == []


def test_an_unknown_parameter_is_named(client):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(**ASK | {"extra_body": {"temprature": 1}})
    assert error.value.param == "temprature"
    assert error.value.body["message"] == "Unknown parameter: 'temprature'."


@pytest.mark.parametrize("name", ["tools", "response_format", "best_of", "suffix"])
def test_what_is_not_here_is_refused(client, name):
    with pytest.raises(openai.BadRequestError, match="not supported") as error:
        client.completions.create(**ASK | {"extra_body": {name: 2}})
    assert error.value.param == name
