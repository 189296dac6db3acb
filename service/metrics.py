"""Prometheus metrics, on a registry of their own. `DEFINITIONS` is the whole list.

Recording is plain arithmetic on one object; Prometheus' types exist only while a scrape is answered. The
library's own Histogram.observe takes a lock and about a microsecond, too much for a call a token; here
everything runs on one event loop and needs no lock.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service import __version__
from service.engine.observer import EngineGauges, RequestRecord

# Bounded label sets; what is not in them is counted as OTHER.
OTHER = "other"
REASONS = ("stop", "length", "error", "abort")
ABORT_CAUSES = ("client_gone", "timeout", "shutdown", OTHER)
REFUSAL_CAUSES = ("queue_full", "context_length", "dead", "loading", "draining", "client_limit", OTHER)
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", OTHER)

# Seconds. First tokens: from a short prompt on a fast GPU to minutes in a queue.
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
TOKEN_BUCKETS = (
    0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip


class Histogram:
    """Counts by upper bound, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulated counts with their bounds as Prometheus writes them."""
        cumulated, running = [], 0
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            running += count
            cumulated.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(running)))
        return cumulated


def _counts(names: Sequence[str]) -> dict[str, int]:
    """Every label value at 0, so that a rate over a first event is not lost."""
    return dict.fromkeys(names, 0)


def _add(counts: dict[str, int], name: str) -> None:
    counts[name if name in counts else OTHER] += 1


class Metrics:
    """Implements service.engine.observer.EngineObserver, and counts what HTTP does."""

    def __init__(self) -> None:
        self.model_name = ""
        self.block_size = 0
        self.gauges = EngineGauges(
            num_running=0, num_waiting=0, num_blocks=0, num_used_blocks=0, num_cached_blocks=0
        )
        self.finished_by_reason = _counts(REASONS)
        self.aborted_by_cause = _counts(ABORT_CAUSES)
        self.refused_by_cause = _counts(REFUSAL_CAUSES)
        self.num_prompt_tokens = self.num_generated_tokens = 0
        self.num_prefill_tokens = self.num_decode_tokens = 0
        self.num_prefix_queries = self.num_prefix_hits = self.num_preemptions = 0
        self.time_to_first_token = Histogram(LATENCY_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_BUCKETS)
        self.queue_time = Histogram(LATENCY_BUCKETS)
        self.end_to_end = Histogram(REQUEST_BUCKETS)
        self.http: dict[tuple[str, str, str], int] = {}
        self.registry = CollectorRegistry()
        self.registry.register(_Scrape(self))
        ProcessCollector(registry=self.registry)

    def describe(self, *, model_name: str, block_size: int) -> None:
        """Set what labels say about the model; called once, when it is loaded."""
        self.model_name, self.block_size = model_name, block_size

    def step_done(self, *, num_prefill_tokens: int, num_decode_tokens: int, gauges: EngineGauges) -> None:
        self.num_prefill_tokens += num_prefill_tokens
        self.num_decode_tokens += num_decode_tokens
        self.gauges = gauges

    def prefix_cache_queried(self, *, num_tokens: int, num_hit_tokens: int) -> None:
        self.num_prefix_queries += num_tokens
        self.num_prefix_hits += num_hit_tokens

    def first_token(self, seconds: float) -> None:
        self.num_generated_tokens += 1
        self.time_to_first_token.observe(seconds)

    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        self.num_generated_tokens += num_tokens
        self.inter_token_latency.observe(seconds, num_tokens)

    def preempted(self) -> None:
        self.num_preemptions += 1

    def finished(self, record: RequestRecord) -> None:
        reason = "stop" if record.reason == "stop_string" else record.reason
        if reason not in self.finished_by_reason:  # a cause of cancellation
            _add(self.aborted_by_cause, reason)
            reason = "abort"
        self.finished_by_reason[reason] += 1
        self.num_prompt_tokens += record.num_prompt_tokens
        self.queue_time.observe(record.queue_seconds)
        self.end_to_end.observe(record.end_to_end_seconds)

    def refused(self, cause: str) -> None:
        _add(self.refused_by_cause, cause)

    def http_answered(self, route: str, method: str, status: int) -> None:
        """`route` is a route's template or "other", never a path as sent."""
        key = (route, method if method in METHODS else OTHER, str(status))
        self.http[key] = self.http.get(key, 0) + 1

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    @property
    def kv_cache_usage(self) -> float:
        return self.gauges.num_used_blocks / self.gauges.num_blocks if self.gauges.num_blocks else 0.0

    @property
    def blocks_by_state(self) -> dict[str, int]:
        used, cached = self.gauges.num_used_blocks, self.gauges.num_cached_blocks
        return {"used": used, "cached": cached, "free": max(0, self.gauges.num_blocks - used - cached)}


Values = float | Histogram | Mapping[Any, int]  # by label value, or by a tuple of them


class Definition(msgspec.Struct, frozen=True):
    """One metric: what it is called, what it means and where its value is."""

    name: str
    kind: str  # "counter", "gauge" or "histogram"
    text: str
    value: Callable[[Metrics], Values]
    labels: tuple[str, ...] = ()
    alias: str | None = None  # vLLM's name of the same thing, with a label model_name besides
    alias_labels: tuple[str, ...] | None = None  # where vLLM's differ


