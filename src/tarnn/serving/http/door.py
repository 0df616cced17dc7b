"""What every request passes before its route: an id, the names we answer to, a key, and whether we still take requests.

Plain ASGI: nothing stands between a route and its client's leaving.
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
from tarnn.serving.http.keys import tenant_of
from tarnn.serving.http.settings import ServerSettings

OPEN = {"/health", "/ready", "/version", *page.PATHS}  # without a key: they tell nothing of anybody
LONGEST_ID = 128


class Door:
    """app: what is behind it. The state of the application counts the requests that are inside."""

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
        """Against pages of others: a browser tells where a page is from, and by which name it found us."""
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
        """Whose key it is, and whether it is the operator's. All keys are compared, each in constant time."""
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
    """The client's own, where it is a word; else a new one."""
    given = headers.get("x-request-id", "")
    sound = 0 < len(given) <= LONGEST_ID and given.isascii() and given.isprintable()
    return given if sound else f"req-{uuid4().hex}"


def without_port(host: str) -> str:
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return name.lower().strip("[]")
