"""Errors as clients of OpenAI's API know them: a status, and one object that describes the error."""

import json
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tarnn.removed import message

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A request is refused. message: a sentence; param: the wrong parameter; code: a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, object]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def text(self) -> str:
        return json.dumps(self.content)

    def response(self) -> Response:
        return JSONResponse(self.content, self.status, self.headers)


class ClientGone(Exception):
    """The client closed its connection: nobody reads the answer."""


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return a 400 error."""
    return ApiError(400, message, param=param, code=code)


def overloaded(retry_after: float) -> ApiError:
    """Return a 429 error: the queue is full. retry_after: seconds after which there may be room."""
    seconds = max(1, round(retry_after))
    return ApiError(
        429,
        f"The server has as many requests as it takes. Try again in {seconds} s.",
        code="overloaded",
        headers={"Retry-After": str(seconds)},
    )


def unavailable() -> ApiError:
    """Return a 503 error: no more requests are taken."""
    return ApiError(
        503, "The server is stopping and takes no more requests.", code="unavailable", headers={"Retry-After": "5"}
    )


def failed(reason: str = "") -> ApiError:
    """Return a 500 error."""
    return ApiError(500, reason or "The server failed; its log says why.", code="internal_error")


async def api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def http_error(request: Request, error: Exception) -> Response:
    """Answer for Starlette's router: there is no such path, or it does not take this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    nothing = f"There is nothing at {path}."
    sentences = {404: message(f"{request.method} {path}") or nothing, 405: f"{request.method} is not possible here."}
    headers = dict(error.headers or {})
    return ApiError(error.status_code, sentences.get(error.status_code, error.detail), headers=headers).response()


async def unexpected(_: Request, __: Exception) -> Response:
    """Answer after a bug, whose traceback only the log has. uvicorn closes the connection then."""
    response = failed().response()
    response.headers["connection"] = "close"
    return response


async def client_gone(_: Request, __: Exception) -> Response:
    """Answer a client that is gone: for a log only."""
    return Response(status_code=499)


HANDLERS = {ApiError: api_error, HTTPException: http_error, ClientGone: client_gone, Exception: unexpected}
