"""What is other in a cluster than on the box is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.sources import graph_source
from tests.unit.kubernetes.deployments import cautions_about, disagg


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))


def test_only_vllms_kv_entries_move_between_pods() -> None:
    assert "PrefillWorker: KV entries of sim do not move between pods" in cautions_about(disagg())
    assert "do not move" not in cautions_about(disagg(file="vllm_disagg.yaml"))
    assert "do not move" not in cautions_about(graph_source("graphs.agg:Frontend", "agg.yaml", "box", []))


def test_a_share_of_a_gpu_is_said_to_become_a_whole_one() -> None:
    said = cautions_about(disagg("--VllmWorker.ServiceArgs.resources.gpu=0.5"))
    assert "VllmWorker: a pod gets a whole GPU in the place of 0.5" in said


def test_a_model_that_is_a_path_must_be_there_in_the_pod() -> None:
    source = disagg("--Common.model=/models/llama", file="vllm_disagg.yaml")
    assert "the model /models/llama is a path" in cautions_about(source)
    assert "is a path" not in cautions_about(source, volume_claims=("models:/models",))


def test_an_open_service_and_an_address_of_this_box_are_named() -> None:
    source = disagg("--Planner.prometheus-endpoint=http://127.0.0.1:9090")
    said = cautions_about(source)
    assert "no API key" in said
    assert "Planner.prometheus-endpoint is http://127.0.0.1:9090" in said
    assert "no API key" not in cautions_about(source, api_key="k")


def test_without_a_planner_nothing_is_scaled() -> None:
    source = disagg()
    services = tuple(each for each in source.spec.services if each.role is not Role.PLANNER)
    bare = replace(source, spec=replace(source.spec, services=services))
    assert "the graph has no planner" in cautions_about(bare)


def test_a_profile_that_is_not_here_is_named() -> None:
    missing = cautions_about(disagg("--Planner.policy=sla", "--Planner.profile-results-dir=/nowhere"))
    assert "Planner: unless its image has it, the planner ends at its start: profile-results-dir" in missing
    assert "/nowhere" in missing
    shipped = disagg(
        "--Planner.policy=sla", "--Planner.profile-results-dir=h200_sxm-Llama-3.1-8B-Instruct-FP8"
    )
    for found in (shipped, disagg("--Planner.policy=load")):
        assert "its image" not in cautions_about(found)
