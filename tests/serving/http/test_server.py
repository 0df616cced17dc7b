"""The server around the application: whom it believes who asks, and how it ends."""

import asyncio
import gc
import json
import signal
import socket
import threading
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tarnn.serving.engine import Engine
from tarnn.serving.http import server as server_module
from tarnn.serving.http.app import create_app
from tarnn.serving.http.server import Server, bind
from tarnn.serving.http.to_engine import client


@pytest.mark.parametrize(
    ("trusted", "seen"),
    [((), "127.0.0.1"), (("127.0.0.1",), "6.6.6.6"), (("10.0.0.0/8",), "127.0.0.1"), (("127.0.0.0/8",), "6.6.6.6")],
)
def test_whose_word_counts_on_who_asks(trusted, seen):
    """A client's own header is no other client: its requests wait in one line."""

    async def who(request):
        return PlainTextResponse(client(request))

    server = Server(Starlette(routes=[Route("/", who)]), print, print, ready="", trusted_proxies=trusted)
    server.config.load()

    async def answered():
        transport = httpx.ASGITransport(server.config.loaded_app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as asking:
            return await asking.get("/", headers={"X-Forwarded-For": "6.6.6.6"})

    assert asyncio.run(answered()).text == seen


class Running:
    """A server with this engine, in a thread."""

    def __init__(self, engine):
        self.engine, self.app = engine, create_app({"linear": engine})
        self.bound, started = bind("127.0.0.1", 0), threading.Event()
        self.bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of the sockets that it accepts

        def report(text):
            if text == "ready":
                self.loop = asyncio.get_running_loop()
                started.set()

        self.server = Server(self.app, report, engine.close, ready="ready")
        self.thread = threading.Thread(target=lambda: self.server.run(sockets=[self.bound]), daemon=True)
        self.address = self.bound.getsockname()
        self.thread.start()
        assert started.wait(60)

    def terminate(self):
        self.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)

    def connect(self, data):
        asking = socket.socket()
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        asking.settimeout(60)
        asking.connect(self.address)
        asking.sendall(data)
        return asking

    def until(self, condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)


@pytest.fixture
def live(served):
    with Engine(served("linear")) as engine:
        running = Running(engine)
        yield running
        if running.thread.is_alive():
            running.terminate()
            running.thread.join(60)


def post(body, length=None, path="/v1/completions"):
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data) if length is None else length}\r\n\r\n"
    )
    return head.encode() + data


STREAM = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "logprobs": 5, "stream": True}


def test_who_reads_nothing_holds_no_end_up(live, monkeypatch):
    """Neither where the text is paused, nor where the last of it is unread; who reads slowly has all of it."""
    monkeypatch.setattr(server_module, "STILL", 3.0)
    with (
        live.connect(post(STREAM | {"max_tokens": 10**9})),
        live.connect(post(STREAM | {"max_tokens": 60})),
        live.connect(post(STREAM)) as slow,
    ):
        live.until(lambda: live.engine.stats.paused == 2)
        live.terminate()
        data = b""
        while piece := slow.recv(2**14):
            data += piece
            time.sleep(0.001)
        live.thread.join(60)
        assert not live.thread.is_alive()
    assert b"data: [DONE]" in data[-100:]


def test_a_half_sent_body_holds_no_end_up(live):
    with live.connect(post({"prompt": "x"}, length=10_000)) as half:
        live.until(lambda: live.app.state.bodies)
        live.terminate()
        assert half.recv(2**14).startswith(b"HTTP/1.1 503")
        live.thread.join(20)
        assert not live.thread.is_alive()


def test_collecting_garbage_looks_at_no_model(live):
    """What is there when a server begins stays: to look at all of it takes longer than the loop may be held up."""
    assert gc.get_freeze_count() > 1000
    live.terminate()
    live.thread.join(60)
    assert not gc.get_freeze_count()


@pytest.mark.parametrize("stream", [True, False])
def test_who_sends_no_more_is_answered(live, stream):
    """A client that has closed its own side, as nc does, still reads."""
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": stream}
    with live.connect(post(body)) as half:
        half.shutdown(socket.SHUT_WR)
        data = b""
        while piece := half.recv(2**16):
            data += piece
    assert b"HTTP/1.1 200 OK" in data
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")
