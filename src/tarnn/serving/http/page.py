"""The page at `/`: a chat, or a text that goes on, in plain HTML, CSS and JavaScript from this server alone."""

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER = Path(__file__).with_name("page")
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# scripts, styles and requests of this server only, and no other page may frame this one
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",  # after an update, scripts and page belong together
}


def file_route(path: str, name: str) -> Route:
    """Return the route of one file, which is read when the server starts."""
    file = FOLDER / name
    text = file.read_bytes()

    async def serve(_: Request) -> Response:
        return Response(text, headers=HEADERS, media_type=KINDS[file.suffix])

    return Route(path, serve)


PARTS = ("look.css", "main.js", "server.js")
PATHS = {"/": "index.html", **{f"/page/{name}": name for name in PARTS}}
routes = [file_route(path, name) for path, name in PATHS.items()]
