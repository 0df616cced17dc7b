"""What is too much: bodies, prompts, texts at once, and requests beyond what the queue takes."""

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
from support.http_server import call, http_server

from tarnn.serving.engine import Engine
from tarnn.serving.http import server as server_module
from tarnn.serving.http.app import create_app
from tarnn.serving.http.server import BoundedProtocol
from tarnn.serving.http.settings import ServerSettings

from .conftest import running

SMALL = ServerSettings(max_body=2000, max_prompt=100, max_choices=4, body_seconds=0.05)


MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def ask(engine):
    """ask(body or bytes): the answer of a server with small limits."""

    def ask(body):
        content = {"json": body} if isinstance(body, dict) else {"content": body}
        return call(create_app({"linear": engine}, SMALL), "POST", "/v1/completions", **content)

    return ask


def test_a_body_that_is_too_large(ask):
    async def pieces():
        for _ in range(30):
            yield b" " * 100

    for body in (b" " * 2001, pieces()):
        answer = ask(body)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "The body is larger than 2,000 bytes. Send less."


def test_a_body_that_never_comes(ask):
    async def slow():
        yield b"{"
        await asyncio.sleep(60)

    assert ask(slow()).status_code == 408


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "x" * 101}, "prompt"),
        ({"prompt": ["x"] * 5}, "n"),
        ({"prompt": ["x", "y"], "n": 3}, "n"),
        ({"prompt": "x", "stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": 1.5}, "prompt"),
        ({"prompt": "x", "temperature": True}, "temperature"),
        ({"prompt": "x", "seed": 2**63}, "seed"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "9"}, "max_tokens"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"prompt": "x", "stream_options": {"include": True}}, "stream_options.include"),
        ({"prompt": "x", "stream_options": []}, "stream_options"),
        ({"prompt": "x", "list": 1}, "list"),
    ],
)
def test_what_is_out_of_range_is_named(ask, body, param):
    answer = ask(body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_null_is_as_if_it_were_missing(ask):
    nothing = dict.fromkeys(("temperature", "stop", "logprobs", "seed", "tools", "best_of", "suffix", "stream"))
    assert ask({"prompt": "x", "max_tokens": 1, **nothing}).status_code == 200


def test_beyond_the_queue_clients_are_told_to_come_later(served):
    """Of many at once some are taken, and answered; the others are told when to come again."""
    engine = Engine(served("linear"), max_queue=3)  # it doesn't work yet, so what is taken waits
    with running(create_app({"linear": engine})) as address, httpx.Client(base_url=address, timeout=60) as client:
        body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
        refused = threading.Semaphore(0)

        def post(_):
            answer = client.post("/v1/completions", json=body)
            if answer.status_code == 429:
                refused.release()
            return answer

        with ThreadPoolExecutor(8) as threads:
            answers = threads.map(post, range(8))
            for _ in range(5):
                assert refused.acquire(timeout=30)
            engine.start()
            answers = list(answers)
        engine.close()
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 5
    for answer in answers:
        if answer.status_code == 429:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"


def test_several_prompts_are_taken_all_or_none(served):
    with Engine(served("linear"), max_queue=2) as engine:
        body = {"prompt": ["a" * 50_000] * 100, "max_tokens": 1}
        answer = call(create_app({"linear": engine}), "POST", "/v1/completions", json=body)
        assert answer.status_code == 429
        while engine.stats.waiting or engine.stats.running:
            time.sleep(0.001)
        assert engine.stats.tokens_read < 50_000  # the first ones were taken, and cancelled


def place(address):
    parts = urlsplit(address)
    return parts.hostname, parts.port


def exchanged(*pieces):
    """What comes back on a connection where these are sent, until it is closed."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    received = b""
    with running(app, http=BoundedProtocol) as address, socket.create_connection(place(address), timeout=30) as client:
        try:
            for piece in pieces:
                client.sendall(piece)
            while data := client.recv(4096):
                received += data
        except ConnectionError:
            pass
    return received


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"


def test_a_head_without_an_end_is_cut_off(monkeypatch):
    received = exchanged(HEAD + b"x: ", *[b"x" * 4096] * 2000)
    assert received == b"" or received.startswith(b"HTTP/1.1 400")
    monkeypatch.setattr(server_module, "HEAD_SECONDS", 0.05)
    assert exchanged(HEAD) == b""
    assert exchanged() == b""


def test_a_large_body_is_no_large_head():
    body = b"x" * 300_000
    sound = HEAD + b"Content-Length: 300000\r\n\r\n" + body
    last = HEAD + b"Connection: close\r\n\r\n"
    assert exchanged(sound, sound, last).count(b"204 No Content") == 3


WHOLE = {
    "text": ("/v1/completions", {"prompt": "x", "max_tokens": 10**18, "ignore_eos": True}, "max_tokens"),
    "texts": ("/v1/completions", {"prompt": ["x", "y"], "n": 2, "max_tokens": 26}, "max_tokens"),
    "logprobs": ("/v1/completions", {"prompt": "x", "max_tokens": 6, "logprobs": 20}, "max_tokens"),
    "echo": ("/v1/completions", {"prompt": "x" * 99, "max_tokens": 1, "logprobs": 1, "echo": True}, "max_tokens"),
    "echo, streamed": (
        "/v1/completions",
        {"prompt": "x" * 99, "max_tokens": 1, "logprobs": 1, "echo": True, "stream": True},
        "max_tokens",
    ),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 101}, "max_completion_tokens"),
    "response": ("/v1/responses", {"input": "x", "max_output_tokens": 101}, "max_output_tokens"),
    "response, streamed": (
        "/v1/responses",
        {"input": "x", "max_output_tokens": 101, "stream": True},
        "max_output_tokens",
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_gathered_has_a_bound(chatty, kind):
    path, body, param = WHOLE[kind]
    with http_server({"chatty": chatty}, ServerSettings(max_gathered=100)) as server:
        answer = server.post(path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], "at most 100" in error["message"]) == (param, True)
        if kind in ("text", "texts", "logprobs", "chat"):
            with server.client.stream("POST", path, json=body | {"stream": True}) as answer:
                assert answer.status_code == 200  # its events are not gathered


def test_a_short_model_gathers_no_more_than_it_can_write(served):
    with http_server({"short": served("short")}, ServerSettings(max_gathered=48)) as server:
        answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 10**18, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 47
        echo = {"prompt": "x" * 47, "echo": True, "max_tokens": 4}  # a text is no list of logprobs
        assert server.post("/v1/completions", echo).status_code == 200