DEFINITIONS = (
    Definition("photoninfer_build_info", "gauge", "Always 1; the version is its label.",
               lambda _: {__version__: 1}, ("version",)),
    Definition("photoninfer_requests_running", "gauge", "Requests in the batch, holding KV blocks.",
               lambda m: m.gauges.num_running, alias="vllm:num_requests_running"),
    Definition("photoninfer_requests_waiting", "gauge", "Requests in the queue, preempted ones included.",
               lambda m: m.gauges.num_waiting, alias="vllm:num_requests_waiting"),
    Definition("photoninfer_requests_total", "counter", "Requests that ended; n choices count n.",
               lambda m: m.finished_by_reason, ("reason",),
               "vllm:request_success_total", ("finished_reason",)),
    Definition("photoninfer_aborts_total", "counter", "Requests cancelled before their end, by cause.",
               lambda m: m.aborted_by_cause, ("cause",)),
    Definition("photoninfer_refused_total", "counter", "Requests not accepted, by cause.",
               lambda m: m.refused_by_cause, ("cause",)),
    Definition("photoninfer_prompt_tokens_total", "counter", "Prompt tokens of requests that ended.",
               lambda m: m.num_prompt_tokens, alias="vllm:prompt_tokens_total"),
    Definition("photoninfer_generation_tokens_total", "counter", "Tokens generated.",
               lambda m: m.num_generated_tokens, alias="vllm:generation_tokens_total"),
    Definition("photoninfer_prefill_tokens_total", "counter",
               "Prompt tokens computed, recomputation included, prefix hits not.",
               lambda m: m.num_prefill_tokens),
    Definition("photoninfer_decode_tokens_total", "counter", "Decode rows computed.",
               lambda m: m.num_decode_tokens),
    Definition("photoninfer_time_to_first_token_seconds", "histogram", "Submission to the first token.",
               lambda m: m.time_to_first_token, alias="vllm:time_to_first_token_seconds"),
    Definition("photoninfer_inter_token_latency_seconds", "histogram",
               "Time between tokens of one request, as the engine hands them out.",
               lambda m: m.inter_token_latency, alias="vllm:inter_token_latency_seconds"),
    Definition("photoninfer_queue_time_seconds", "histogram", "Submission until first planned.",
               lambda m: m.queue_time, alias="vllm:request_queue_time_seconds"),
    Definition("photoninfer_e2e_request_latency_seconds", "histogram", "Submission to the end.",
               lambda m: m.end_to_end, alias="vllm:e2e_request_latency_seconds"),
    Definition("photoninfer_kv_cache_usage_ratio", "gauge", "Share of KV blocks held by requests, 0 to 1.",
               lambda m: m.kv_cache_usage, alias="vllm:kv_cache_usage_perc"),
    Definition("photoninfer_kv_blocks", "gauge", "KV blocks by state; cached ones are free to take.",
               lambda m: m.blocks_by_state, ("state",)),
    Definition("photoninfer_prefix_cache_queries_total", "counter", "Prompt tokens looked up.",
               lambda m: m.num_prefix_queries, alias="vllm:prefix_cache_queries_total"),
    Definition("photoninfer_prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
               lambda m: m.num_prefix_hits, alias="vllm:prefix_cache_hits_total"),
    Definition("photoninfer_preemptions_total", "counter", "Requests that lost their KV blocks to others.",
               lambda m: m.num_preemptions, alias="vllm:num_preemptions_total"),
    Definition("photoninfer_http_requests_total", "counter", "Answers, by route template.",
               lambda m: m.http, ("route", "method", "status")),
    Definition("photoninfer_cache_config_info", "gauge", "Always 1; the KV cache's shape is in its labels.",
               lambda m: {(str(m.block_size), str(m.gauges.num_blocks)): 1},
               ("block_size", "num_gpu_blocks"), "vllm:cache_config_info"),
)  # fmt: skip


def as_markdown() -> str:
    """The table of metrics in docs/metrics.md."""
    lines = ["| name | kind | labels | what it is | vLLM's name |", "| --- | --- | --- | --- | --- |"]
    for each in DEFINITIONS:
        labels, alias = ", ".join(each.labels), f"`{each.alias}`" if each.alias else ""
        lines.append(f"| `{each.name}` | {each.kind} | {labels} | {each.text} | {alias} |")
    return "\n".join(lines) + "\n"


class _Scrape(Collector):
    """Turns the numbers of a `Metrics` into Prometheus' families, once a scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for one in DEFINITIONS:
            value = one.value(self._metrics)
            yield _family(one.name, one, one.labels, value, ())
            if one.alias is not None:
                labels = ("model_name", *(one.labels if one.alias_labels is None else one.alias_labels))
                yield _family(one.alias, one, labels, value, (self._metrics.model_name,))


def _family(
    name: str, definition: Definition, labels: tuple[str, ...], value: Values, constant: tuple[str, ...]
) -> Metric:
    """`constant` are the values of the leading labels, equal in all samples."""
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(name, definition.text, labels=labels)
        histogram.add_metric(constant, value.buckets(), value.total)
        return histogram
    family = CounterMetricFamily if definition.kind == "counter" else GaugeMetricFamily
    plain = family(name, definition.text, labels=labels)
    samples = value.items() if isinstance(value, Mapping) else [((), value)]
    for key, number in samples:
        plain.add_metric([*constant, *([key] if isinstance(key, str) else key)], number)
    return plain
