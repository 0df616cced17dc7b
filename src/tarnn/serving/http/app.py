"""The server as an ASGI application: its routes, and what they share."""

import asyncio
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from tarnn.serving.engine import Engine
from tarnn.serving.http import completions, models, openapi, operators, page, responses, states
from tarnn.serving.http.door import Door
from tarnn.serving.http.errors import ApiError, api_error, http_error, unexpected
from tarnn.serving.http.gather import client_gone
from tarnn.serving.http.reader import AsyncBridge, ClientGone
from tarnn.serving.http.settings import ServerSettings

GROUPS = (completions, responses, states, models, operators, openapi, page)


def create_app(engines: Mapping[str, Engine], settings: ServerSettings | None = None) -> Starlette:
    """The application over engines that run, by the names of their models. One event loop uses it.

    Its state: engines, settings, latencies (histograms), draining (no more requests are taken), inside (requests that
    are answered now), bodies (the time limits of those that are on their way), started.
    """
    settings = settings or ServerSettings()
    middleware = [Middleware(Door, settings=settings)]
    if settings.cors:
        allowed: dict[str, Any] = {"allow_origins": settings.cors, "allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, **allowed, expose_headers=["x-request-id", "x-tarnn-state"]))
    app = Starlette(
        routes=[route for group in GROUPS for route in group.routes],
        middleware=middleware,
        exception_handlers={
            ApiError: api_error,
            HTTPException: http_error,
            ClientGone: client_gone,
            Exception: unexpected,
        },
    )
    app.state.engines, app.state.settings = dict(engines), settings
    app.state.latencies, app.state.started = operators.Latencies(), int(time.time())
    app.state.draining, app.state.inside, app.state.bodies = False, 0, set()
    app.state.scoring = asyncio.Semaphore(1)
    app.state.bridge = cache(AsyncBridge)  # made on the loop, when the first request comes
    app.state.document = cache(lambda: openapi.document(app.routes, bool(settings.keys)))
    return app
