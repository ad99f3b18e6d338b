"""The section ``Models:``: each model gets a section of its workers, and says when it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynaplan.config.model_entries import (
    components_of,
    prefill_components_of,
    served_models,
    with_worker_sections,
)
from dynaplan.config.overrides import parse_overrides
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.graph.config import resolve_graph, validate_config
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.loading import load_graph
from dynaplan.util.errors import ConfigError, GraphError

GRAPH = "dynaplan.components:Frontend"


def test_an_entry_becomes_the_section_of_its_workers_and_its_times_are_in_seconds() -> None:
    config: dict[str, dict[str, Any]] = {
        "Common": {"engine": "sim", "ttl": "10m"},
        "Models": {
            "org/qwen-2.5": {"model": "x.gguf", "engine": "llamacpp", "memory": "5 GB", "max_model_len": 8},
            "e5": {"ttl": 0, "pin": True, "aliases": ["embed"]},
        },
    }
    made = with_worker_sections(config)
    assert made["org-qwen-2-5"] == {
        "engine": "llamacpp",
        "model": "x.gguf",
        "max-model-len": 8,
        "served-model-name": "org/qwen-2.5",
    }
    assert made["e5"] == {"engine": "sim", "model": "e5", "served-model-name": "e5"}
    qwen, e5 = served_models(config)
    assert (qwen.component, qwen.settings.ttl_s, qwen.settings.memory_bytes) == (
        "org-qwen-2-5",
        600,
        5 * 10**9,
    )
    assert (e5.settings.ttl_s, e5.settings.pin, e5.names) == (0, True, ("e5", "embed"))


def test_resources_of_common_hold_for_every_model_without_resources_of_its_own() -> None:
    config: dict[str, dict[str, Any]] = {
        "Common": {"resources": {"gpu": 2}},
        "Models": {"ant": {}, "bee": {"resources": {"gpu": 1}}},
    }
    made = with_worker_sections(config)
    assert made["ant"]["ServiceArgs"] == {"resources": {"gpu": 2}}
    assert made["bee"]["ServiceArgs"] == {"resources": {"gpu": 1}}
    with pytest.raises(ConfigError, match=r"Common\.resources = 2: expected a mapping"):
        with_worker_sections({"Common": {"resources": 2}, "Models": {"ant": {}}})


def test_a_deployment_without_the_section_has_no_models_on_request() -> None:
    config = {"VllmWorker": {"engine": "sim"}}
    assert served_models(config) == ()
    assert with_worker_sections(config) == config


def test_components_are_names_for_keys_and_files_and_no_two_are_alike() -> None:
    names = ["a/b", "a b", "A-B", "etcd", "Frontend", "..."]
    components = components_of(dict.fromkeys(names))
    assert list(components.values()) == ["a-b", "a-b-2", "A-B-3", "etcd-2", "Frontend-2", "model"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a": 3}, r"Models\.a = 3"),
        ({"--a": {}}, "is no name"),
        ({"a\x1b[31m": {}}, "is no name"),
        ({"a": {"ttl": "soon"}}, r"Models\.a\.ttl"),
        ({"a": {"memory": "much"}}, r"Models\.a\.memory"),
        ({"a": {"aliases": [1]}}, r"Models\.a\.aliases"),
        ({"a": {"min_stays": 3}}, "Did you mean 'min-stay'"),
        ({"a": {"aliases": ["b"]}, "b": {}}, "'b' is a name of a and of b"),
        ({"a": {"not-beside": ["b"]}}, "'b' is no model"),
        ({"a": {"resources": {"gpus": 1}}}, r"Models\.a\.resources"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(models: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served_models({"Models": models})


def test_each_model_is_a_service_that_starts_with_no_worker(tmp_path: Path) -> None:
    config = with_worker_sections(
        {"Models": {"a": {"engine": "sim"}, "b": {"engine": "sim", "share": False}}}
    )
    graph = load_graph(GRAPH, tmp_path).with_models(components_of(config["Models"]))
    assert validate_config(graph, config) == []
    spec = resolve_graph(graph, config, "ns")
    assert [(each.name, each.model, each.first_workers, each.shares_memory) for each in spec.on_demand] == [
        ("a", "a", 0, True),
        ("b", "b", 0, False),
    ]
    assert graph.service("b").model == "b"


def test_an_option_that_no_engine_has_is_found_by_the_models_section(tmp_path: Path) -> None:
    config = with_worker_sections({"Models": {"a": {"engine": "sim", "speedup": 2}}})
    graph = load_graph(GRAPH, tmp_path).with_models({"a": "a"})
    with pytest.raises(ConfigError, match=r"a\.speedup: unknown option"):
        validate_config(graph, config)


def test_a_graph_with_a_planner_takes_models_of_which_one_is_planned_for_and_one_without_none(
    tmp_path: Path,
) -> None:
    graph = load_graph("graphs.agg:Frontend", tmp_path)
    with pytest.raises(GraphError, match="none of the 1 models has a planner"):
        graph.with_models({"a": "a"})
    assert "Planner" in [each.name for each in graph.with_models({"a": "a", "b": "b"}, ["a"]).services()]
    with pytest.raises(GraphError, match="has no planner, and a is to be planned for"):
        load_graph("dynaplan.components:Frontend", tmp_path).with_models({"a": "a"}, ["a"])


def test_a_models_name_may_have_dots_on_the_command_line() -> None:
    assert parse_overrides(["--Models.qwen-2.5.ttl=5m"]) == {"Models": {"qwen-2.5": {"ttl": "5m"}}}


def test_the_gpu_budget_of_its_planner_bounds_the_workers_of_a_model_where_nothing_else_does() -> None:
    models = {
        "a": {"Planner": {}},
        "b": {"Planner": {"max-gpu-budget": 3}},
        "c": {"max-workers": 2, "Planner": {}},
    }
    found = {each.name: each.settings.max_workers for each in served_models({"Models": models})}
    assert found == {"a": PlannerSettings.max_gpu_budget, "b": 3, "c": 2}
    assert served_models({"Models": {"a": {"Planner": None}}})[0].settings.max_workers == 1


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"Planner": "sla"}, "Models.a.Planner = 'sla': expected a mapping"),
        ({"Plannr": {}}, "Models.a.Plannr"),
    ],
)
def test_a_planner_of_a_model_is_a_mapping_and_a_slip_of_its_name_is_said(
    entry: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        served_models({"Models": {"a": entry}})


def test_options_of_a_models_planner_can_be_given_on_the_command_line() -> None:
    given = parse_overrides(["--Models.qwen-2.5.Planner.ttft=300", "--Models.Planner.ttl=5"])
    assert given == {"Models": {"qwen-2.5": {"Planner": {"ttft": 300}}, "Planner": {"ttl": 5}}}


DISAGGREGATED: dict[str, dict[str, Any]] = {
    "Common": {"engine": "sim", "memory": "40GB"},
    "Models": {
        "qwen": {
            "max-num-batched-tokens": 512,
            "resources": {"gpu": 1},
            "prefill": {"max-num-batched-tokens": 8192, "resources": {"gpu": 2}, "memory": "20GB"},
        },
        "qwen-prefill": {},
    },
}


def test_prefill_workers_have_a_section_with_the_options_of_their_model_and_over_them_their_own() -> None:
    made = with_worker_sections(DISAGGREGATED)
    shared = {"engine": "sim", "model": "qwen", "served-model-name": "qwen", "remote-prefill": True}
    assert prefill_components_of(DISAGGREGATED["Models"]) == {"qwen": "qwen-prefill-2"}
    assert made["qwen-prefill-2"] == {
        **shared,
        "max-num-batched-tokens": 8192,
        "ServiceArgs": {"resources": {"gpu": 2}},
    }
    assert made["qwen"] == {
        **shared,
        "max-num-batched-tokens": 512,
        "ServiceArgs": {"resources": {"gpu": 1}},
    }
    assert "remote-prefill" not in made["qwen-prefill"], "that is the name of another model"


def test_prefill_workers_need_memory_and_are_as_many_as_is_said_of_them() -> None:
    qwen, other = served_models(DISAGGREGATED)
    assert qwen.prefill
    assert (qwen.prefill.component, other.prefill) == ("qwen-prefill-2", None)
    assert (qwen.settings.memory_bytes, qwen.prefill.settings.memory_bytes) == (40 * 10**9, 20 * 10**9)
    many: dict[str, Any] = {
        "a": {"max-workers": 4, "requests-per-worker": 3, "prefill": {}},
        "b": {"prefill": {"max-workers": 2, "requests-per-worker": 5}},
        "c": {"Planner": {"max-gpu-budget": 6}, "prefill": {}},
    }
    found = [each.prefill.settings for each in served_models({"Models": many}) if each.prefill]
    assert [each.max_workers for each in found] == [1, 2, 6]
    assert [each.requests_per_worker for each in found] == [3, 5, 8]


def test_prefill_workers_are_a_service_of_their_model_that_starts_with_none(tmp_path: Path) -> None:
    config = with_worker_sections(DISAGGREGATED)
    models = config["Models"]
    graph = load_graph(GRAPH, tmp_path).with_models(
        components_of(models), prefill=prefill_components_of(models)
    )
    assert validate_config(graph, config) == []
    spec = resolve_graph(graph, config, "ns")
    assert [(each.name, each.role, each.model, each.gpus, each.first_workers) for each in spec.on_demand] == [
        ("qwen", Role.DECODE, "qwen", 1, 0),
        ("qwen-prefill", Role.DECODE, "qwen-prefill", 1, 0),
        ("qwen-prefill-2", Role.PREFILL, "qwen", 2, 0),
    ]


@pytest.mark.parametrize(
    ("prefill", "said"),
    [
        (True, r"Models\.a\.prefill = True: expected a mapping"),
        ({"ttl": 5}, r"Models\.a\.prefill\.ttl: it is one for all workers of a model"),
        ({"model": "b"}, r"Models\.a\.prefill\.model: it is one for all"),
        ({"max-local-prefill-length": 5}, r"Models\.a\.prefill\.max-local-prefill-length: it is one"),
        ({"max-worker": 2}, r"Models\.a\.prefill\.max-worker: unknown option"),
        ({"max-workers": 0}, r"Models\.a\.prefill\.max-workers is 0"),
        ({"resources": 2}, r"Models\.a\.prefill\.resources = 2"),
    ],
)
def test_what_is_wrong_with_prefill_workers_is_said_with_its_place(prefill: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        served_models({"Models": {"a": {"prefill": prefill}}})


@pytest.mark.parametrize("engine", ["sglang", "command"])
def test_an_engine_whose_models_can_have_no_prefill_workers_is_named_with_what_to_do(engine: str) -> None:
    with pytest.raises(ConfigError, match=rf"Models\.a\.prefill: engine is '{engine}'") as raised:
        with_worker_sections({"Models": {"a": {"engine": engine, "model": "m", "prefill": {}}}})
    assert "Leave it out" in raised.value.hint


def test_options_of_prefill_workers_can_be_given_on_the_command_line() -> None:
    given = parse_overrides(["--Models.qwen-2.5.prefill.memory=20GB"])
    assert given == {"Models": {"qwen-2.5": {"prefill": {"memory": "20GB"}}}}
