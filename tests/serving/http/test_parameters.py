"""Each parameter of a completion does what it says, whole and streamed."""

import math
from itertools import pairwise

import pytest
import torch
from support.http_server import http_server
from support.served import alone

from tarnn.serving.http import gather
from tarnn.serving.http.prompts import Vocabulary
from tarnn.serving.request import Request, Sampling

from .test_completions import ASK, ids

SEEDED = {"seed": 3, "temperature": 1.5}


def text(client, **more):
    return client.completions.create(**ASK | SEEDED | more).choices[0].text


def extra(**more):
    return {"extra_body": {"ignore_eos": True} | more}


@pytest.mark.parametrize(
    ("asked", "sampling"),
    [
        ({"top_p": 0.5}, {"top_p": 0.5}),
        (extra(top_k=3), {"top_k": 3}),
        (extra(min_p=0.3), {"min_p": 0.3}),
        (extra(repetition_penalty=1.7), {"repetition_penalty": 1.7}),
        ({"frequency_penalty": 1.5}, {"frequency_penalty": 1.5}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"logit_bias": {"65": 100.0}}, {"logit_bias": {65: 100.0}}),
    ],
    ids=lambda x: next(iter(x.get("extra_body", x))) if "extra_body" not in x else list(x["extra_body"])[-1],
)
def test_sampling_reaches_the_engine(client, served, asked, sampling):
    request = Request(ids("Call me"), max_tokens=12, sampling=Sampling(**SEEDED, **sampling), end_ids=frozenset())
    expected = served("linear").decoder()(list(alone(served("linear"), request)[0]))
    assert text(client, **asked) == expected
    assert (
        "".join(p.choices[0].text for p in client.completions.create(**ASK | SEEDED | asked, stream=True)) == expected
    )


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100},
        {"temperature": 5e-324},
        {"temperature": 1e-40},
        {"temperature": 100},
        {"top_p": 5e-324},
        {"min_p": 1},
        {"frequency_penalty": -2, "presence_penalty": -2},
        {"logit_bias": {"65": -100}},
        {"top_k": 2**31 - 1},
        {"seed": 2**63 - 1},
    ],
    ids=str,
)
def test_extremes_are_answered_or_refused(http, extreme):
    body = {"prompt": "aaaa", "max_tokens": 40, "ignore_eos": True, "logprobs": 1} | extreme
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == (400 if extreme == {"repetition_penalty": 1e-40} else 200), answer.text
    if answer.status_code == 400:
        assert "greater than or equal to 0.01" in answer.json()["error"]["message"]


def test_stop_strings_end_a_text_before_them(client):
    whole = text(client, max_tokens=40)
    stops = [whole[20:22], "never there"]
    answer = client.completions.create(**ASK | SEEDED | {"max_tokens": 40}, stop=stops)
    assert answer.choices[0].text == whole[: whole.index(stops[0])]
    assert answer.choices[0].finish_reason == "stop"
    assert text(client, max_tokens=40, stop=stops[0]) == answer.choices[0].text
    pieces = list(client.completions.create(**ASK | SEEDED | {"max_tokens": 40}, stop=stops, stream=True))
    assert "".join(p.choices[0].text for p in pieces) == answer.choices[0].text


