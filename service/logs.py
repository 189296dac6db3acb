"""Logging set-up: lines for people, or one JSON object a line."""

import logging
import time
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.settings import Settings

access_log = logging.getLogger("photoninfer.access")

_QUIET = frozenset({"/health", "/livez", "/readyz", "/startupz", "/metrics"})  # asked every few seconds


def set_up_logs(settings: Settings) -> None:
    """Send all logs to standard error in the chosen form and from the chosen level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter()
        if settings.log_format == "json"
        else logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for noisy in ("uvicorn.error", "httpx", "filelock"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))


class JsonFormatter(logging.Formatter):
    """One object a line: time (unix seconds), level, logger, message, and `extra["fields"]`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry).decode()


class AccessLog:
    """Logs a line a request when its answer is over: method, path, status, milliseconds. Never its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _QUIET:
            await self._app(scope, receive, send)
            return
        status, request_id, started_at = 499, "", time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message.get("headers", ()))
                request_id = headers.get(b"x-request-id", b"").decode("latin-1")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            milliseconds = round(1000 * (time.monotonic() - started_at), 1)
            fields = {
                "method": scope["method"],
                "path": scope["path"][:200],
                "status": status,
                "milliseconds": milliseconds,
                "request_id": request_id,
            }
            shown = ascii(fields["path"])[1:-1]  # control characters would forge lines
            access_log.info(
                "%s %s %d %.1f ms %s",
                scope["method"],
                shown,
                status,
                milliseconds,
                request_id,
                extra={"fields": fields},
            )
