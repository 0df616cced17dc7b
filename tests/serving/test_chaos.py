"""Clients that leave, clients that don't read, disks that are full: nobody else notices, and no answer changes a bit."""

import errno
import json
import random
import socket
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from support.http_server import events_of, http_server

import tarnn.serving.storage.disk as disk_module
from tarnn.serving.storage.index import Index
from tarnn.serving.store import StateStore

ENDLESS = {"model": "m", "ignore_eos": True, "temperature": 0.8, "seed": 1}
LONG = list(range(256)) * 3000  # tokens of a prompt that takes seconds to read
PATIENCE = 60  # seconds, on the busiest machine


@pytest.fixture
def server(served):
    with http_server({"m": served("linear")}, prefill_piece=64) as server:
        yield server


def asked(server, path, body, receive=None):
    """A socket with this request on its way. receive: bytes of the socket's buffer, small for a client that reads slowly."""
    place = urlsplit(server.url)
    client = socket.socket()
    if receive is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    client.connect((place.hostname, place.port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1", f"Host: {place.netloc}", f"Content-Length: {len(data)}", "", ""
    client.sendall("\r\n".join(head).encode() + data)
    return client


def until(condition):
    """Wait until it is so."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def idle(server):
    """Whether the engine has nothing to do, and nothing paused."""
    stats = server.engines["m"].stats
    return not (stats.running or stats.ready or stats.paused or stats.waiting)


def paused_for_good(server):
    """Whether the only text is paused, and not just for a moment in which its reader had no time."""
    before = server.engines["m"].stats
    time.sleep(0.3)
    return before == server.engines["m"].stats and before.paused == 1


WRITING = {
    "completions": ("/v1/completions", {"prompt": "x", "max_tokens": 10**9, "stream": True}),
    "many": ("/v1/completions", {"prompt": ["x", "y"], "n": 8, "max_tokens": 10**9, "stream": True}),
    "not streamed": ("/v1/completions", {"prompt": "x", "max_tokens": 200_000}),
    "logprobs": ("/v1/completions", {"prompt": "x", "max_tokens": 40_000, "logprobs": 5, "stop": ["\x00\x01\x02\x03"]}),
}


@pytest.mark.parametrize("kind", WRITING)
def test_who_leaves_while_a_text_is_written_leaves_no_row(server, kind):
    path, body = WRITING[kind]
    stats = server.engines["m"].stats
    with asked(server, path, ENDLESS | body) as client:
        until(lambda: server.engines["m"].stats.tokens_written > stats.tokens_written + 20)
        if body.get("stream"):
            assert client.recv(10)
    until(lambda: idle(server))


RESPONSES = {"streamed": {"stream": True}, "whole": {}}


@pytest.mark.parametrize("kind", RESPONSES)
def test_a_response_that_nobody_waits_for_is_not_held(server, kind):
    body = {"model": "m", "input": "x", "max_output_tokens": 200_000, "logit_bias": {"256": -100}} | RESPONSES[kind]
    with asked(server, "/v1/responses", body):
        until(lambda: server.engines["m"].stats.tokens_written > 20)
    until(lambda: idle(server))
    assert server.get("/v1/states").json()["data"] == []


READING = {
    "completions": ("/v1/completions", {"prompt": LONG, "stream": True}),
    "not streamed": ("/v1/completions", {"prompt": LONG}),
    "a state": ("/v1/states", {"tokens": LONG}),
    "a state, seen": ("/v1/states", {"tokens": LONG, "stream": True}),
    "a response": ("/v1/responses", {"input": "x" * len(LONG)}),
}


@pytest.mark.parametrize("kind", READING)
def test_who_leaves_while_a_prompt_is_read_is_not_read_for(server, kind):
    path, body = READING[kind]
    with asked(server, path, {"model": "m"} | body):
        until(lambda: server.engines["m"].stats.tokens_read > 0)
    until(lambda: idle(server))
    read = server.engines["m"].stats.tokens_read
    assert read < len(LONG) / 2
    assert server.get("/v1/states").json()["data"] == []
    server.post("/v1/completions", {"model": "m", "prompt": "next", "max_tokens": 1}).raise_for_status()
    assert server.engines["m"].stats.tokens_read - read <= 4  # those of this prompt


def test_a_slow_reader_holds_nobody_up_and_misses_nothing(server):
    server.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of the sockets that it accepts
    body = ENDLESS | {"prompt": "slow", "max_tokens": 2000, "logprobs": 3, "stream": True}
    with asked(server, "/v1/completions", body, receive=4096) as client:
        until(lambda: paused_for_good(server))
        others = [server.post("/v1/completions", ENDLESS | {"prompt": "quick", "max_tokens": 5}) for _ in range(3)]
        assert all(answer.status_code == 200 for answer in others)
        assert server.engines["m"].stats.paused == 1
        data = b""
        while b"data: [DONE]" not in data[-100:]:
            data += client.recv(2**16)
    chunks = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
    [whole] = server.post("/v1/completions", body | {"stream": False}).json()["choices"]
    assert text == whole["text"]
    assert tokens == whole["logprobs"]["tokens"]
    assert len(tokens) == 2000


def conversations(seed, count):
    """Requests whose prompts begin alike in many ways."""
    rng = random.Random(seed)
    beginning = "".join(rng.choices("abcdefgh ", k=1100))
    for number in range(count):
        prompt = beginning[: rng.choice((3, 70, 71, 1030, 1100))] + "".join(
            rng.choices("xyz", k=rng.choice((0, 1, 30)))
        )
        temperature = rng.choice((0, 0.7, 1.3))
        yield ENDLESS | {
            "prompt": prompt,
            "seed": number,
            "temperature": temperature,
            "max_tokens": rng.randrange(1, 12),
            "logprobs": 2,
            "n": rng.choice((1, 1, 3)),
        }


def choices(server, body):
    answer = server.post("/v1/completions", body).raise_for_status().json()
    return answer["choices"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("kind", ["linear", "rotary"])
def test_neither_hits_nor_company_change_a_bit(served, kind):
    """Cold and alone; with what others have read; and all at once: the same texts and the same logprobs."""
    requests = list(conversations(7, 40))
    with http_server({"m": served(kind)}, store=lambda model: None) as server:
        cold = [choices(server, body)[0] for body in requests]
    with http_server({"m": served(kind)}, max_rows=8) as server:
        warm = [choices(server, body) for body in requests]
        assert [answer for answer, _ in warm] == cold
        assert sum(cached > 0 for _, cached in warm) > 10
        with ThreadPoolExecutor(20) as threads:
            together = list(threads.map(lambda body: choices(server, body)[0], requests))
        assert together == cold


def test_a_full_disk_parks_in_memory_and_says_so(served, tmp_path, monkeypatch, caplog):
    def full(file, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    with http_server({"m": served("linear")}, store=lambda model: StateStore(model, folder=tmp_path)) as server:
        before = server.post("/v1/states", {"model": "m", "text": "on the disk"}).json()
        assert before["where"] == "disk"
        monkeypatch.setattr(disk_module, "write_all", full)
        held = server.post("/v1/states", {"model": "m", "text": "in memory"}).json()
        assert held["where"] == "memory"
        until(lambda: "No space left" in server.engines["m"].store.stats.trouble)
        assert server.get("/ready").json() == {"status": "ready", "trouble": "m: states can't be written to the disk."}
        assert [x.getMessage() for x in caplog.records if "No space left" in x.getMessage()]
        asked = {"model": "m", "input": "x", "max_output_tokens": 2}
        last = events_of(server.post("/v1/responses", asked | {"stream": True}))[-1]
        assert json.loads(last)["response"]["where"] == "memory"
        answer = server.post("/v1/responses", asked).json()
        assert answer["where"] == server.get(f"/v1/responses/{answer['id']}").json()["where"] == "memory"
        assert server.post("/v1/responses", asked | {"store": False}).json()["where"] is None
        more = {"model": "m", "input": "y", "previous_response_id": answer["id"], "max_output_tokens": 2}
        assert server.post("/v1/responses", more).status_code == 200
        for state in (before, held):
            assert server.get(f"/v1/states/{state['id']}").json()["tokens"] == state["tokens"]
        monkeypatch.undo()
        assert server.post("/v1/responses", asked).json()["where"] == "disk"
        assert server.get("/ready").json() == {"status": "ready"}


def test_an_index_that_cannot_be_written_is_told(served, tmp_path, monkeypatch):
    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    with http_server({"m": served("linear")}, store=lambda model: StateStore(model, folder=tmp_path)) as server:
        state = server.post("/v1/states", {"model": "m", "text": "on the disk"}).json()
        monkeypatch.setattr(Index, "add_hold", full)
        answer = server.post(f"/v1/states/{state['id']}/fork")
        assert (answer.status_code, "disk is full" in answer.json()["error"]["message"]) == (507, True)
        assert server.get(f"/v1/states/{state['id']}").json()["where"] == "disk"


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", {"input": "x"}), ("/v1/states", {"text": "x"})])
def test_a_full_queue_refuses_before_anything_is_read(served, path, body):
    with http_server({"m": served("linear")}, max_queue=1, prefill_piece=1) as server:
        with asked(server, "/v1/completions", {"model": "m", "prompt": LONG}):
            until(lambda: server.engines["m"].stats.waiting == 1)
            refused = server.post(path, body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
