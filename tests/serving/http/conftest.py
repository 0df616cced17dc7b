"""A server over small models, on a real socket, and the clients that it is asked by."""

import httpx
import openai
import pytest
from support.live_server import running

from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app


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
