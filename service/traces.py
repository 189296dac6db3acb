"""OpenTelemetry's tracer, made when `trace_endpoint` is set. Until then nothing of it is imported.

Spans leave in batches from a thread of the SDK's own, through a queue that drops what does not fit: a
collector that is slow, broken or absent costs spans and nothing else.
"""

import threading
from typing import TYPE_CHECKING

from service import __version__
from service.errors import SettingsError
from service.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PATH = "/v1/traces"
_FLUSH_SECONDS = 3.0


def make_tracer_provider(settings: Settings) -> "TracerProvider | None":
    """None without `trace_endpoint`. Headers, certificates and more come from OTEL_* variables.

    Raises: SettingsError when the packages are not there.
    """
    if settings.trace_endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    except ImportError as error:
        raise SettingsError(
            f"trace_endpoint is {settings.trace_endpoint!r}, but OpenTelemetry is not installed "
            f"({error}). Install it (pip install 'photoninfer[otel]'), or unset the option."
        ) from None
    ours = Resource.create({"service.name": "photoninfer", "service.version": __version__})
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.trace_sample_ratio)),
        resource=ours.merge(OTELResourceDetector().detect()),
        shutdown_on_exit=False,  # close_tracer_provider does it, and does not wait for ever
    )
    base = settings.trace_endpoint.rstrip("/").removesuffix(_PATH)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(base + _PATH)))
    return provider


def close_tracer_provider(provider: "TracerProvider") -> None:
    """Send what is left, for a few seconds at most. Blocks."""
    closing = threading.Thread(target=provider.shutdown, name="last traces", daemon=True)
    closing.start()
    closing.join(_FLUSH_SECONDS)
