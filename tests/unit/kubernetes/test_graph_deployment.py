"""Workloads of Dynamo's operator: read and scaled with the requests that Dynamo's own connector makes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.graph_deployment import GraphDeployment
from dynaplan.kubernetes.workloads import WorkloadView
from dynaplan.planner.deployment import (
    DuplicateSubComponentError,
    DynamoGraphDeploymentNotFoundError,
    SubComponentNotFoundError,
)
from dynaplan.util.errors import ClusterConflict, ClusterNotFound
from tests.fakes.kube_api import KubeApi

RECORDINGS = Path(__file__).parents[2] / "fixtures" / "kubernetes"
BETA, ALPHA = "/apis/nvidia.com/v1beta1", "/apis/nvidia.com/v1alpha1"
DGD, ADAPTERS = "dynamographdeployments", "dynamographdeploymentscalingadapters"


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines()]


def writes_of(name: str, replicas: dict[str, int]) -> list[tuple[str, str, Any]]:
    """The recorded requests that set these numbers, the first time."""
    found, asked = [], dict(replicas)
    for each in recorded(name):
        if each["method"] == "PATCH":
            text = json.dumps([each["path"], each["body"]])
            names = [key for key, number in replicas.items() if key in text and f": {number}" in text]
            if names and any(key in asked for key in names):
                found.append((each["method"], each["path"], each["body"]))
                if each["status"] == 200:
                    del asked[names[0]]
    return found


def deployment_of(name: str) -> dict[str, Any]:
    found = copy.deepcopy(recorded(name)[0]["answer"])
    found["metadata"].pop("managedFields", None)
    return found


@pytest.fixture
def api():
    return KubeApi()


def graph(api: KubeApi, **legacy: str) -> GraphDeployment:
    return GraphDeployment(api.client(), "my-dgd", {Role.DECODE: [legacy["decode"]]} if legacy else {})


def add_adapters(api: KubeApi, version: str = BETA) -> None:
    for name in ("prefill", "decode"):
        spec = {"replicas": 1, "dgdRef": {"name": "my-dgd", "serviceName": name}}
        api.add(version, ADAPTERS, {"metadata": {"name": f"my-dgd-{name}"}, "spec": spec})


async def scale_both(found: GraphDeployment, prefill: int, decode: int) -> WorkloadView:
    view = await found.read()
    for workload, replicas in zip(view.workloads, (prefill, decode), strict=True):
        await found.scale(workload, replicas)
    return await found.read()


async def test_without_adapters_the_writes_are_those_of_the_original(api):
    api.add(BETA, DGD, deployment_of("plain"))
    view = await scale_both(graph(api), 2, 3)
    assert api.writes() == writes_of("plain", {"prefill": 2, "decode": 3})
    assert [each.replicas for each in view.workloads] == [2, 3]


async def test_with_adapters_the_writes_are_those_of_the_original(api):
    api.add(BETA, DGD, deployment_of("adapters"))
    add_adapters(api)
    view = await scale_both(graph(api), 2, 3)
    assert api.writes() == writes_of("adapters", {"prefill": 2, "decode": 3})
    assert [each.replicas for each in view.workloads] == [2, 3], "the adapter says it before the operator"


async def test_what_the_status_says_is_read(api):
    api.add(BETA, DGD, deployment_of("plain"))
    view = await graph(api).read()
    assert [(each.name, each.model, each.gpus, each.ready) for each in view.workloads] == [
        ("prefill", "tiny", 1, 1),
        ("decode", "tiny", 1, 1),
    ]
    assert view.not_ready == ""


async def test_what_the_status_does_not_say_is_in_the_pod_template(api):
    document = deployment_of("plain")
    document["status"]["components"] = {}
    document["spec"]["components"][2]["multinode"] = {"nodeCount": 2}
    api.add(BETA, DGD, document)
    decode = (await graph(api).read()).of(Role.DECODE)
    assert decode and (decode.model, decode.gpus, decode.pods_of_one, decode.ready) == ("tiny", 2, 2, 0)


async def test_pods_belong_to_a_component_by_their_labels(api):
    api.add(BETA, DGD, deployment_of("plain"))
    whose = "nvidia.com/dynamo-graph-deployment-name"
    for name, labels in (
        ("a", {"nvidia.com/dynamo-component": "Decode", whose: "my-dgd"}),
        ("b", {"nvidia.com/dynamo-component-type": "decode", whose: "my-dgd"}),
        ("c", {"nvidia.com/dynamo-sub-component-type": "prefill", whose: "my-dgd"}),
        ("d", {"nvidia.com/dynamo-component": "decode", whose: "other"}),
    ):
        api.add("/api/v1", "pods", {"metadata": {"name": name, "labels": labels}, "status": {}})
    view = await graph(api).read()
    names = {each.name: [pod["metadata"]["name"] for pod in each.pods] for each in view.workloads}
    assert names == {"prefill": ["c"], "decode": ["a", "b"]}


async def test_a_deployment_that_is_not_ready_says_why(api):
    api.add(BETA, DGD, deployment_of("not_ready"))
    assert "Ready is False" in (await graph(api).read()).not_ready
    api.change(BETA, DGD, "my-dgd", status={"conditions": []})
    assert "not there" in (await graph(api).read()).not_ready
    api.change(BETA, DGD, "my-dgd", status={"rollingUpdate": {"phase": "InProgress"}})
    assert (await graph(api).read()).not_ready == "a rolling update is InProgress"


async def test_a_missing_deployment_is_named_as_the_original_names_it(api):
    with pytest.raises(
        DynamoGraphDeploymentNotFoundError,
        match=r"Parent DynamoGraphDeployment not found \(name: 'my-dgd' in namespace 'default'\)",
    ):
        await graph(api).read()


def alpha_deployment(**services: dict[str, Any]) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "True"}]
    return {
        "metadata": {"name": "my-dgd"},
        "spec": {"services": services},
        "status": {"conditions": conditions},
    }


def service(kind: str = "", replicas: int = 1, model: str = "tiny") -> dict[str, Any]:
    container = {"args": [f"python3 -m dynamo.vllm --model path --served-model-name {model}"]}
    types = {"subComponentType": kind} if kind else {}
    return {
        "componentType": "worker",
        **types,
        "replicas": replicas,
        "resources": {"limits": {"gpu": "4"}},
        "extraPodSpec": {"mainContainer": container},
    }


async def test_the_older_version_is_read_and_patched_by_service(api):
    api.served = {ALPHA, "/api/v1"}
    services = {
        "Pre": service("prefill"),
        "Dec": service("decode", 2),
        "Frontend": {"componentType": "frontend"},
    }
    api.add(ALPHA, DGD, alpha_deployment(**services))
    found = graph(api)
    view = await found.read()
    assert [(each.name, each.replicas, each.gpus, each.model) for each in view.workloads] == [
        ("Pre", 1, 4, "tiny"),
        ("Dec", 2, 4, "tiny"),
    ]
    await found.scale(view.workloads[1], 3)
    assert api.writes()[-1][2] == {"spec": {"services": {"Dec": {"replicas": 3}}}}
    assert api.objects[ALPHA, DGD, "my-dgd"]["spec"]["services"]["Dec"]["replicas"] == 3


async def test_the_older_versions_adapters_come_first(api):
    api.served = {ALPHA, "/api/v1"}
    api.add(ALPHA, DGD, alpha_deployment(prefill=service("prefill"), decode=service("decode")))
    add_adapters(api, ALPHA)
    await scale_both(graph(api), 2, 3)
    assert {path.rsplit("/", 1)[1] for _, path, _ in api.writes()} == {"scale"}


@pytest.mark.parametrize(
    ("services", "expected"),
    [
        (
            {"VllmPrefillWorker": service(), "VllmDecodeWorker": service()},
            ["VllmPrefillWorker", "VllmDecodeWorker"],
        ),
        ({"prefill": service(), "decode": service()}, ["prefill", "decode"]),
        ({"TRTLLMWorker": service()}, ["TRTLLMWorker"]),
        ({"Mine": service(), "decode": service()}, ["Mine"]),
    ],
)
async def test_where_no_component_says_its_part_the_legacy_names_do(api, services, expected):
    api.served = {ALPHA, "/api/v1"}
    api.add(ALPHA, DGD, alpha_deployment(**services))
    assert [each.name for each in (await graph(api, decode="Mine").read()).workloads] == expected


async def test_an_aggregated_graphs_workers_are_scaled_as_decode(api):
    document = deployment_of("plain")
    document["spec"]["components"] = [{"name": "w", "type": "worker", "replicas": 2}]
    api.add(BETA, DGD, document)
    (worker,) = (await graph(api).read()).workloads
    assert (worker.role, worker.name, worker.replicas) == (Role.DECODE, "w", 2)


async def test_a_role_without_a_component_and_with_several_are_errors(api):
    document = deployment_of("plain")
    document["spec"]["components"] = [{"name": "a", "type": "decode"}, {"name": "b", "type": "decode"}]
    api.add(BETA, DGD, document)
    with pytest.raises(DuplicateSubComponentError, match="a, b"):
        await graph(api).read()
    api.change(BETA, DGD, "my-dgd", spec={"components": [{"name": "x", "type": "frontend"}]})
    with pytest.raises(SubComponentNotFoundError, match="subComponentType"):
        await graph(api).read()


async def test_components_that_moved_between_reading_and_writing_are_a_conflict(api):
    api.add(BETA, DGD, deployment_of("plain"))
    found = graph(api)
    decode = (await found.read()).of(Role.DECODE)
    assert decode

    def swap(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith("/my-dgd"):
            api.objects[BETA, DGD, "my-dgd"]["spec"]["components"].reverse()

    api.before = swap
    with pytest.raises(ClusterConflict):
        await found.scale(decode, 3)
    api.before = lambda method, path: None
    api.change(BETA, DGD, "my-dgd", spec={"components": [{"name": "Planner", "type": "planner"}]})
    with pytest.raises(ClusterNotFound, match="no component decode"):
        await found.scale(decode, 3)
