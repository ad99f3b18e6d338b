"""The configuration that a sweep recommends: the user's own, completed, and one that can be served."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import graphs
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.graph.config import read_config, resolve_graph, validate_config
from dynaplan.lab.profiling.results import Sections, with_recommendation, write_config
from dynaplan.sdk import load_graph
from tests.unit.lab.profiling.known import of_sizes, recommended

GRAPHS = Path(graphs.__file__).parent
ITLS = {1: [(1, 9.0, 110.0)], 2: [(1, 4.0, 125.0), (150, 5.0, 900.0)], 4: [(1, 3.0, 100.0)]}
CHOSEN = recommended(of_sizes({1: 90.0, 2: 60.0, 4: 40.0}, ITLS), 50, 6)
"""Prefill TP 4, decode TP 2 with 150 requests at once."""


def stock(name: str) -> Sections:
    return read_config(GRAPHS / f"{name}.yaml")


def completed(config: Sections, *, splits_layers: bool = True) -> Sections:
    return with_recommendation(config, CHOSEN, "/results", splits_layers)


@pytest.mark.parametrize("name", ["agg", "agg_router", "disagg", "disagg_router", "vllm_disagg"])
def test_what_is_written_can_be_served_and_says_what_was_recommended(name: str, tmp_path: Path) -> None:
    file = write_config(tmp_path, completed(stock(name)), CHOSEN.goal)
    graph_name = "disagg" if name == "vllm_disagg" else name
    graph, config = load_graph(f"graphs.{graph_name}:Frontend", GRAPHS.parent), read_config(file)
    assert validate_config(graph, config) == []
    gpus = {service.name: service.gpus for service in resolve_graph(graph, config).services}
    assert gpus["VllmWorker"] == 2
    assert gpus.get("PrefillWorker", 4) == 4
    planner = PlannerSettings.from_options(config["Planner"])
    assert (planner.ttft_ms, planner.itl_ms) == (50, 6)
    assert (planner.isl_tokens, planner.osl_tokens) == (3000, 500)
    assert planner.profile_results_dir == "/results"
    assert (planner.prefill_engine_num_gpu, planner.decode_engine_num_gpu) == (4, 2)
    thresholds = (planner.prefill_queue_scale_down_threshold, planner.prefill_queue_scale_up_threshold)
    assert thresholds == (0.1, 0.5)
    assert planner.decode_kv_scale_down_threshold == pytest.approx(0.29)
    assert planner.decode_kv_scale_up_threshold == pytest.approx(0.69)


def test_the_user_s_configuration_is_left_as_it_was() -> None:
    """The original copied it flat, so that one run's settings got into the next."""
    config = stock("disagg")
    before = deepcopy(config)
    completed(config)["VllmWorker"]["ServiceArgs"]["workers"] = 9
    assert config == before


def test_what_the_user_wrote_stays_where_nothing_is_recommended() -> None:
    config = stock("disagg")
    config["Planner"] |= {"policy": "both", "max-gpu-budget": 16}
    config["VllmWorker"]["ServiceArgs"]["envs"] = {"A": "1"}
    after = completed(config)
    assert (after["Planner"]["policy"], after["Planner"]["max-gpu-budget"]) == ("both", 16)
    assert after["VllmWorker"]["ServiceArgs"] == {"workers": 1, "resources": {"gpu": 2}, "envs": {"A": "1"}}
    assert after["Processor"] == config["Processor"]


def test_an_option_that_was_written_with_underscores_is_replaced_not_doubled() -> None:
    config: dict[str, dict[str, Any]] = {
        "Common": {"tensor_parallel_size": 8},
        "VllmWorker": {"tp_size": 8, "pipeline_parallel_size": 2, "common-configs": ["tensor_parallel_size"]},
        "Planner": {"profile_results_dir": "elsewhere", "decode_kv_scale_up_threshold": 0.9},
    }
    after = completed(config)
    assert after["Common"] == {}
    assert after["VllmWorker"]["tensor-parallel-size"] == 2
    assert not {"tp_size", "pipeline_parallel_size"} & set(after["VllmWorker"])
    assert not {"profile_results_dir", "decode_kv_scale_up_threshold"} & set(after["Planner"])


def test_workers_of_an_engine_without_tensor_parallelism_stay_as_they_are() -> None:
    config = stock("llamacpp_disagg")
    after = completed(config, splits_layers=False)
    assert (after["VllmWorker"], after["PrefillWorker"]) == (config["VllmWorker"], config["PrefillWorker"])
    assert "decode-engine-num-gpu" not in after["Planner"]
    assert after["Planner"]["profile-results-dir"] == "/results"


def test_a_configuration_without_prefill_workers_gets_none() -> None:
    assert "PrefillWorker" not in completed(stock("agg"))


def test_workers_of_other_names_are_found_as_the_planner_finds_them() -> None:
    after = completed(
        {"Planner": {"decode_component": "Mine", "prefill-component": "Theirs"}, "Mine": {}, "Theirs": {}}
    )
    assert after["Mine"]["tensor-parallel-size"] == 2
    assert after["Theirs"]["tensor-parallel-size"] == 4
