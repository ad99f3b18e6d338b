from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import dynaplan
from dynaplan.contract.counts import Sample
from dynaplan.engines.sglang import METRIC_NAMES as SGLANG
from dynaplan.engines.trtllm import METRIC_NAMES as TRTLLM
from dynaplan.engines.vllm import METRIC_NAMES as VLLM
from dynaplan.engines.worker_load import WorkerLoad, load_gauges
from dynaplan.planner.model import DecisionRecord, PlannerState
from dynaplan.planner.recorders.gauges import GaugesRecorder
from dynaplan.planner.rules.decision import decide
from dynaplan.util.prometheus_text import HELP, help_of, labelled, render
from tests.fakes.promlint import faults
from tests.unit.planner.rules import targets

PACKAGE = Path(dynaplan.__file__).parent


def test_the_text_is_what_prometheus_reads() -> None:
    load = WorkerLoad(running_requests=3, kv_active_blocks=5, kv_total_blocks=10, kv_usage=0.5)
    values = {**load_gauges(load), "engine_tokens_total": 12.0}
    labels = {"dynamo_namespace": 'with "quotes"\n', "worker": "ns_VllmWorker"}
    families = {family.name: family for family in text_string_to_metric_families(render(values, labels))}
    assert families["dynamo_component_request_active_slots"].samples[0].value == 3
    assert families["dynamo_component_kvstats_gpu_cache_usage_percent"].samples[0].value == 0.5
    assert families["engine_tokens"].type == "counter"
    assert families["dynamo_component_kvstats_total_blocks"].samples[0].labels == labels


def test_an_engines_sums_and_counts_are_one_summary() -> None:
    values = {"vllm:ttft_seconds_sum": 1.5, "vllm:ttft_seconds_count": 3.0, "vllm:bytes_sum": 7.0}
    families = {family.name: family for family in text_string_to_metric_families(render(values, {"a": "b"}))}
    assert {name: family.type for name, family in families.items()} == {
        "vllm:ttft_seconds": "summary",
        "vllm:bytes": "summary",
    }
    assert [sample.value for sample in families["vllm:ttft_seconds"].samples] == [1.5, 3.0]
    assert families["vllm:ttft_seconds"].documentation == "ttft seconds, as vllm counts it"
    assert faults(render(values, {"a": "b"})) == []


def test_every_metric_of_a_worker_and_a_planner_has_a_help_text_and_a_name_by_the_rules() -> None:
    engines = (*VLLM.samples, *SGLANG.samples, *TRTLLM.samples)
    values = {**load_gauges(WorkerLoad()), **dict.fromkeys([*HELP, *engines], 1.0)}
    assert faults(render(values, {"dynamo_namespace": "ns"})) == []


def test_a_gauge_of_a_service_of_ones_own_has_its_name_as_help() -> None:
    assert help_of("queue_depth") == "queue depth"


def test_every_gauge_of_the_planner_is_described() -> None:
    recorder = GaugesRecorder(targets.SETTINGS)
    seen = targets.planned_interval(1, 1, [40.0])
    state, decision = decide(targets.SETTINGS, PlannerState(), seen, targets.model())
    recorder.record_sample(Sample(0.0, prefill_queue=1.0))
    recorder.record_decision(
        DecisionRecord("", targets.SETTINGS, PlannerState(), seen, decision, state),
    )
    assert len(recorder.read()) > 15
    assert recorder.read().keys() - HELP.keys() == set()


def test_every_number_of_dynaplans_own_is_described() -> None:
    names = set(re.findall(r'"(dynaplan:\w+)"', "".join(path.read_text() for path in PACKAGE.rglob("*.py"))))
    assert names
    assert names - HELP.keys() == set()


def test_a_sample_may_have_a_label_of_its_own_beside_those_of_all() -> None:
    values = {**labelled({"a_total": 1}, "model", 'x"y'), **labelled({"a_total": 2}, "model", "z")}
    assert render(values, {"worker": "w"}).splitlines()[1:] == [
        "# TYPE a_total counter",
        'a_total{worker="w",model="x\\"y"} 1',
        'a_total{worker="w",model="z"} 2',
    ]
