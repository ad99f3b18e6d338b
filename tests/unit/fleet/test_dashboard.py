"""The dashboard asks for nothing that ``/metrics/all`` does not give, and has the form of Grafana's.

The form is checked as far as it is said here: Grafana's own definition of it is no JSON schema.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dynaplan.cli.main import main
from dynaplan.contract.counts import Sample
from dynaplan.contract.gpus import Gpu, GpuActivity, GpuUse
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.engines.worker_load import WorkerLoad, load_gauges
from dynaplan.fleet.deployment_metrics import (
    desired_samples,
    fleet_samples,
    gpu_samples,
    merge,
    power_samples,
    render_samples,
)
from dynaplan.fleet.monitoring import USUAL_PREFIX, dashboard
from dynaplan.fleet.rules.power import ModelPower
from dynaplan.fleet.rules.statefile import with_fleet
from dynaplan.gateway.engine_answers import Usage
from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.planner.metrics.exposition import DEFAULT_PREFIX
from dynaplan.planner.model import DecisionRecord, PlannerState
from dynaplan.planner.recorders.gauges import GaugesRecorder
from dynaplan.planner.rules.decision import decide
from dynaplan.util.prometheus_text import render
from tests.fakes.clock import ManualClock
from tests.fakes.promlint import promtool
from tests.unit.fleet.rules.test_statefile import FIRST, new_document
from tests.unit.planner.rules import targets

SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}")

COLUMNS = 24
"""The columns of Grafana's grid."""

PANELS: list[dict[str, Any]] = dashboard(DEFAULT_PREFIX)["panels"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", ())]


def of_frontend() -> str:
    metrics = FrontendMetrics("ns", ManualClock().now_s)
    record = metrics.record("m", "chat_completions", is_stream=True)
    record.observe(1)
    record.observe(1)
    record.finish("", input_tokens=7, stated=Usage(7, 2, 3))
    metrics.count_prefill("m", "remote")
    return metrics.render().decode()


def of_worker() -> str:
    return render(load_gauges(WorkerLoad()), {"dynamo_namespace": "ns", "dynamo_component": "VllmWorker"})


def of_planner() -> str:
    recorder = GaugesRecorder(targets.SETTINGS)
    seen = targets.planned_interval(1, 1, [40.0])
    state, decision = decide(targets.SETTINGS, PlannerState(), seen, targets.model())
    recorder.record_sample(Sample(0.0, prefill_queue=2.0))
    recorder.record_decision(DecisionRecord("", targets.SETTINGS, PlannerState(), seen, decision, state))
    return render(recorder.read(), {"dynamo_namespace": "ns", "dynamo_component": "Planner"})


def of_fleet() -> str:
    gpus = (Gpu(0, "GPU-0", "H100", 80 * 10**9),)
    samples = [
        *fleet_samples(with_fleet(new_document(), [FIRST])),
        *desired_samples(DesiredCounts(1, 3)),
        *gpu_samples(gpus, {0: GpuUse(10**9)}, {0: GpuActivity(0.5, 300.0)}),
        *power_samples({"m": ModelPower(300.0, 0.5)}),
    ]
    return render_samples("ns", samples)


@cache
def given() -> dict[str, set[str]]:
    """Each sample's name of the text that a deployment gives, and its labels."""
    text = merge(
        [("", of_frontend()), ("ns_VllmWorker", of_worker()), ("ns_Planner", of_planner()), ("", of_fleet())]
    )
    labels = defaultdict[str, set[str]](set)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    return labels


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{t}: {q['legendFormat']}" for t, q in TARGETS])
def test_every_metric_and_label_of_a_query_is_in_what_a_deployment_gives(
    title: str, target: dict[str, str]
) -> None:
    selectors = SELECTOR.findall(target["expr"])
    assert selectors
    for name, matchers in selectors:
        assert name in given(), title
        assert 'dynamo_namespace="$namespace"' in matchers
        assert set(re.findall(r"(\w+)!?[=~]", matchers)) <= given()[name]
    grouped = {
        label.strip()
        for labels in re.findall(r"by \(([^)]*)\)", target["expr"])
        for label in labels.split(",")
    }
    assert grouped <= set.union(*(given()[name] for name, _ in selectors))
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped


def test_the_variable_for_the_deployment_is_read_from_a_metric_that_is_given() -> None:
    source, namespace = dashboard(DEFAULT_PREFIX)["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", namespace["query"]["query"]).groups()  # type: ignore[union-attr]
    assert label in given()[name]


def test_panels_have_places_of_their_own_on_the_grid_and_ids_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert all(0 <= x < COLUMNS for x, _ in cells)
        taken |= cells
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references)


def test_other_names_of_the_frontends_metrics_are_asked_for() -> None:
    text = json.dumps(dashboard("mine"))
    assert "mine_requests_total" in text
    assert DEFAULT_PREFIX not in text
    assert f"{DEFAULT_PREFIX}_" == USUAL_PREFIX


def test_promtool_reads_every_query(tmp_path: Path) -> None:
    queries = [target["expr"].replace("$__rate_interval", "1m") for _, target in TARGETS]
    rules = [
        {"record": "query", "labels": {"number": str(number)}, "expr": query}
        for number, query in enumerate(queries)
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    assert promtool("check", "rules", str(tmp_path / "rules.yml"))[0] == 0


def export(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", "grafana", *arguments])
    return int(str(ended.value.code))


def test_a_dashboard_needs_no_deployment_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DYN_METRICS_PREFIX", raising=False)
    assert export("-o", str(tmp_path / "dashboard.json")) == 0
    assert json.loads((tmp_path / "dashboard.json").read_text()) == dashboard(DEFAULT_PREFIX)
    assert capsys.readouterr().out == ""


def test_it_asks_for_the_names_that_the_frontends_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DYN_METRICS_PREFIX", "mine")
    assert export() == 0
    assert json.loads(capsys.readouterr().out) == dashboard("mine")


def test_a_deployment_that_is_named_is_shown_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert export("--namespace", "viz") == 0
    shown = json.loads(capsys.readouterr().out)
    (variable,) = (each for each in shown["templating"]["list"] if each["name"] == "namespace")
    assert variable["current"]["value"] == "viz"
    del variable["current"]
    assert shown == dashboard(DEFAULT_PREFIX)
