"""A server over small models, on a real socket, and the clients that it is asked by."""

import threading
import time
from contextlib import contextmanager

import httpx
import openai
import pytest
import uvicorn

from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app


@contextmanager
def running(app):
    """The app on a port of its own; its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def engine(served):
    with Engine(served("linear")) as engine:
        yield engine


@pytest.fixture(scope="module")
def address(engine):
    """Of a server with the linear model, called "linear"."""
    with running(create_app({"linear": engine})) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def http(address):
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client
