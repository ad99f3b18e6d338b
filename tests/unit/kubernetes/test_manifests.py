"""Manifests fit Kubernetes' schemas, and the operator's."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from lightkube import codecs
from lightkube.models.core_v1 import PodTemplateSpec

from dynaplan.kubernetes.manifests import (
    DYNAMO,
    NONE,
    OPERATORS,
    SharedServices,
    VolumeMount,
    manifests,
    too_large,
)
from dynaplan.kubernetes.store_documents import WORKER_METADATA, PodIdentity, PodRecord, worker_metadata
from dynaplan.kubernetes.templates import documents as filled
from tests.unit.kubernetes.deployments import DECODE, FRONTEND, deployment, found, of_kind

GRAPH_DEPLOYMENTS = Path(__file__).parents[2] / "fixtures" / "kubernetes" / "crd_dgd_reduced.json"
"""Of the definition of Dynamo's operator (ai-dynamo/dynamo, Apache-2.0): names, versions, and a component's
fields, its pod templates left open."""


def fits(schema: dict[str, Any], value: Any) -> bool:
    """Tell whether a value fits an OpenAPI schema, as far as the CRD uses them; unknown fields do not."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if not isinstance(value, kinds[schema["type"]]) or value not in schema.get("enum", [value]):
        return False
    if isinstance(value, int):
        return value >= schema.get("minimum", value)
    if isinstance(value, list):
        return all(fits(schema["items"], each) for each in value)
    if isinstance(value, str) or "properties" not in schema:
        return True
    known = schema["properties"]
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    has_all = set(schema.get("required", ())) <= value.keys()
    return has_all and all(fits(known[key], each) if key in known else is_open for key, each in value.items())


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_object_fits_kubernetes_schema_and_has_no_field_that_it_does_not_know(operator: str) -> None:
    volumes = (VolumeMount("models", "/models"),)
    documents = manifests(deployment(namespace="llm", volumes=volumes), operator)
    plain = [each for each in documents if each["kind"] != "DynamoGraphDeployment"]
    assert [codecs.from_dict(each).to_dict() for each in plain] == plain
    assert {each["metadata"]["namespace"] for each in documents} == {"llm"}


def test_by_the_clusters_discovery_each_role_has_a_service_that_dynamo_reads_too() -> None:
    documents = manifests(deployment(servers=SharedServices("kubernetes"), services=(FRONTEND, DECODE)))
    assert [codecs.from_dict(each).to_dict() for each in documents] == documents
    services = of_kind(documents, "Service")
    assert {each["metadata"]["name"]: each["spec"].get("clusterIP") for each in services} == {
        "box-decode": "None",
        "box-frontend": None,
    }
    for each in services:
        assert each["metadata"]["labels"]["nvidia.com/dynamo-discovery-backend"] == "kubernetes"
    assert not [each for each in documents if "nats" in each["metadata"]["name"]]


def test_a_graph_deployment_fits_the_operators_definition_and_its_pods_kubernetes() -> None:
    definition = json.loads(GRAPH_DEPLOYMENTS.read_text())
    versions = {each["name"]: each["schema"]["openAPIV3Schema"] for each in definition["spec"]["versions"]}
    graph = found(manifests(deployment(framework="vllm"), DYNAMO), "DynamoGraphDeployment", "box")
    assert fits(versions["v1beta1"], graph)
    assert not fits(versions["v1beta1"], {**graph, "spec": {"backendFramework": "none"}})
    components = graph["spec"]["components"]
    pods = [each["podTemplate"] for each in components]
    assert [PodTemplateSpec.from_dict(each).to_dict() for each in pods] == pods
    assert [(each["name"], each["type"], each["replicas"]) for each in components] == [
        ("frontend", "frontend", 1),
        ("decode", "decode", 2),
        ("prefill", "prefill", 1),
        ("planner", "planner", 1),
    ]
    assert ["scalingAdapter" in each for each in components] == [False, True, True, False]


def test_the_operator_is_told_the_engine_only_where_it_has_a_word_for_it() -> None:
    spec = found(manifests(deployment(), DYNAMO), "DynamoGraphDeployment", "box")["spec"]
    assert "backendFramework" not in spec


def test_the_planner_of_a_graph_deployment_knows_its_name() -> None:
    components = found(manifests(deployment(), DYNAMO), "DynamoGraphDeployment", "box")["spec"]["components"]
    environments = [each["podTemplate"]["spec"]["containers"][0]["env"] for each in components]
    named = [{"name": "DYN_PARENT_DGD_K8S_NAME", "value": "box"} in each for each in environments]
    assert named == [False, False, False, True]