def test_the_model_may_end_a_text(client):
    bias = {"256": 100.0}
    answer = client.completions.create(model="linear", prompt="x", max_tokens=9, logit_bias=bias)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    answer = client.completions.create(**ASK | {"prompt": "x", "max_tokens": 9}, logit_bias=bias)
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_in_the_shape_of_completions(client):
    asked = ASK | {"temperature": 0, "logprobs": 2}
    answer = client.completions.create(**asked)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 12
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs):
        assert len(top) == 2
        assert top[token] == value == max(top.values())
    pieces = [p.choices[0].logprobs for p in client.completions.create(**asked, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [x for p in pieces for x in getattr(p, name)] == getattr(logprobs, name)


def test_an_answer_of_many_numbers_is_written_bit_by_bit(client, monkeypatch):
    asked = ASK | {"temperature": 0, "logprobs": 2, "echo": True}
    once = client.completions.create(**asked).choices
    monkeypatch.setattr(gather, "FEW", 3)
    monkeypatch.setattr(gather, "JSONResponse", None)
    assert client.completions.create(**asked).choices == once


def test_echo_with_logprobs_scores_the_prompt(client, served):
    """As a benchmark asks: what is the likelihood of this text?"""
    model = served("linear")
    asked = ASK | {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 3}
    answer = client.completions.create(**asked).choices[0]
    plain = client.completions.create(**ASK | {"temperature": 0, "max_tokens": 3, "logprobs": 1}).choices[0]
    assert answer.text == "Call me" + plain.text
    assert answer.logprobs.tokens[:7] == list("Call me")
    assert answer.logprobs.text_offset[:8] == list(range(8))
    assert answer.logprobs.token_logprobs[0] is answer.logprobs.top_logprobs[0] is None
    assert answer.logprobs.token_logprobs[7:] == plain.logprobs.token_logprobs
    prompt, state = ids("Call me").tolist(), model.model.new_state(1)
    for i in range(1, 7):
        logits, state = model.model.step(torch.tensor([prompt[i - 1]]), state)
        logs = logits[0].double().log_softmax(-1)
        assert math.isclose(answer.logprobs.token_logprobs[i], float(logs[prompt[i]]), abs_tol=1e-4)
        assert math.isclose(max(answer.logprobs.top_logprobs[i].values()), float(logs.max()), abs_tol=1e-4)
    pieces = [p.choices[0] for p in client.completions.create(**asked, stream=True)]
    assert "".join(p.text for p in pieces) == answer.text
    assert [x for p in pieces for x in p.logprobs.token_logprobs] == answer.logprobs.token_logprobs


@pytest.mark.parametrize("begins", ["", "Call "])
def test_a_hybrid_scores_a_prompt(served, begins):
    """Its caches have room for all of it, behind a state too."""
    model, text = served("hybrid"), "Call me Ishmael"
    asked = {"prompt": text.removeprefix(begins), "logprobs": 1, "echo": True, "max_tokens": 0}
    with http_server({"hybrid": model}) as server:
        if begins:
            asked["state"] = server.post("/v1/states", {"text": begins}).json()["id"]
        answer = server.post("/v1/completions", asked)
    [choice] = answer.json()["choices"]
    assert choice["text"] == asked["prompt"]
    state, expected = model.model.new_state(1, len(text)), [None]
    for token, following in pairwise(ids(text).tolist()):
        logits, state = model.model.step(torch.tensor([token]), state)
        expected.append(float(logits[0].double().log_softmax(-1)[following]))
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected[len(begins) :], abs=1e-4)


def test_what_a_model_cannot_read_is_refused_before_it_is_scored(served):
    with http_server({"short": served("short")}) as server:
        answer = server.post("/v1/completions", {"prompt": "x" * 60, "logprobs": 1, "echo": True, "max_tokens": 0})
    assert (answer.status_code, "48 tokens at most" in answer.text) == (400, True)


def test_echo_of_ids_and_of_several_choices(client):
    asked = ASK | {"prompt": [[72, 105], [33]], "echo": True, "max_tokens": 0, "n": 2}
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == ["Hi", "Hi", "!", "!"]
    assert answer.usage.completion_tokens == 0


def test_tokens_go_there_and_back(http):
    tokens = http.post("/tokenize", json={"prompt": "né<|endoftext|>"}).json()
    assert tokens == {"tokens": [*"né<|endoftext|>".encode()], "count": 16}
    assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "né<|endoftext|>"}
    assert http.post("/tokenize", json={"prompt": ""}).json() == {"tokens": [], "count": 0}


def test_bytes_that_are_no_characters_have_names(served):
    words = Vocabulary(served("linear").tokenizer)
    assert words.text_of(0xE2) == r"bytes:\xe2"
    assert words.text_of(65) == "A"
    assert words.text_of(256) == "<|endoftext|>"
    assert (words.width_of(0xC3), words.width_of(0xA9)) == (1, 0)
