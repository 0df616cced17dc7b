"""GET /health: the process lives. GET /ready: it takes requests."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn.serving.http.errors import ApiError


def draining() -> ApiError:
    """503: no more requests, those that run are finished."""
    return ApiError(
        503, "The server is stopping and takes no more requests.", code="draining", headers={"Retry-After": "5"}
    )


async def health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    if request.app.state.draining:
        raise draining()
    return JSONResponse({"status": "ready"})


routes = [Route("/health", health), Route("/ready", ready)]