def test_workers_are_found_by_their_role_and_never_need_a_gpu_more_while_they_are_replaced() -> None:
    workloads = of_kind(manifests(deployment()), "Deployment")
    roles = {
        each["metadata"]["name"]: each["metadata"]["labels"].get("dynaplan.io/role") for each in workloads
    }
    assert roles == {
        "box-nats": None,
        "box-frontend": None,
        "box-decode": "decode",
        "box-prefill": "prefill",
        "box-planner": None,
    }
    decode = found(workloads, "Deployment", "box-decode")["spec"]
    assert (decode["replicas"], decode["strategy"]["rollingUpdate"]["maxSurge"]) == (2, 0)
    assert decode["template"]["metadata"]["labels"]["dynaplan.io/role"] == "decode"
    assert found(workloads, "Deployment", "box-planner")["spec"]["strategy"] == {"type": "Recreate"}
    assert found(workloads, "Deployment", "box-frontend")["spec"]["strategy"]["rollingUpdate"] == {
        "maxSurge": 1,
        "maxUnavailable": 0,
    }


def test_what_selects_pods_are_labels_of_them() -> None:
    documents = manifests(deployment())
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(documents, "Deployment")]
    selectors = [each["spec"]["selector"]["matchLabels"] for each in of_kind(documents, "Deployment")]
    matches = [[selector.items() <= labels.items() for labels in pods].count(True) for selector in selectors]
    assert matches == [1] * len(pods)
    services = [each["spec"]["selector"] for each in of_kind(documents, "Service")]
    assert all(any(each.items() <= labels.items() for labels in pods) for each in services)


def test_without_a_planner_and_with_servers_of_others_there_is_nothing_for_them() -> None:
    servers = SharedServices("etcd", etcd_url="http://etcd:2379")
    documents = manifests(deployment(services=(FRONTEND, DECODE), servers=servers, planner_files={}))
    assert [each["kind"] for each in documents] == [
        *("Secret", "ConfigMap", "NetworkPolicy", "Service", "Deployment", "Deployment")
    ]


def test_files_of_the_planner_come_out_at_their_paths_byte_for_byte() -> None:
    documents = manifests(deployment(), NONE)
    stored = found(documents, "ConfigMap", "box-planner")["binaryData"]
    pod = found(documents, "Deployment", "box-planner")["spec"]["template"]["spec"]
    (volume,) = (each["configMap"] for each in pod["volumes"] if each["name"] == "planner")
    paths = {item["path"]: base64.b64decode(stored[item["key"]]) for item in volume["items"]}
    assert paths == {"profile/a/raw_data.npz": b"PK\x00\xff"}


def test_a_config_map_that_no_server_takes_is_named() -> None:
    assert too_large(manifests(deployment())) == []
    large = manifests(deployment(planner_files={"profile/p.json": bytes(800_000)}))
    assert too_large(large) == ["box-planner"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_object_is_in_the_namespace_that_is_named_and_else_in_kubectls(operator: str) -> None:
    assert {each["metadata"].get("namespace") for each in manifests(deployment(), operator)} == {None}


@pytest.mark.parametrize(("namespace", "label"), [("my_Box.1", "my_Box.1"), ("box-", None)])
def test_the_deployment_is_named_on_what_is_scaled_where_a_label_may_have_that_name(
    namespace: str, label: str | None
) -> None:
    decode = found(manifests(deployment(graph_namespace=namespace)), "Deployment", "box-decode")
    pods = decode["spec"]["template"]
    labels = [each["metadata"]["labels"].get("dynaplan.io/namespace") for each in (decode, pods)]
    assert labels == [label, label]


def test_what_selects_pods_does_not_change_with_versions_or_roles() -> None:
    decode = found(manifests(deployment()), "Deployment", "box-decode")
    assert decode["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/instance": "box",
        "app.kubernetes.io/component": "decode",
    }


def test_the_nats_server_of_our_own_asks_for_the_token_of_the_secret() -> None:
    documents = manifests(deployment())
    config = found(documents, "ConfigMap", "box-nats")["data"]["nats.conf"]
    assert "authorization { token: $NATS_AUTH_TOKEN }" in config
    pod = found(documents, "Deployment", "box-nats")["spec"]["template"]
    (token,) = pod["spec"]["containers"][0]["env"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "box-secret", "key": "nats-token"}}


def test_its_pod_is_replaced_with_another_token_for_those_that_call_it_have_that_one() -> None:
    annotations = [
        found(manifests(each), "Deployment", "box-nats")["spec"]["template"]["metadata"]["annotations"]
        for each in (deployment(), deployment(), deployment(secrets={"nats-token": "other"}))
    ]
    assert annotations[0] == annotations[1] != annotations[2]


def test_the_definition_of_the_workers_own_objects_fits_kubernetes_schema() -> None:
    (definition,) = filled("crd.yaml", {})
    assert codecs.from_dict(definition).to_dict() == definition


def test_what_a_worker_writes_fits_that_definition() -> None:
    definition = filled("crd.yaml", {})[0]["spec"]
    written = worker_metadata("worker-0", PodRecord(), None, PodIdentity("worker-0", "1-2-3"))
    (version,) = definition["versions"]
    assert fits(version["schema"]["openAPIV3Schema"], written)
    assert written["apiVersion"] == f"{definition['group']}/{version['name']}"
    assert written["kind"] == definition["names"]["kind"]
    assert WORKER_METADATA.plural == definition["names"]["plural"]
