"""An ASGI layer that makes a span of every POST, with what the engine recorded about it."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openai_api.run import Run
from service.engine.observer import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_FAILURES = frozenset({"error", "timeout"})  # reasons of a record; a client that leaves is none


class Traced:
    """Spans with the events `queue`, `prefill` and `decode`, at the earliest of a request's choices.

    The caller's W3C `traceparent` and `tracestate` are taken over, its decision on sampling too. Spans hold
    no text of prompts or replies. They are made when the answer is over, from times that are kept anyhow.
    Source:  W3C Trace Context; OpenTelemetry semantic conventions (HTTP server, GenAI)
    """

    def __init__(self, app: ASGIApp, provider: "TracerProvider", model_name: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = provider.get_tracer("photoninfer")
        self._extract = TraceContextTextMapPropagator().extract
        self._model_name = model_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        wall, monotonic = time.time_ns(), time.monotonic()
        try:
            await self._app(scope, receive, watched)
        finally:
            self._make_span(scope, status, lambda at: wall + int(1e9 * (at - monotonic)), monotonic)

    def _make_span(
        self, scope: Scope, status: int, to_wall: Callable[[float], int], started_at: float
    ) -> None:
        """`to_wall`: a time of time.monotonic -> unix nanoseconds."""
        from opentelemetry.trace import SpanKind

        headers = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (b"traceparent", b"tracestate")
        }
        route = scope.get("route")
        template = route.path if isinstance(route, Route) else None
        span = self._tracer.start_span(
            f"POST {template}" if template else "POST",
            context=self._extract(headers),
            kind=SpanKind.SERVER,
            start_time=to_wall(started_at),
        )
        span.set_attribute("http.request.method", "POST")
        if template:
            span.set_attribute("http.route", template)
        if status:
            span.set_attribute("http.response.status_code", status)
        span.set_attribute("photoninfer.request_id", scope.get("request_id", ""))
        run: Run | None = scope.get("run")
        records = [] if run is None else run.records
        if run is not None:
            self._describe(span, run, records, to_wall)
        _judge(span, status, records)
        span.end(to_wall(time.monotonic()))

    def _describe(
        self, span: "Span", run: Run, records: Sequence[RequestRecord], to_wall: Callable[[float], int]
    ) -> None:
        span.set_attribute("gen_ai.provider.name", "photoninfer")
        span.set_attribute("gen_ai.response.model", self._model_name)
        span.set_attribute("gen_ai.response.finish_reasons", [record.reason for record in records])
        span.set_attribute("gen_ai.usage.input_tokens", run.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", run.num_generated_tokens)
        span.set_attribute("photoninfer.cached_tokens", run.num_cached_tokens)
        phases = {
            "queue": [each.submitted_at for each in records],
            "prefill": [each.submitted_at + each.queue_seconds for each in records if each.was_planned],
            "decode": [
                each.submitted_at + each.first_token_seconds
                for each in records
                if each.first_token_seconds is not None
            ],
        }
        for name, times in phases.items():
            if times:
                span.add_event(name, timestamp=to_wall(min(times)))


def _judge(span: "Span", status: int, records: Sequence[RequestRecord]) -> None:
    """A failure of ours is one, whatever status its stream began with; a refusal of bad input is none."""
    from opentelemetry.trace import StatusCode

    failed = next((record.reason for record in records if record.reason in _FAILURES), None)
    if failed is not None or status >= 500:
        span.set_status(StatusCode.ERROR)
        span.set_attribute("error.type", failed or str(status))
