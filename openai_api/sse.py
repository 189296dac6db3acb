"""Server-sent events: a response that streams `data:` events.

Written here rather than taken from sse-starlette: there the status goes out before the first event, so that
a failure while waiting could not have a status of its own; an event costs the loop that all streams share
five times as much (`python -m benchmarks.sse`: 7.5 against 1.4 microseconds); and streams end as soon as
uvicorn is told to stop, by a patch of uvicorn, where this server drains.
Only `data:` fields and comments are sent: an `id:` or `retry:` field crashes the official Python SDK.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from openai_api.client import unless_gone
from openai_api.errors import ApiError, api_error, log_unexpected

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

_encoder = msgspec.json.Encoder()


def event(value: Any) -> bytes:
    """One event. JSON as msgspec writes it holds no line break, so that it is one line of data."""
    return b"data: %b\n\n" % _encoder.encode(value)


class EventStream:
    """ASGI response of events that `events` yields, encoded, one or more at a time.

    The status line goes out with the first event, or with the first ping while waiting for it: what fails
    until then is answered with its own status. Later failures become one last event,
    `data: {"error": {...}}`, without [DONE]. However it ends, `run` is left, which cancels its rest.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        run: AbstractAsyncContextManager[object],
        *,
        headers: dict[str, str],
        ping_seconds: float,
    ) -> None:
        self._events = events
        self._run = run
        self._headers = headers
        self._ping_seconds = ping_seconds
        self._is_started = False
        self._sending = asyncio.Lock()  # pings come from a task of their own

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._run:
            with suppress(ClientDisconnect):  # nobody is left to answer
                await unless_gone(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = await self._send_events(send)
        if failure is None:
            await self._send(send, b"", is_last=True)
        elif self._is_started:
            await self._send(send, event({"error": failure.body}), is_last=True)
        else:
            await failure.response()(scope, receive, send)

    async def _send_events(self, send: Send) -> ApiError | None:
        """Send events and pings until the events end; return the error that ended them early."""
        pinging = asyncio.create_task(self._ping(send)) if self._ping_seconds > 0 else None
        try:
            async with aclosing(self._events):
                async for events in self._events:
                    await self._send(send, events)
        except Exception as error:  # like middleware: no failure may end a stream without a word
            log_unexpected(error)
            return api_error(error)
        finally:
            if pinging is not None:
                pinging.cancel()
        return None

    async def _send(self, send: Send, events: bytes, *, is_last: bool = False) -> None:
        async with self._sending:
            if not self._is_started:
                await send({"type": "http.response.start", "status": 200, "headers": self._raw_headers()})
                self._is_started = True
            await send({"type": "http.response.body", "body": events, "more_body": not is_last})

    async def _ping(self, send: Send) -> None:
        """A comment now and then, so that nothing between us and the client takes the stream for dead."""
        while True:
            await asyncio.sleep(self._ping_seconds)
            await self._send(send, PING)

    def _raw_headers(self) -> list[tuple[bytes, bytes]]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            "x-accel-buffering": "no",  # nginx would hold events back
            **self._headers,
        }
        return [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
        ]
