"""Who may ask: API keys as an ASGI layer, and web pages of other origins (CORS).

Once there are keys every route needs one, unknown ones too, so that nothing can be learnt without. Open are
the probes, which nobody gives a key, the chat page, which asks for one, and OPTIONS, which browsers send
without one.
"""

from collections.abc import Sequence

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from openai_api.errors import INVALID, ApiError, ErrorBody
from openai_api.fields import HEADER
from openai_api.page import PREFIX
from service.api_keys import ApiKey, find_key

OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health", "/", "/docs"})
METRICS_PATH = "/metrics"
_EXPOSED = ("X-Request-Id", HEADER, "Retry-After", "X-Should-Retry")  # headers that scripts may read


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Who may ask for what."""

    keys: tuple[ApiKey, ...] = ()  # none: no request needs one
    metrics_key: bool = False  # /metrics needs a key, too
    max_requests_per_key: int = 0  # open at once; 0: any number
    cors_origins: tuple[str, ...] = ()  # "*" for all


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let scripts of web pages from `origins` ask; without any, browsers refuse them the answers."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # SDKs send a dozen of their own
        expose_headers=list(_EXPOSED),
    )


def needs_key(method: str, path: str, access: Access) -> bool:
    """Whether a request needs a key, once there are any."""
    if method == "OPTIONS" or path in OPEN_PATHS or path.startswith(PREFIX):
        return False
    return access.metrics_key or path != METRICS_PATH


class KeyCheck:
    """Refuses requests without a good key: 401, or 403 if it is one for something else.

    Leaves the key in scope["api_key"].
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if self._access.keys and scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if not needs_key(scope["method"], scope["path"], self._access):
            return None
        given = _bearer_token(scope)
        if given is None:
            return _unknown("An API key is needed; send it in the header Authorization: Bearer KEY.")
        key = find_key(self._access.keys, given)
        if key is None:
            return _unknown("The API key is not one of this server's.")
        if key.scope == "metrics" and scope["path"] != METRICS_PATH:
            text = f"This API key is for {METRICS_PATH} only."
            return ApiError(403, ErrorBody(text, INVALID, None, "insufficient_permissions"))
        scope["api_key"] = key
        return None


def _unknown(message: str) -> ApiError:
    headers = {"WWW-Authenticate": 'Bearer realm="PhotonInfer"'}
    return ApiError(401, ErrorBody(message, INVALID, None, "invalid_api_key"), headers)


def _bearer_token(scope: Scope) -> bytes | None:
    """The key of a request that has exactly one."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) != 1:
        return None
    scheme, _, token = given[0].partition(b" ")
    return bytes(token.strip()) or None if scheme.lower() == b"bearer" else None
