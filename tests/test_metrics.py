"""service/metrics.py: names, values, and labels that stay bounded."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from service.engine.observer import EngineGauges, EngineObserver, RequestRecord
from service.metrics import (
    ABORT_CAUSES,
    DEFINITIONS,
    REASONS,
    REFUSAL_CAUSES,
    Histogram,
    Metrics,
    as_markdown,
)

RECORD = RequestRecord(
    reason="stop",
    submitted_at=0.0,
    was_planned=True,
    queue_seconds=0.2,
    first_token_seconds=0.5,
    end_to_end_seconds=3.0,
    num_prompt_tokens=7,
    num_output_tokens=5,
    num_cached_tokens=2,
)


def values_of(metrics: Metrics) -> dict[str, float]:
    """Every sample, as `name{label="value"}` -> value."""
    samples = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_a_request_is_seen_in_every_metric_it_touches() -> None:
    metrics = Metrics()
    metrics.describe(model_name="tiny", block_size=16)
    observer: EngineObserver = metrics
    gauges = EngineGauges(
        num_running=3, num_waiting=2, num_blocks=10, num_used_blocks=4, num_cached_blocks=5
    )

    observer.step_done(num_prefill_tokens=7, num_decode_tokens=3, gauges=gauges)
    observer.prefix_cache_queried(num_tokens=7, num_hit_tokens=2)
    observer.first_token(0.5)
    observer.next_tokens(0.01, 4)
    observer.preempted()
    observer.finished(RECORD)
    observer.refused("queue_full")

    seen = values_of(metrics)
    assert seen["photoninfer_requests_running"] == 3
    assert seen["photoninfer_requests_waiting"] == 2
    assert seen['photoninfer_requests_total{reason="stop"}'] == 1
    assert seen["photoninfer_prompt_tokens_total"] == 7
    assert seen["photoninfer_generation_tokens_total"] == 5
    assert seen["photoninfer_prefill_tokens_total"] == 7
    assert seen["photoninfer_decode_tokens_total"] == 3
    assert seen["photoninfer_time_to_first_token_seconds_sum"] == 0.5
    assert seen['photoninfer_time_to_first_token_seconds_bucket{le="0.25"}'] == 0
    assert seen['photoninfer_time_to_first_token_seconds_bucket{le="0.5"}'] == 1
    assert seen["photoninfer_inter_token_latency_seconds_count"] == 4
    assert seen["photoninfer_inter_token_latency_seconds_sum"] == pytest.approx(0.04)
    assert seen["photoninfer_queue_time_seconds_sum"] == 0.2
    assert seen["photoninfer_e2e_request_latency_seconds_sum"] == 3.0
    assert seen["photoninfer_kv_cache_usage_ratio"] == 0.4
    assert [seen[f'photoninfer_kv_blocks{{state="{state}"}}'] for state in ("used", "cached", "free")] == [
        4,
        5,
        1,
    ]
    assert seen["photoninfer_prefix_cache_queries_total"] == 7
    assert seen["photoninfer_prefix_cache_hits_total"] == 2
    assert seen["photoninfer_preemptions_total"] == 1
    assert seen['photoninfer_refused_total{cause="queue_full"}'] == 1
    assert seen['vllm:num_requests_running{model_name="tiny"}'] == 3
    assert seen['vllm:kv_cache_usage_perc{model_name="tiny"}'] == 0.4
    assert seen['vllm:request_success_total{finished_reason="stop",model_name="tiny"}'] == 1
    assert seen['vllm:cache_config_info{block_size="16",model_name="tiny",num_gpu_blocks="10"}'] == 1


def test_every_alias_shows_what_its_original_shows() -> None:
    metrics = Metrics()
    metrics.first_token(1.0)
    metrics.finished(RECORD)

    seen = {f.name: f for f in text_string_to_metric_families(metrics.exposition().decode())}

    for one in DEFINITIONS:
        if one.alias is not None:
            ours, theirs = (seen[name.removesuffix("_total")] for name in (one.name, one.alias))
            assert ours.type == theirs.type == one.kind
            assert [s.value for s in ours.samples] == [s.value for s in theirs.samples]


def test_labels_are_bounded_whatever_is_reported() -> None:
    metrics = Metrics()

    for i in range(50):
        metrics.finished(structs.replace(RECORD, reason=f"cause {i}"))
        metrics.refused(f"cause {i}")
        metrics.http_answered("other", f"METHOD{i}", 404)

    assert set(metrics.finished_by_reason) == set(REASONS)
    assert metrics.finished_by_reason["abort"] == 50
    assert set(metrics.aborted_by_cause) == set(ABORT_CAUSES)
    assert metrics.aborted_by_cause["other"] == 50
    assert set(metrics.refused_by_cause) == set(REFUSAL_CAUSES)
    assert metrics.http == {("other", "other", "404"): 50}


@pytest.mark.parametrize(
    ("cause", "reason", "is_abort"),
    [
        ("stop", "stop", False),
        ("stop_string", "stop", False),
        ("length", "length", False),
        ("error", "error", False),
        ("client_gone", "abort", True),
    ],
)
def test_how_a_request_ended(cause: str, reason: str, is_abort: bool) -> None:
    metrics = Metrics()

    metrics.finished(structs.replace(RECORD, reason=cause))

    assert metrics.finished_by_reason[reason] == 1
    assert sum(metrics.aborted_by_cause.values()) == is_abort


def test_two_servers_in_one_process_do_not_share_metrics() -> None:
    first, second = Metrics(), Metrics()

    first.preempted()

    assert values_of(first)["photoninfer_preemptions_total"] == 1
    assert values_of(second)["photoninfer_preemptions_total"] == 0


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 5))))
def test_buckets_count_what_is_at_or_below_their_bound(observed: list[tuple[float, int]]) -> None:
    histogram = Histogram((0.5, 1.0, 100.0))

    for value, times in observed:
        histogram.observe(value, times)

    for bound, count in histogram.buckets():
        assert count == sum(times for value, times in observed if value <= float(bound))


def test_the_documented_table_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()

    assert as_markdown() in text, (
        "remake it: python -c 'from service.metrics import *; print(as_markdown())'"
    )


def test_the_names_and_kinds_that_dashboards_and_gateways_rely_on() -> None:
    kinds = {each.alias or each.name: (each.kind, each.alias_labels or each.labels) for each in DEFINITIONS}
    wanted = {
        "vllm:num_requests_waiting": ("gauge", ()),
        "vllm:num_requests_running": ("gauge", ()),
        "vllm:kv_cache_usage_perc": ("gauge", ()),
        "vllm:cache_config_info": ("gauge", ("block_size", "num_gpu_blocks")),
        "vllm:time_to_first_token_seconds": ("histogram", ()),
        "vllm:inter_token_latency_seconds": ("histogram", ()),
        "vllm:e2e_request_latency_seconds": ("histogram", ()),
        "vllm:prompt_tokens_total": ("counter", ()),
        "vllm:generation_tokens_total": ("counter", ()),
        "vllm:request_success_total": ("counter", ("finished_reason",)),
        "vllm:num_preemptions_total": ("counter", ()),
        "vllm:prefix_cache_queries_total": ("counter", ()),
        "vllm:prefix_cache_hits_total": ("counter", ()),
    }

    assert kinds | wanted == kinds
