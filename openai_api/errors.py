"""Exception -> status, headers and OpenAI error body: {"error": {"message", "type", "param", "code"}}."""

import logging
import math
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from service.errors import (
    DeadlineError,
    EngineDeadError,
    GenerationError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
)

log = logging.getLogger(__name__)

# what clients are told about; everything else is ours to know
TOLD = (
    RequestError,
    ModelNotFoundError,
    OverloadedError,
    EngineDeadError,
    GenerationError,
    HTTPException,
)
INVALID = "invalid_request_error"
UNAVAILABLE = "service_unavailable_error"
INTERNAL_MESSAGE = "The server failed on this request. The cause is in its log, under this request's id."


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every failure."""

    error: ErrorBody


class ApiError(msgspec.Struct, frozen=True):
    """An error as it goes over the wire: as a reply, or as the last event of a stream."""

    status: int
    body: ErrorBody
    headers: dict[str, str] = {}

    def encode(self) -> bytes:
        return msgspec.json.encode(ErrorReply(self.body))

    def response(self) -> Response:
        headers = dict(self.headers)
        if self.status == 504 or (self.status < 500 and self.status not in (408, 409, 429)):
            headers["x-should-retry"] = "false"  # the official SDKs obey it: the same request fails again
        return Response(self.encode(), self.status, headers, "application/json")


def api_error(error: Exception) -> ApiError:
    """What a client is told; of unexpected exceptions, nothing."""
    match error:
        case RequestError():
            return ApiError(400, ErrorBody(str(error), INVALID, error.field, error.code))
        case ModelNotFoundError():
            return ApiError(404, ErrorBody(str(error), INVALID, "model", "model_not_found"))
        case OverloadedError():
            body = ErrorBody(str(error), UNAVAILABLE, None, "server_is_overloaded")
            return ApiError(503, body, {"Retry-After": retry_after(error.retry_after_seconds)})
        case EngineDeadError():
            return ApiError(503, ErrorBody(str(error), UNAVAILABLE, None, "engine_dead"))
        case DeadlineError():
            return ApiError(504, ErrorBody(str(error), "server_error", None, "deadline_exceeded"))
        case GenerationError():
            return ApiError(500, ErrorBody(str(error), "server_error", None, "generation_failed"))
        case HTTPException():
            return _http_error(error)
    return ApiError(500, ErrorBody(INTERNAL_MESSAGE, "server_error", None, "internal_error"))


def retry_after(seconds: float) -> str:
    """The header's value: whole seconds, at least one, and a minute where nothing is known."""
    return str(max(1, math.ceil(seconds)) if math.isfinite(seconds) else 60)


def log_unexpected(error: Exception) -> None:
    """Keep what `api_error` hides."""
    if not isinstance(error, TOLD):
        log.error("unexpected exception while serving a request", exc_info=error)


_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def _http_error(error: HTTPException) -> ApiError:
    kind = INVALID if error.status_code < 500 else "server_error"
    message = error.detail or HTTPStatus(error.status_code).phrase
    code = _HTTP_CODES.get(error.status_code)
    return ApiError(error.status_code, ErrorBody(message, kind, None, code), dict(error.headers or {}))


async def answer_error(_http: Request, error: Exception) -> Response:
    """Starlette exception handler."""
    return api_error(error).response()
