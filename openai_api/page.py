"""The chat page at `/`, the API at `/docs`, and their files: equal for everybody, without an API key."""

from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FOLDER = Path(__file__).parent / "static"
PREFIX = "/static/"
# Our own files alone, and no script or style inside of markup: what a model or a user writes can't run.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",  # ask whether it has changed: an answer without content, mostly
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[BaseRoute]:
    """`/`, `/docs` and `/static/`."""

    async def index(_http: Request) -> Response:
        return FileResponse(FOLDER / "index.html", headers=_HEADERS)

    async def docs(_http: Request) -> Response:
        return FileResponse(FOLDER / "docs.html", headers=_HEADERS)

    return [
        Route("/", index),
        Route("/docs", docs),
        Mount(PREFIX.rstrip("/"), _WithHeaders(StaticFiles(directory=FOLDER))),
    ]


class _WithHeaders:
    """Adds the headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)
