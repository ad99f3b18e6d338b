from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from dynaplan.domain.worker_load import WorkerLoad
from dynaplan.runtime.metrics import load_gauges, render


def test_the_text_is_what_prometheus_reads() -> None:
    load = WorkerLoad(running_requests=3, kv_active_blocks=5, kv_total_blocks=10, kv_usage=0.5)
    values = {**load_gauges(load), "engine_tokens_total": 12.0}
    labels = {"dynamo_namespace": 'with "quotes"\n', "worker": "ns_VllmWorker"}
    families = {family.name: family for family in text_string_to_metric_families(render(values, labels))}
    assert families["dynamo_component_request_active_slots"].samples[0].value == 3
    assert families["dynamo_component_kvstats_gpu_cache_usage_percent"].samples[0].value == 0.5
    assert families["engine_tokens"].type == "counter"
    assert families["dynamo_component_kvstats_total_blocks"].samples[0].labels == labels
