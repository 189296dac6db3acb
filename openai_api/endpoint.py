"""A row of the HTTP surface: what routes.py serves, and what openapi.py tells about it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from openai_api.errors import ErrorReply
from openai_api.sse import EventStream

Handler = Callable[[Request], Awaitable[Response | EventStream]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A path, and what it does."""

    methods: tuple[str, ...]
    path: str  # as Starlette writes it
    handler: Handler
    summary: str
    body: type | None = None  # of the request, as JSON
    reply: Any = None  # type of the answer with status 200, as JSON; None: `media_type` tells all
    chunk: type | None = None  # type of a stream's events, where the request may ask for one
    media_type: str = "application/json"
    errors: tuple[int, ...] = ()  # statuses besides 200 and those that any request may meet
    failure: Any = ErrorReply  # type of their bodies

    @property
    def route(self) -> Route:
        return Route(self.path, self.handler, methods=list(self.methods))
