"""The metrics of choices by cached prefixes."""

from prometheus_client import CollectorRegistry

from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.gateway.routing.router_metrics import RouterMetrics

LABELS = {"dynamo_namespace": "ns", "dynamo_component": "VllmWorker", "dynamo_endpoint": "generate"}


def test_hit_rates_are_observed_by_request_and_counted_by_block() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics("ns", "VllmWorker", registry)
    metrics.chosen(10, 5, 5)
    metrics.chosen(30, 0, 3)
    metrics.chosen(0, 0, 0)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"dynamo_component_router_{name}", LABELS)

    assert (value("kv_hit_rate_sum"), value("kv_hit_rate_count")) == (0.5, 2)
    assert (value("overlap_blocks_lost_sum"), value("non_max_overlap_selections_total")) == (3, 1)
    assert (value("overlap_blocks_total"), value("prompt_blocks_total")) == (5, 40)


def test_a_frontend_has_them_where_it_chooses_by_prefix() -> None:
    by_prefix = FrontendMetrics("ns", lambda: 0.0, routed_by_prefix="VllmWorker")
    assert by_prefix.router
    by_prefix.router.chosen(4, 1, 1)
    assert b"dynamo_component_router_kv_hit_rate_sum" in by_prefix.render()
    assert b"router_kv_hit_rate" not in FrontendMetrics("ns", lambda: 0.0).render()
