"""The graphs that ship with dynaplan, alone and beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphs
from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.worker import SimOptions, WorkerSettings
from dynaplan.config.stock import WORKER, LlamaCppOptions, VllmOptions
from dynaplan.graph.config import find_config_file, read_config, resolve_graph, validate_config
from dynaplan.graph.lifecycle import Role
from dynaplan.sdk import Graph, ServiceConfig, load_graph

STOCK = {
    "agg": {"Frontend", "Planner", "Processor", "VllmWorker"},
    "agg_router": {"Frontend", "Planner", "Processor", "Router", "VllmWorker"},
    "disagg": {"Frontend", "Planner", "Processor", "VllmWorker", "PrefillWorker"},
    "disagg_router": {"Frontend", "Planner", "Processor", "Router", "VllmWorker", "PrefillWorker"},
    "hello_world": {"Frontend", "Middle", "Backend"},
}


def stock(name: str) -> Graph:
    return load_graph(f"graphs.{name}:Frontend", Path(graphs.__file__).parents[1])


def test_every_graph_runs_its_own_services_though_all_are_imported_in_one_process() -> None:
    for _ in range(2):
        found = {name: {service.name for service in stock(name).services()} for name in STOCK}
        assert found == STOCK


def test_the_router_stands_between_processor_and_worker_only_where_it_is_linked() -> None:
    assert set(stock("agg_router").service("Processor").dependencies) == {"router"}
    assert set(stock("agg").service("Processor").dependencies) == {"worker"}


@pytest.mark.parametrize("name", STOCK)
def test_the_yaml_beside_a_graph_is_found_and_has_no_warnings(name: str, tmp_path: Path) -> None:
    graph = stock(name)
    file = find_config_file(f"{name}.yaml", tmp_path, graph)
    config = read_config(file)
    assert file.parent == Path(graphs.__file__).parent
    assert validate_config(graph, config) == []
    assert {each.name for each in resolve_graph(graph, config).services} == STOCK[name]


@pytest.mark.parametrize(
    "file", sorted(Path(graphs.__file__).parent.glob("*.yaml")), ids=lambda file: file.stem
)
def test_every_yaml_that_ships_has_no_warnings_with_the_graph_that_it_is_for(file: Path) -> None:
    own = file.stem if file.stem in STOCK else "disagg" if "disagg" in file.stem else "agg"
    graph, config = stock(own), read_config(file)
    assert validate_config(graph, config) == []
    assert {each.name for each in resolve_graph(graph, config).services} == STOCK[own]
    assert set(config) <= STOCK[own] | {"Common"}


def test_every_worker_of_a_yaml_of_a_real_engine_takes_engine_and_model_from_common() -> None:
    folder = Path(graphs.__file__).parent
    files = [file for file in folder.glob("*.yaml") if file.stem not in STOCK]
    assert len(files) >= 2
    for file in files:
        config = ServiceConfig(read_config(file, ["--Common.model=/m"]))
        for worker in {"VllmWorker", "PrefillWorker"} & set(config):
            assert config.require(worker, "model") == "/m", file
            assert config.require(worker, "engine") != "sim", file


def test_stock_services_resolve_to_processes_roles_and_gpus() -> None:
    spec = resolve_graph(stock("disagg_router"), {})
    assert spec.namespace == "dynamo"
    assert spec.services[0].name == "Frontend"
    assert {each.name: (each.role, each.gpus, each.in_process_of) for each in spec.services} == {
        "Frontend": (Role.FRONTEND, 0, ""),
        "Planner": (Role.PLANNER, 0, ""),
        "Processor": (Role.SERVICE, 0, "Frontend"),
        "Router": (Role.SERVICE, 0, "Frontend"),
        "VllmWorker": (Role.DECODE, 1, ""),
        "PrefillWorker": (Role.PREFILL, 1, ""),
    }


def test_every_option_of_an_engine_is_known_to_its_workers() -> None:
    for settings in (SimOptions, VllmOptions, LlamaCppOptions, WorkerSettings):
        assert set(WORKER) >= set(options_of(settings))


async def test_hello_world_answers_through_all_three_services() -> None:
    graph = stock("hello_world")
    instances: dict[str, Any] = {each.name: each.inner() for each in graph.services()}
    for each in graph.services():
        for attribute, dependency in each.dependencies.items():
            each.bind(instances[each.name], attribute, instances[dependency.name])
    answer = [item async for item in instances["Frontend"].generate({"text": "test"})]
    assert answer == ["Frontend: Middle: Backend: test-mid-back"]
    assert [each.name for each in graph.entry.endpoints.values() if each.is_public] == ["generate"]
