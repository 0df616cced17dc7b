"""The server as an ASGI application: its routes, and the state that they share."""

import asyncio
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from tarnn.serving.engine import Engine
from tarnn.serving.http import completions, models, openapi, operators, page, responses, states
from tarnn.serving.http.errors import HANDLERS
from tarnn.serving.http.middleware import AccessMiddleware
from tarnn.serving.http.reader import AsyncBridge
from tarnn.serving.http.settings import ServerSettings

GROUPS = (completions, responses, states, models, operators, openapi, page)


def create_app(engines: Mapping[str, Engine], settings: ServerSettings | None = None) -> Starlette:
    """Return the application over running engines, by the names of their models. One event loop uses it.

    Its state: engines, settings, latencies (histograms), draining (no more requests are taken), inside (the number of
    running requests), bodies (the time limits of those that are arriving), started.
    """
    settings = settings or ServerSettings()
    middleware = [Middleware(AccessMiddleware, settings=settings)]
    if settings.cors:
        allowed: dict[str, Any] = {"allow_origins": settings.cors, "allow_methods": ["*"], "allow_headers": ["*"]}
        middleware.insert(0, Middleware(CORSMiddleware, **allowed, expose_headers=["x-request-id", "x-tarnn-state"]))
    app = Starlette(
        routes=[route for group in GROUPS for route in group.routes], middleware=middleware, exception_handlers=HANDLERS
    )
    app.state.engines, app.state.settings = dict(engines), settings
    app.state.latencies, app.state.started = operators.Latencies(), int(time.time())
    app.state.draining, app.state.inside, app.state.bodies = False, 0, set()
    app.state.scoring = asyncio.Semaphore(1)
    app.state.bridge = cache(AsyncBridge)  # made on the loop, when the first request comes
    app.state.document = cache(lambda: openapi.document(app.routes, bool(settings.keys)))
    return app
