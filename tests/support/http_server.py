"""A server in a thread of the test's process, on a port of its own; and calls of its application without one."""

import asyncio
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import uvicorn

from tarnn.serving.engine import Engine
from tarnn.serving.http.app import create_app
from tarnn.serving.http.server import BoundedProtocol
from tarnn.serving.store import StateStore


@dataclass
class Server:
    """url: without a slash at its end. engines: by the names of their models. client: for requests without a key.

    listening: the server's socket.
    """

    url: str
    engines: dict[str, Any]
    client: httpx.Client
    listening: Any = None

    def post(self, path, json=None, **options):
        return self.client.post(path, json=json, **options)

    def get(self, path, **options):
        return self.client.get(path, **options)


@contextmanager
def http_server(models, settings=None, *, store=StateStore, **options):
    """Serve these models, by name. store(model): makes the store of each, or None; options: of the engines."""
    with ExitStack() as stack:
        engines = {}
        for name, model in models.items():
            kept = store(model)
            engines[name] = stack.enter_context(Engine(replace(model, name=name), store=kept, **options))
            if kept is not None:
                stack.callback(kept.close)
        app = create_app(engines, settings)
        config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", http=BoundedProtocol)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(setattr, server, "should_exit", True)
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        [listening] = server.servers[0].sockets
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        client = stack.enter_context(httpx.Client(base_url=url, timeout=60))
        yield Server(url, engines, client, listening)


def call(app, method, path, **options):
    """Return the answer of an application, without a socket. options: as of httpx."""

    async def answered():
        transport = httpx.ASGITransport(app, raise_app_exceptions=options.pop("raises", True))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000", timeout=60) as client:
            return await client.request(method, path, **options)

    return asyncio.run(answered())


def events_of(response):
    """Return the data of server-sent events, and whether they end as they should."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return lines[:-1]
