"""From a graph and its configuration to what the supervisor starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import graphs
from dynaplan.graph.model import ServiceSpec
from dynaplan.graph.resolve import resolve_graph
from dynaplan.sdk import Graph, load_graph
from dynaplan.util.errors import ConfigError, GraphError
from tests.fakes.graph_files import Write

WORKER = """
    from dynaplan.sdk import service

    @service(resources={{"gpu": "1"}}, workers=2, envs={{"A": "decorator", "B": "kept"}}, {more})
    class Worker: pass
"""


@pytest.fixture
def graph(write: Write, tmp_path: Path) -> Graph:
    write("resolved.py", WORKER.format(more=""))
    return load_graph("resolved:Worker", tmp_path)


@pytest.fixture(scope="module")
def disagg() -> Graph:
    return load_graph("graphs.disagg:Frontend", Path(graphs.__file__).parents[1])


def worker(graph: Graph, **service_args: Any) -> ServiceSpec:
    return resolve_graph(graph, {"Worker": {"ServiceArgs": service_args}}).services[0]


def test_the_decorator_counts_where_the_configuration_says_nothing(graph: Graph) -> None:
    spec = resolve_graph(graph, {}).services[0]
    assert (spec.workers, spec.gpus, spec.envs) == (2, 1, {"A": "decorator", "B": "kept"})


def test_the_configuration_is_merged_deeply_over_the_decorator(graph: Graph) -> None:
    spec = worker(graph, workers=3, envs={"A": 7, "C": "new"})
    assert (spec.workers, spec.gpus) == (3, 1)
    assert spec.envs == {"A": "7", "B": "kept", "C": "new"}
    assert worker(graph, workers=None, resources=None, envs=None).workers == 2


@pytest.mark.parametrize(
    ("written", "gpus"), [(2, 2), ("4", 4), (0.5, 0.5), ("0.25", 0.25), (2.0, 2), (0, 0)]
)
def test_gpus_may_be_whole_or_fractional_numbers_or_text(graph: Graph, written: Any, gpus: float) -> None:
    assert worker(graph, resources={"gpu": written}).gpus == gpus


@pytest.mark.parametrize("written", [-1, "-1", 1.5, "many", True, [1], float("nan"), float("inf")])
def test_gpus_that_cannot_be_given_are_refused(graph: Graph, written: Any) -> None:
    with pytest.raises(ConfigError, match=r"Worker.ServiceArgs.resources.gpu = "):
        worker(graph, resources={"gpu": written})


def test_the_number_of_workers_may_be_text(graph: Graph) -> None:
    assert worker(graph, workers="2").workers == 2


@pytest.mark.parametrize("written", [0, -1, "0", "two", 1.5, True, [1], "²"])
def test_fewer_than_one_worker_is_refused(graph: Graph, written: Any) -> None:
    with pytest.raises(ConfigError, match=r"Worker.ServiceArgs.workers = .*at least 1"):
        worker(graph, workers=written)


def test_the_namespace_is_the_given_one_else_the_decorators_else_dynamo(write: Write, tmp_path: Path) -> None:
    write("plain_namespace.py", WORKER.format(more=""))
    write("lab_namespace.py", WORKER.format(more='dynamo={"namespace": "lab"}'))
    plain, lab = (load_graph(f"{name}_namespace:Worker", tmp_path) for name in ("plain", "lab"))
    assert resolve_graph(plain, {}).namespace == "dynamo"
    assert resolve_graph(lab, {}).namespace == "lab"
    assert resolve_graph(lab, {}, "other").namespace == "other"


@pytest.mark.parametrize("namespace", ["a/b", "..", "a b", "-x", "x" * 64, "a.b", "é"])
def test_a_namespace_that_cannot_be_part_of_a_path_or_queue_name_is_refused(
    graph: Graph, namespace: str
) -> None:
    with pytest.raises(ConfigError, match="not a usable name"):
        resolve_graph(graph, {}, namespace)


TWO = """
    from dynaplan.sdk import depends, service

    @service(dynamo={{"namespace": "one", "component_type": "{kind}"}})
    class Low: pass

    @service(dynamo={{"namespace": "{namespace}", "component_type": "{kind}"}}, in_process_of={host})
    class High:
        low = depends(Low)
"""


def test_two_namespaces_in_one_graph_are_refused_unless_one_is_chosen(write: Write, tmp_path: Path) -> None:
    write("two_namespaces.py", TWO.format(namespace="two", kind="", host=None))
    graph = load_graph("two_namespaces:High", tmp_path)
    with pytest.raises(GraphError, match="All components must have the same namespace, got"):
        resolve_graph(graph, {})
    assert resolve_graph(graph, {}, "mine").namespace == "mine"


def test_two_planners_are_refused(write: Write, tmp_path: Path) -> None:
    write("two_planners.py", TWO.format(namespace="one", kind="planner", host=None))
    with pytest.raises(GraphError, match="More than one planner found in the pipeline: High, Low"):
        resolve_graph(load_graph("two_planners:High", tmp_path), {})


def test_a_service_in_the_process_of_one_that_is_absent_is_refused(write: Write, tmp_path: Path) -> None:
    write("homeless.py", TWO.format(namespace="one", kind="", host="'Frontend'"))
    with pytest.raises(GraphError, match="High runs in the process of Frontend, which this graph lacks"):
        resolve_graph(load_graph("homeless:High", tmp_path), {})


def test_a_worker_with_parallel_ranks_gets_a_gpu_for_each(disagg: Graph) -> None:
    config = {
        "Common": {"tensor_parallel_size": 4},
        "VllmWorker": {"common-configs": ["tensor-parallel-size"], "pipeline-parallel-size": 2},
        "PrefillWorker": {"tp-size": 2, "ServiceArgs": {"resources": {"gpu": 2}}},
    }
    found = {service.name: service.gpus for service in resolve_graph(disagg, config).services}
    assert (found["VllmWorker"], found["PrefillWorker"]) == (8, 2)


@pytest.mark.parametrize("gpus", [2, 8, 0.5])
def test_another_number_of_gpus_than_parallel_ranks_is_a_contradiction(disagg: Graph, gpus: float) -> None:
    sizes = {"tp-size": 2, "data-parallel-size": 2}
    config = {"VllmWorker": {**sizes, "ServiceArgs": {"resources": {"gpu": gpus}}}}
    said = rf"VllmWorker: tp-size 2 times data-parallel-size 2 needs 4 GPUs, but resources.gpu is {gpus}"
    with pytest.raises(ConfigError, match=said):
        resolve_graph(disagg, config)


def test_a_worker_without_gpus_may_have_any_number_of_ranks(disagg: Graph) -> None:
    config = {"VllmWorker": {"tensor-parallel-size": 2, "ServiceArgs": {"resources": {"gpu": 0}}}}
    (found,) = (each.gpus for each in resolve_graph(disagg, config).services if each.name == "VllmWorker")
    assert found == 0
