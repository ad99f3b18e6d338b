"""Metrics of choices by cached prefixes, and the numbers that Dynamo's planner reads from a router."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.gateway.router_metrics import RouterMetrics

LABELS = {"dynamo_namespace": "ns", "dynamo_component": "VllmWorker", "dynamo_endpoint": "generate"}


def test_hit_rates_are_observed_by_request_and_counted_by_block() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics("ns", "VllmWorker", registry)
    metrics.observe_choice(10, 5, 5)
    metrics.observe_choice(30, 0, 3)
    metrics.observe_choice(0, 0, 0)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"dynamo_component_router_{name}", LABELS)

    assert (value("kv_hit_rate_sum"), value("kv_hit_rate_count")) == (0.5, 2)
    assert (value("overlap_blocks_lost_sum"), value("non_max_overlap_selections_total")) == (3, 1)
    assert (value("overlap_blocks_total"), value("prompt_blocks_total")) == (5, 40)


def test_a_frontend_has_them_where_it_chooses_by_prefix() -> None:
    by_prefix = FrontendMetrics("ns", lambda: 0.0, routed_by_prefix="VllmWorker")
    assert by_prefix.router
    by_prefix.router.observe_choice(4, 1, 1)
    assert b"dynamo_component_router_kv_hit_rate_sum" in by_prefix.render()
    assert b"router_kv_hit_rate" not in FrontendMetrics("ns", lambda: 0.0).render()


ROUTER = "dynamo_component_router_"


def samples(metrics: FrontendMetrics) -> dict[str, float]:
    """The samples of the names in question, without buckets; none has a label but the namespace."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name.startswith("dynamo_component_") and "le" not in sample.labels:
                assert sample.labels == {"dynamo_namespace": "my_box"}
                found[sample.name] = sample.value
    return found


def answered(metrics: FrontendMetrics, model: str, input_tokens: int, error_type: str = "") -> None:
    record = metrics.record(model, "chat_completions", is_stream=True)
    for _ in range(3):
        record.observe(1)
    record.finish(error_type, input_tokens)


def test_a_router_s_names_have_the_sums_over_all_models_of_the_namespace() -> None:
    now_s = iter(range(100))
    metrics = FrontendMetrics("my-box", lambda: float(next(now_s)))
    answered(metrics, "a", 10)
    answered(metrics, "b", 30)
    answered(metrics, "b", 30, "internal")
    found = samples(metrics)
    assert found[f"{ROUTER}requests_total"] == found[f"{ROUTER}requests_started_total"] == 3
    lengths = found[f"{ROUTER}input_sequence_tokens_sum"], found[f"{ROUTER}input_sequence_tokens_count"]
    assert lengths == (40, 2)
    assert found[f"{ROUTER}output_sequence_tokens_sum"] == 6
    assert found[f"{ROUTER}time_to_first_token_seconds_count"] == 3
    assert found[f"{ROUTER}inter_token_latency_seconds_count"] == 6
    assert found["dynamo_component_request_duration_seconds_count"] == 3


def test_buckets_are_summed_too() -> None:
    metrics = FrontendMetrics("my-box", lambda: 0.0)
    for model in ("a", "b"):
        answered(metrics, model, 10)
    text = metrics.render().decode()
    assert f'{ROUTER}input_sequence_tokens_bucket{{dynamo_namespace="my_box",le="100.0"}} 2.0' in text
    assert f"# TYPE {ROUTER}input_sequence_tokens histogram" in text


def test_the_names_do_not_depend_on_the_frontend_s_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_METRICS_PREFIX", "mine")
    metrics = FrontendMetrics("my-box", lambda: 0.0)
    answered(metrics, "a", 10)
    assert samples(metrics)[f"{ROUTER}requests_total"] == 1


def test_where_nothing_was_asked_there_is_nothing_to_sum() -> None:
    assert samples(FrontendMetrics("my-box", lambda: 0.0)) == {}
