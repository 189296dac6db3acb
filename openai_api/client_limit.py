"""No more than so many open requests of one API key, so that no client takes the whole server."""

from dataclasses import dataclass
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from openai_api.api import Api
from openai_api.errors import ApiError, ErrorBody, retry_after
from service.api_keys import ApiKey

_NEWEST_SHARE = 0.2  # of the last answer in the mean of how long answers take


@dataclass(slots=True)
class _Client:
    num_open: int = 0
    mean_seconds: float = 0.0  # of its answers, the newest counting most

    def answered(self, seconds: float) -> None:
        share = _NEWEST_SHARE if self.mean_seconds else 1.0
        self.mean_seconds += share * (seconds - self.mean_seconds)


class ClientLimit:
    """ASGI layer behind the key check, which leaves the key in scope["api_key"].

    A POST below /v1 is open from its first byte to its answer's last. One too many gets 429 at once, and
    Retry-After says when one of the others should have ended: their mean duration by how many there are.
    """

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._max_open = api.access.max_requests_per_key
        self._metrics = api.metrics
        self._clients: dict[ApiKey, _Client] = {}  # bounded, since only known keys come here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope.get("api_key") if self._max_open else None
        if key is None or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        client = self._clients.setdefault(key, _Client())
        if client.num_open >= self._max_open:
            self._metrics.refused("client_limit")
            await self._refusal(client).response()(scope, receive, send)
            return
        client.num_open += 1
        started = monotonic()
        try:
            await self._app(scope, receive, send)
        finally:
            client.num_open -= 1
            client.answered(monotonic() - started)

    def _refusal(self, client: _Client) -> ApiError:
        message = (
            f"This API key has {client.num_open} requests open, and may have {self._max_open}. "
            "Wait until one has ended."
        )
        headers = {"Retry-After": retry_after(client.mean_seconds / self._max_open)}
        return ApiError(429, ErrorBody(message, "rate_limit_error", None, "slow_down"), headers)
