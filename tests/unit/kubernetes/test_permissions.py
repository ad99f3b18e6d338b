"""The planner may scale what it is for, and nothing else; only the deployment's pods call its workers."""

from __future__ import annotations

import pytest

from dynaplan.kubernetes.manifests import DYNAMO, NONE, SharedServices, manifests
from tests.unit.kubernetes.deployments import DECODE, FRONTEND, PLANNER, deployment, found, of_kind


@pytest.mark.parametrize(
    ("operator", "resource", "names"),
    [
        (NONE, "deployments/scale", ["box-prefill", "box-decode"]),
        (DYNAMO, "dynamographdeploymentscalingadapters/scale", ["box-prefill", "box-decode"]),
        (DYNAMO, "dynamographdeployments", ["box"]),
    ],
)
def test_the_planner_may_change_what_it_scales_by_name(
    operator: str, resource: str, names: list[str]
) -> None:
    rules = found(manifests(deployment(), operator), "Role", "box-planner")["rules"]
    (rule,) = (each for each in rules if each["resources"] == [resource])
    assert rule["resourceNames"] == names
    assert rule["verbs"] == ["get", "patch"]


@pytest.mark.parametrize("operator", [NONE, DYNAMO])
def test_the_planner_may_not_read_secrets_nor_make_anything_but_its_own_config_map(operator: str) -> None:
    rules = found(manifests(deployment(), operator), "Role", "box-planner")["rules"]
    named = [each for each in rules if each["resources"] != ["configmaps"]]
    assert {verb for each in named for verb in each["verbs"]} <= {"get", "list", "patch"}
    assert not {"secrets", "*"} & {name for each in rules for name in each["resources"]}
    assert [(each["verbs"], each.get("resourceNames")) for each in rules if each not in named] == [
        (["create"], None),
        (["get", "patch"], ["dynaplan-box"]),
    ]


CLUSTER = SharedServices("kubernetes")


def test_frontends_and_workers_that_find_each_other_by_the_cluster_may_register_and_watch() -> None:
    documents = manifests(deployment(servers=CLUSTER))
    rules = found(documents, "Role", "box-discovery")["rules"]
    assert {name: rule["verbs"] for rule in rules for name in rule["resources"]} == {
        "dynamoworkermetadatas": ["create", "get", "update", "list", "watch"],
        "endpointslices": ["list", "watch"],
        "configmaps": ["get", "list", "watch"],
    }
    assert rules[-1]["resourceNames"] == ["dynaplan-store"]
    assert all(rule in found(documents, "Role", "box-planner")["rules"] for rule in rules)


def test_their_pods_have_that_account_and_others_none() -> None:
    def accounts(servers: SharedServices) -> list[object]:
        pods = of_kind(manifests(deployment(servers=servers, services=(FRONTEND, DECODE))), "Deployment")
        specs = [each["spec"]["template"]["spec"] for each in pods]
        return [(each.get("serviceAccountName"), each["automountServiceAccountToken"]) for each in specs]

    assert accounts(CLUSTER) == [("box-discovery", True)] * 2
    assert accounts(SharedServices("etcd", etcd_url="http://etcd:2379")) == [(None, False)] * 2


def test_what_is_not_there_is_not_named() -> None:
    documents = manifests(deployment(services=(FRONTEND, DECODE, PLANNER)))
    named = [each.get("resourceNames") for each in found(documents, "Role", "box-planner")["rules"]]
    assert named[:2] == [None, ["box-decode"]]


def test_the_binding_joins_account_and_role_in_one_namespace() -> None:
    documents = manifests(deployment(namespace="llm"))
    binding = found(documents, "RoleBinding", "box-planner")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "box-planner", "namespace": "llm"}]
    assert binding["roleRef"]["name"] == found(documents, "Role", "box-planner")["metadata"]["name"]


def test_workers_and_their_servers_are_called_from_inside_and_their_own_port_from_everywhere() -> None:
    policy = found(manifests(deployment()), "NetworkPolicy", "box-inside")["spec"]
    assert policy["podSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode", "nats"]
    inside, open_port = policy["ingress"]
    assert inside["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "box"}}}]
    assert open_port == {"ports": [{"port": "http", "protocol": "TCP"}]}
    other = manifests(deployment(servers=SharedServices("nats", "nats://nats:4222")))
    closed = found(other, "NetworkPolicy", "box-inside")["spec"]["podSelector"]["matchExpressions"][0]
    assert closed["values"] == ["prefill", "decode"]
