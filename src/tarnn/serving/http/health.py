"""GET /health: the process lives. GET /ready: it takes requests."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn.serving.http.errors import ApiError, unavailable


async def health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    state = request.app.state
    if state.draining:
        raise unavailable()
    if not all(engine.ready for engine in state.engines.values()):
        raise ApiError(503, "An engine has ended; the log says why. Start the server again.", code="not_ready")
    return JSONResponse({"status": "ready"})


routes = [Route("/health", health), Route("/ready", ready)]
