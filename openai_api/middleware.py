"""ASGI layers around the routes: request id and metrics, origins, paths, keys, their limits, body size; and
errors in OpenAI's shape.
"""

import re
import uuid
from collections.abc import Iterable
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openai_api.api import Api
from openai_api.auth import KeyCheck, allow_origins
from openai_api.client_limit import ClientLimit
from openai_api.errors import TOLD, answer_error, api_error, log_unexpected

BASE = "/v1"
CLIENT_CLOSED = 499  # nginx's number for a client that left; nobody receives it, metrics count it

_SANE_ID = re.compile(rb"[A-Za-z0-9._:+/=-]{1,128}")
_SLASHES = re.compile("/{2,}")


def wrap(app: Starlette, api: Api) -> ASGIApp:
    """Put all layers around an app made of `make_routes`."""
    app.router.redirect_slashes = False  # a redirect would lose a POST's body; NormalPath needs none
    for told in TOLD:
        app.add_exception_handler(told, answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, answer_error)
    limited = ClientLimit(BodyLimit(app, api.limits.max_body_bytes), api)
    checked = KeyCheck(limited, api.access)
    return Outermost(allow_origins(NormalPath(checked), api.access.cors_origins), api)


class Outermost:
    """Gives every request an id, counts its answer, and answers 500 where all else failed.

    A sane X-Request-Id is taken over and returned; scope["request_id"] holds it for logs. Nothing inside is
    keyed by it, since clients may send one twice.
    """

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._metrics = api.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["request_id"] = request_id.decode()
        status = 0

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception as error:  # the last resort: log it, tell nothing, stay alive
            log_unexpected(
                error
            )  # it was sent already if it came out of a route: Starlette raises it again
            if not status:
                await api_error(error).response()(scope, receive, send_counted)
        finally:
            if status:
                self._metrics.http_answered(_template(scope), scope["method"], status)


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return bytes(value)
    return f"req-{uuid.uuid4().hex}".encode()


def _template(scope: Scope) -> str:
    """The route's template, so that paths as sent never become labels."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "other"


class NormalPath:
    """Makes `//v1//models/` mean `/v1/models`, without a redirect."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if "//" in path or path.endswith("/"):
                scope["path"] = _SLASHES.sub("/", path).rstrip("/") or "/"
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above a limit with 413, whether their length is announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                await api_error(self._too_large()).response()(scope, receive, send)
                return
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _too_large(self) -> HTTPException:
        # the rest of the body will not be read, so that the connection can't be used again
        return HTTPException(
            413, f"The body is larger than {self._max_bytes} bytes.", {"Connection": "close"}
        )


async def _answer_nobody(_http: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def _answer_http_exception(http: Request, error: Exception) -> Response:
    """Starlette's 404 and 405 say only the phrase; these say what to do."""
    if not isinstance(error, HTTPException):
        return api_error(error).response()
    method, path = http.method, http.url.path[:200]
    if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
        near = _nearest(path, http.app.routes)
        hint = f" Did you mean {near}?" if near else ""
        text = f"There is no {method} {path} here. The API's base URL ends in {BASE}.{hint}"
        error = HTTPException(404, text)
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        text = f"{path} does not take {method}, but {allowed}."
        error = HTTPException(405, text, error.headers)
    return api_error(error).response()


def _nearest(path: str, routes: Iterable[BaseRoute]) -> str | None:
    """The route of the API that `path` means when its /v1 is missing, doubled or behind something else."""
    for route in routes:
        known = route.path if isinstance(route, Route) else ""
        if known and path == BASE + known:
            return known
        if known.startswith(BASE) and "{" not in known and path.endswith(known.removeprefix(BASE)):
            return known
    return None
