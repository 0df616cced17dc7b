"""Streams whose readers go away, are slow, or wait long."""

import json
import socket
import time

import pytest

from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app
from tarnn.serving.http.settings import ServerSettings
from tarnn.serving.store import StateStore

from .conftest import running

ENDLESS = {"prompt": "Call me", "max_tokens": 200_000, "ignore_eos": True, "stream": True}


def connected(address, body):
    """A socket on which this was asked for, as a client writes it that may vanish at any time."""
    host, port = address.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    client = socket.create_connection((host, int(port)), timeout=60)
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    return client


def until(condition, seconds=30):
    """Wait for it; False where it doesn't come."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.002)
    return met


def idle(engine):
    stats = engine.stats
    return stats.running == stats.ready == stats.paused == stats.waiting == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_who_goes_while_we_write_frees_its_row(engine, address, stream):
    client = connected(address, ENDLESS | {"stream": stream})
    assert until(lambda: engine.stats.running == 1)
    if stream:
        assert b"200 OK" in client.recv(4096)
    client.close()
    assert until(lambda: idle(engine))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_who_goes_while_we_read_leaves_the_queue(engine, address, stream):
    client = connected(address, ENDLESS | {"prompt": "a" * 500_000, "max_tokens": 1, "stream": stream})
    assert until(lambda: engine.stats.waiting == 1)
    read = engine.stats.tokens_read
    client.close()
    assert until(lambda: idle(engine))
    assert engine.stats.tokens_read - read < 500_000


def test_a_reader_who_stops_reading_holds_nobody_up(engine, address, client):
    silent = connected(address, ENDLESS | {"logprobs": 20})  # large events, which fill the socket soon
    assert until(lambda: engine.stats.paused == 1)
    assert client.completions.create(model="linear", prompt="x", max_tokens=3).usage.completion_tokens <= 3
    silent.close()
    assert until(lambda: idle(engine))


def test_a_silent_stream_gets_comments(served):
    """While a long prompt is read; proxies close connections on which nothing moves."""
    settings = ServerSettings(ping_seconds=0.01)
    with Engine(served("linear")) as engine, running(create_app({"linear": engine}, settings)) as address:
        client = connected(address, ENDLESS | {"prompt": "a" * 40_000, "max_tokens": 1})
        received = b""
        while b"[DONE]" not in received:
            received += client.recv(65536)
        client.close()
    assert b": ping\n\n" in received
    assert received.index(b": ping") < received.index(b"data: ")
    assert b"x-tarnn-state" not in received  # nothing is known yet when the headers go out


def test_what_was_read_once_is_found_again(served):
    model = served("linear")
    store = StateStore(model)
    with Engine(model, store=store) as engine, running(create_app({"linear": engine})) as address:
        for expected in (0, 7):
            client = connected(address, ENDLESS | {"max_tokens": 2, "stream_options": {"include_usage": True}})
            received = b""
            while b"[DONE]" not in received:
                received += client.recv(65536)
            client.close()
            assert f"x-tarnn-state: hit={expected}/7\r\n".encode() in received
            assert f'"prompt_tokens_details":{{"cached_tokens":{expected}}}'.encode() in received
        state = store.hold("", store.longest("", model_ids("Call me")), name="begun")
        answers = [
            connected_json(address, {"prompt": prompt, "state": begin, "temperature": 0, "max_tokens": 5})
            for prompt, begin in (("Call me Ishmael", None), (" Ishmael", "begun"), (" Ishmael", state.id))
        ]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert {answer["usage"]["prompt_tokens"] for answer in answers} == {15}
        gone = connected_json(address, {"prompt": "", "state": "nowhere"})
        assert gone["error"]["code"] == "state_not_found"


def model_ids(text):
    import numpy as np

    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def connected_json(address, body):
    import httpx

    return httpx.post(f"{address}/v1/completions", json=body, timeout=60).json()


def test_an_engine_that_fails_ends_the_stream_with_an_error(served, monkeypatch):
    model = served("linear")
    with Engine(model) as engine, running(create_app({"linear": engine})) as address:
        client = connected(address, ENDLESS)
        first = client.recv(65536)
        assert b"200 OK" in first
        engine.close()
        received = b""
        while piece := client.recv(65536):
            received += piece
            if received.endswith(b"0\r\n\r\n"):
                break
        client.close()
        assert b'data: {"error": {"message": "The server stopped before the answer was whole."' in received
        late = connected_json(address, {"prompt": "x"})
        assert late["error"]["code"] == "unavailable"
