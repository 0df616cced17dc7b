"""The server around the application: whom it believes who asks."""

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tarnn.serving.http.asking import client
from tarnn.serving.http.server import Server


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
