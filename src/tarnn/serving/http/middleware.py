"""Middleware of every request: its id, the names that the server answers to, keys, and the refusal while it drains.

Plain ASGI, so that a route notices its client's disconnect.
"""

import hashlib
import hmac
from collections.abc import Awaitable
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tarnn.serving.http import page
from tarnn.serving.http.errors import ApiError, unavailable
from tarnn.serving.http.settings import ServerSettings, tenant_of

OPEN = {"/health", "/ready", "/version", *page.PATHS}  # without a key: they reveal nothing of any client
LONGEST_ID = 128


class AccessMiddleware:
    """app: the next application. The state of the outermost one counts the running requests."""

    def __init__(self, app: ASGIApp, settings: ServerSettings):
        self.app, self.settings = app, settings
        self._keys = [(hashlib.sha256(key.encode()).digest(), tenant_of(key)) for key in settings.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        name = request_id(headers)

        def named(message: Message) -> Awaitable[None]:
            """No coroutine of its own: events of a stream pass here."""
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = name
            return send(message)

        state = scope["app"].state
        state.inside += 1
        try:
            self._check_names(scope, headers)
            scope["tarnn.tenant"], scope["tarnn.operator"] = self._tenant(scope, headers)
            if state.draining and scope["method"] == "POST":
                raise unavailable()
            await self.app(scope, receive, named)
        except ApiError as error:
            await error.response()(scope, receive, named)
        finally:
            state.inside -= 1

    def _check_names(self, scope: Scope, headers: Headers) -> None:
        """Reject cross-origin requests and unknown Host headers."""
        host = headers.get("host", "")
        if self.settings.hosts is not None and without_port(host) not in self.settings.hosts:
            raise ApiError(
                421,
                f"Without keys this server is for its machine alone and does not answer to the name {host[:100]!r}.",
                code="unknown_host",
            )
        origin = headers.get("origin")
        if origin is None or origin in self.settings.cors or "*" in self.settings.cors:
            return
        if urlsplit(origin).netloc != host:
            raise ApiError(
                403, f"Pages of {origin[:100]!r} may not use this server; --cors allows it.", code="foreign_origin"
            )

    def _tenant(self, scope: Scope, headers: Headers) -> tuple[str, bool]:
        """Return the tenant of a key, and whether it is the operator's. All keys are compared, each in constant time."""
        if not self._keys:
            return "", True
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known, _ in self._keys]
        if scheme.lower() == "bearer" and any(matches):
            at = matches.index(True)
            return self._keys[at][1], at == 0
        if scope["path"] in OPEN:
            return "", False
        why = "This server does not know this key" if key else "This server needs a key"
        raise ApiError(
            401,
            f"{why}: send one of its keys in the header Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def request_id(headers: Headers) -> str:
    """Return the client's own id if it is a word, else a new one."""
    name = headers.get("x-request-id", "")
    valid = 0 < len(name) <= LONGEST_ID and name.isascii() and name.isprintable()
    return name if valid else f"req-{uuid4().hex}"


def without_port(host: str) -> str:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name.lower().strip("[]")
