"""A server over small models, on a real socket, and the clients that it is asked by."""

import shutil

import httpx
import openai
import pytest
from support.live_server import running

from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app
from tarnn.serving.model import open_served


@pytest.fixture(scope="module")
def engine(served):
    with Engine(served("linear")) as engine:
        yield engine


@pytest.fixture(scope="session")
def chatty(served_folder, tmp_path_factory):
    """The linear model, with a chat template that writes contents alone."""
    folder = shutil.copytree(served_folder("linear"), tmp_path_factory.mktemp("chat") / "chatty")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return open_served(folder)


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
