"""Requests that are damaged in any way are refused with a sentence: never with an error of ours."""

import asyncio
import json
import random

import httpx
import pytest

from tarnn.serving.http.app import create_app

SOUND = {
    "/v1/completions": {
        "model": "linear",
        "prompt": "Call me",
        "max_tokens": 2,
        "temperature": 0.5,
        "stop": ["xyz"],
        "logit_bias": {"5": 1.5},
        "n": 2,
        "logprobs": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
        "echo": True,
    },
    "/v1/chat/completions": {
        "model": "linear",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Call me"}]}],
        "max_completion_tokens": 2,
        "top_p": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/tokenize": {"model": "linear", "prompt": "Call me"},
    "/detokenize": {"model": "linear", "tokens": [1, 2]},
}
ODD = [
    None,
    True,
    -1,
    0,
    1e308,
    2**70,
    "",
    "\0",
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0.5],
    "x" * 5000,
    [[1], ["a"]],
]


def broken(chance, body):
    """The body with one thing wrong, as bytes."""
    text = json.dumps(body).encode()
    kind = chance.randrange(6)
    if kind == 0:  # a part is missing
        return text[: chance.randrange(len(text))]
    if kind == 1:  # some bytes are others
        damaged = bytearray(text)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        return bytes(damaged)
    if kind == 2:  # the nesting has no end
        return b'{"prompt":' + chance.choice([b"[", b'{"a":']) * 20_000
    changed = dict(body)
    if kind == 3:
        changed[chance.choice(["", "temprature", "__class__", "n\0"])] = chance.choice(ODD)
    elif kind == 4:
        del changed[chance.choice(list(changed))]
    else:
        changed[chance.choice(list(changed))] = chance.choice(ODD)
    return json.dumps(changed).encode()


@pytest.mark.parametrize("path", SOUND)
def test_damaged_bodies(engine, path):
    chance = random.Random(path)
    bodies = [broken(chance, SOUND[path]) for _ in range(60)]
    bodies += [
        b"",
        b"null",
        b"[]",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b"{}" * 2,
        b"NaN",
        json.dumps(SOUND[path]).encode("utf-16"),
    ]

    async def answered():
        transport = httpx.ASGITransport(create_app({"linear": engine}))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.post(path, content=body, timeout=60) for body in bodies]

    for body, answer in zip(bodies, asyncio.run(answered())):
        assert answer.status_code in (200, 400, 404), body[:300]
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"].strip()
            assert len(error["message"]) < 500, body[:300]
    assert answer.status_code == 400
