"""Damaged bodies are refused with a sentence. Large ones cost one error if wrong, and are taken apart beside the loop."""

import json
import random
import threading

import numpy as np
import pytest
from support.http_server import call

from tarnn.serving.http import body as body_module, completions, models, prompts
from tarnn.serving.http.app import create_app
from tarnn.serving.http.body import MOST_KEYS, MOST_NESTED, MOST_VALUES, read_json
from tarnn.serving.http.errors import ApiError

MANY = 20_000
WRONG = {
    "prompts": ("/v1/completions", {"prompt": [None] * MANY}),
    "ids": ("/v1/completions", {"prompt": [[1.5] * MANY]}),
    "stops": ("/v1/completions", {"prompt": "x", "stop": [1] * MANY}),
    "messages": ("/v1/chat/completions", {"messages": [1] * MANY}),
    "parts": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * MANY}]}),
    "unfit messages": ("/v1/chat/completions", {"messages": [{"role": "nobody"}] * (MANY // 2)}),
    "inputs": ("/v1/responses", {"input": [1] * MANY}),
    "contents": ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "x"}] * (MANY // 2)}]}),
    "includes": ("/v1/responses", {"input": "x", "include": [1] * MANY}),
    "annotations": ("/v1/responses", {"input": [{"role": "user", "content": [{"annotations": [1] * MANY}]}]}),
    "tokens": ("/detokenize", {"tokens": ["x"] * MANY}),
}


@pytest.fixture
def ask(engine):
    return lambda path, content: call(create_app({"linear": engine}), "POST", path, content=content)


SOUND = {
    "/v1/completions": {
        "prompt": "Call me",
        "max_tokens": 2,
        "stop": ["xyz"],
        "logit_bias": {"5": 1.5},
        "stream": True,
    },
    "/v1/chat/completions": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Call me"}]}]},
    "/v1/responses": {"input": [{"role": "user", "content": "Call me"}], "max_output_tokens": 2},
}
NO_OBJECTS = [b"", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b"{}" * 2, b"NaN", '{"prompt": "x"}'.encode("utf-16")]
ENDLESS = [b'{"prompt":' + nested * 20_000 for nested in (b"[", b'{"a":')]


@pytest.mark.parametrize("path", SOUND)
def test_damaged_bodies_are_refused_with_a_sentence(ask, path):
    """test_openapi.py sends wrong values; these are wrong bytes."""
    rng, sound = random.Random(path), json.dumps(SOUND[path]).encode()
    flipped = [bytearray(sound) for _ in range(30)]
    for body in flipped:
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
    damaged = [sound[: rng.randrange(len(sound))] for _ in range(10)] + NO_OBJECTS + ENDLESS
    for body in [*map(bytes, flipped), *damaged]:
        answer = ask(path, body)
        assert answer.status_code == 400 or (answer.status_code in (200, 404) and body not in damaged), body[:300]
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert 0 < len(error["message"].strip()) < 500, body[:300]


@pytest.mark.parametrize("kind", WRONG)
def test_a_thousand_wrong_items_are_a_few_errors(ask, monkeypatch, kind):
    counts, said = [], body_module.api_error_of
    noted = lambda error, schema: counts.append(error.error_count()) or said(error, schema)  # noqa: E731
    monkeypatch.setattr(body_module, "api_error_of", noted)
    path, wrong = WRONG[kind]
    answer = ask(path, json.dumps(wrong).encode())
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] in wrong
    assert max(counts, default=0) < 20


@pytest.mark.parametrize(
    ("body", "most"),
    [
        (b"[" + b"1," * MOST_VALUES + b"1]", MOST_VALUES),
        (b"[" + b"[]," * MOST_NESTED + b"1]", MOST_NESTED),
        (b'{"logit_bias":{' + b'"a":[],' * MOST_KEYS + b'"b":1}}', MOST_KEYS),
    ],
    ids=["values", "nested", "keys"],
)
def test_what_is_too_many_is_refused_before_it_is_made(monkeypatch, body, most):
    monkeypatch.setattr("tarnn.serving.http.body.from_json", None)
    with pytest.raises(ApiError, match=f"{most:,}"):
        read_json(body)


def test_what_stands_in_a_text_is_not_counted():
    text = '\\", [{:' * MOST_KEYS * 5
    assert read_json(json.dumps({"prompt": text, "\\": ["\\", '"']}).encode()) == {"prompt": text, "\\": ["\\", '"']}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1] * MANY, "max_tokens": 0}),
        ("/v1/completions", {"prompt": [[1] * MANY, [2] * MANY], "max_tokens": 0}),
        ("/detokenize", {"tokens": [1] * MANY}),
    ],
)
def test_large_bodies_are_taken_apart_beside_the_loop(ask, monkeypatch, path, body):
    loops, used = threading.get_ident(), []

    def noted(call):
        def noting(*arguments, **options):
            used.append(threading.get_ident())
            return call(*arguments, **options)

        return noting

    monkeypatch.setattr(body_module, "parse", noted(body_module.parse))
    for module in (prompts, models):
        monkeypatch.setattr(module, "ids_of", noted(prompts.ids_of))
    assert ask(path, json.dumps(body).encode()).status_code == 200
    assert len(used) > 1
    assert loops not in used


def test_prompts_are_counted_before_they_are_taken_apart(ask, monkeypatch):
    monkeypatch.setattr(completions, "split", None)
    answer = ask("/v1/completions", json.dumps({"prompt": [[1]] * 129}).encode())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


def test_a_line_without_an_end_is_encoded_in_pieces(served, monkeypatch):
    """All others are encoded as ever."""
    encoded = []
    monkeypatch.setattr(prompts, "LONGEST_LINE", 10)
    monkeypatch.setattr(prompts, "encode", lambda _, data, param: encoded.append(data) or np.frombuffer(data, np.uint8))
    for text, pieces in (
        ("ab\ncd\n" * 9, ["ab\ncd\n" * 9]),
        ("é" * 10, ["é" * 10]),
        ("a\n" + "b" * 25 + "\nc", ["a\nbbbbbbbbbb", "bbbbbbbbbb", "bbbbb\nc"]),
        ("\n" * 30, ["\n" * 30]),
    ):
        encoded.clear()
        assert prompts.long_ids(served("linear"), text, "prompt").tolist() == list(text.encode())
        assert encoded == [piece.encode() for piece in pieces]
