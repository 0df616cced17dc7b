"""GET /health: the process lives. GET /ready: it takes requests."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tarnn.serving.http.errors import ApiError, unavailable

TROUBLE = "states can't be written to the disk."  # why is for the log: anybody may ask here


async def health(_: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    state = request.app.state
    if state.draining:
        raise unavailable()
    if not all(engine.ready for engine in state.engines.values()):
        raise ApiError(503, "An engine has ended; the log says why. Start the server again.", code="not_ready")
    stores = {name: engine.store for name, engine in state.engines.items() if engine.store is not None}
    trouble = [f"{name}: {TROUBLE}" for name, store in stores.items() if store.stats.trouble]
    return JSONResponse({"status": "ready"} | ({"trouble": " ".join(trouble)} if trouble else {}))


routes = [Route("/health", health), Route("/ready", ready)]
