"""Spans: whose they are, what stands in them, and what never does."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from openai_api.tracing import Traced
from tests.openai_api.scripted import MODEL, make_app
from tests.openai_api.whole_server import Whole, chat, whole_server

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT_PATH = "/v1/chat/completions"


class Traces:
    """A server whose spans are kept."""

    def __init__(self, server: Whole, ratio: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)))
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._app = Traced(make_app(server.api), provider, MODEL)

    async def post(self, body: Mapping[str, Any], path: str = CHAT_PATH, **headers: str) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body, headers=headers)

    async def get(self, path: str) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


def events(span: ReadableSpan) -> dict[str, int]:
    return {event.name: event.timestamp for event in span.events}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_is_one_span_with_its_phases(is_stream: bool, n: int) -> None:
    async with whole_server() as server:
        traces = Traces(server)
        reply = await traces.post(
            chat("secret", n=n, ignore_eos=True, stream=is_stream), **{"X-Request-Id": "mine"}
        )
        (span,) = traces.spans

    assert reply.status_code == 200
    assert span.name == "POST /v1/chat/completions"
    assert span.kind is SpanKind.SERVER
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert attributes["http.route"] == CHAT_PATH
    assert attributes["http.response.status_code"] == 200
    assert attributes["photoninfer.request_id"] == "mine"
    assert attributes["gen_ai.response.model"] == MODEL
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) * n
    assert attributes["gen_ai.usage.output_tokens"] == 20 * n
    times = events(span)
    assert list(times) == ["queue", "prefill", "decode"]
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= times["queue"] <= times["prefill"] <= times["decode"] <= span.end_time
    assert "secret" not in span.to_json()


async def test_the_caller_s_trace_goes_on() -> None:
    async with whole_server() as server:
        traces = Traces(server)
        await traces.post(chat("a"), traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1")
        (span,) = traces.spans

    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert span.context.trace_state["vendor"] == "1"


@pytest.mark.parametrize(
    ("flags", "ratio", "num_spans"), [("00", 1.0, 0), ("01", 0.0, 1), (None, 0.0, 0), (None, 1.0, 1)]
)
async def test_whether_a_span_is_kept_is_the_caller_s_decision_and_then_ours(
    flags: str | None, ratio: float, num_spans: int
) -> None:
    headers = {} if flags is None else {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"}
    async with whole_server() as server:
        traces = Traces(server, ratio)
        await traces.post(chat("a"), **headers)

    assert len(traces.spans) == num_spans


@pytest.mark.parametrize(
    "value", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-x-01", "00-" * 300]
)
async def test_a_traceparent_that_is_none_begins_a_new_trace(value: str) -> None:
    async with whole_server() as server:
        traces = Traces(server)
        reply = await traces.post(chat("a"), traceparent=value)
        (span,) = traces.spans

    assert reply.status_code == 200
    assert span.parent is None


async def test_refusals_are_spans_without_phases_and_no_failures() -> None:
    async with whole_server() as server:
        traces = Traces(server)
        await traces.post(chat("a", temperature=9))
        await traces.post({}, "/nowhere/secret")
        refused, unknown = traces.spans

    assert refused.status.status_code is unknown.status.status_code is StatusCode.UNSET
    assert dict(refused.attributes or {})["http.response.status_code"] == 400
    assert events(refused) == {}
    assert unknown.name == "POST"
    assert "secret" not in unknown.to_json()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_that_fails_on_the_way_is_a_failed_span(is_stream: bool) -> None:
    def fail(_batch: object) -> None:
        raise ValueError("broken")

    async with whole_server() as server:
        server.runner.before_step = fail
        traces = Traces(server)
        await traces.post(chat("a", stream=is_stream))
        (span,) = traces.spans

    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "error"
    assert list(events(span)) == ["queue", "prefill"]


async def test_a_request_that_waits_too_long_never_reaches_prefill() -> None:
    async with whole_server() as server:
        server.runner.auto = False
        traces = Traces(server)
        await traces.post(chat("a" * 60, timeout=0.05, n=9))  # one more than may run
        (span,) = traces.spans

    assert span.status.status_code is StatusCode.ERROR
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "timeout"
    assert attributes["http.response.status_code"] == 504
    assert "decode" not in events(span)


async def test_probes_and_pages_leave_no_spans() -> None:
    async with whole_server() as server:
        traces = Traces(server)
        for path in ("/livez", "/readyz", "/metrics", "/", "/v1/models"):
            await traces.get(path)

    assert traces.spans == ()
