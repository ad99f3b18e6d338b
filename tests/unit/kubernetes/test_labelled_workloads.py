"""Workloads by label: Deployments, StatefulSets, LeaderWorkerSets.

The workloads that an export writes are the ones that the planner finds, scales and has the rights to.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.connector import KubernetesConnector
from dynaplan.kubernetes.executor import Budget
from dynaplan.kubernetes.intent import IntentMap
from dynaplan.kubernetes.labelled_workloads import LabelledWorkloads
from dynaplan.kubernetes.manifests import NONE, manifests
from dynaplan.planner.deployment import DuplicateSubComponentError, SubComponentNotFoundError
from dynaplan.planner.model import Decision
from dynaplan.util.errors import ClusterConflict, ClusterForbidden
from tests.fakes.kube_api import KubeApi
from tests.fakes.pod_controller import APPS, CORE, PodController
from tests.fakes.polling import eventually
from tests.unit.kubernetes.deployments import DECODE, PREFILL, deployment, found, of_kind

LWS = "/apis/leaderworkerset.x-k8s.io/v1"


@pytest.fixture
def api():
    return KubeApi()


@pytest.fixture
def cluster(api):
    return PodController(api)


def workloads(api: KubeApi, namespace: str = "ns") -> LabelledWorkloads:
    return LabelledWorkloads(api.client(), namespace)


def stateful_set(name: str, role: str, **labels: str) -> dict:
    return {
        "metadata": {"name": name, "labels": {"dynaplan.io/role": role, **labels}},
        "spec": {
            "replicas": 2,
            "selector": {
                "matchLabels": {"app": name},
                "matchExpressions": [
                    {"key": "tier", "operator": "In", "values": ["a", "b"]},
                    {"key": "track", "operator": "Exists"},
                ],
            },
            "template": {
                "spec": {"containers": [{"command": ["sh", "-c", "exec worker --served-model-name=m1"]}]}
            },
        },
        "status": {"readyReplicas": 1},
    }


async def test_a_deployment_tells_its_workers_their_gpus_and_their_model(api, cluster):
    cluster.add_deployment("prefill", 1, gpus=2)
    cluster.add_deployment("decode", 3)
    view = await workloads(api).read()
    prefill, decode = view.workloads
    assert (prefill.role, prefill.replicas, prefill.ready, prefill.gpus) == (Role.PREFILL, 1, 1, 2)
    assert (decode.replicas, decode.model, len(decode.pods), decode.has_costs) == (3, "tiny", 3, True)
    assert decode.counts().startup_s == 42
    assert view.not_ready == ""


async def test_a_stateful_set_has_the_pods_that_its_selector_matches(api):
    api.add(APPS, "statefulsets", stateful_set("decode", "decode"))
    for name, labels in (
        ("decode-0", {"app": "decode", "tier": "a", "track": "x"}),
        ("decode-1", {"app": "decode", "tier": "c", "track": "x"}),
        ("decode-2", {"app": "decode", "tier": "a"}),
    ):
        api.add(CORE, "pods", {"metadata": {"name": name, "labels": labels}, "status": {}})
    (decode,) = (await workloads(api).read()).workloads
    assert [pod["metadata"]["name"] for pod in decode.pods] == ["decode-0"]
    assert (decode.model, decode.has_costs) == ("m1", False)
    assert (decode.counts().ready, decode.counts().starting) == (1, 1)


async def test_a_leader_worker_set_counts_groups_and_the_gpus_of_all_their_pods(api):
    pod = {"spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": 8}}}]}}
    group = {"size": 2, "leaderTemplate": {"spec": {"containers": [{}]}}, "workerTemplate": pod}
    labels = {"dynaplan.io/role": "decode"}
    spec = {"replicas": 1, "leaderWorkerTemplate": group}
    api.add(LWS, "leaderworkersets", {"metadata": {"name": "big", "labels": labels}, "spec": spec})
    for index in range(3):
        metadata = {"name": f"big-{index}", "labels": {"leaderworkerset.sigs.k8s.io/name": "big"}}
        gone = {"deletionTimestamp": "2026-11-22T12:00:00Z"} if index == 2 else {}
        api.add(CORE, "pods", {"metadata": {**metadata, **gone}, "status": {}})
    (decode,) = (await workloads(api).read()).workloads
    assert (decode.gpus, decode.pods_of_one, decode.replicas) == (8, 2, 1)
    assert (decode.terminating, decode.holding) == (1, 2)


async def test_pods_that_have_ended_hold_nothing(api, cluster):
    cluster.add_deployment("decode", 2)
    api.change(CORE, "pods", "decode-1", status={"phase": "Succeeded"})
    (decode,) = (await workloads(api).read()).workloads
    assert [pod["metadata"]["name"] for pod in decode.pods] == ["decode-2"]


async def test_a_cluster_without_leader_worker_sets_is_one_without_them(api, cluster):
    api.served = {APPS, CORE}
    cluster.add_deployment("decode", 1)
    assert [each.name for each in (await workloads(api).read()).workloads] == ["decode"]


async def test_a_kind_that_was_read_before_has_not_gone_when_it_cannot_be_read(api, cluster):
    cluster.add_deployment("decode", 1)
    api.add(APPS, "statefulsets", stateful_set("prefill", "prefill"))
    found = workloads(api)
    await found.read()
    api.denied = {("list", "statefulsets")}
    with pytest.raises(ClusterForbidden):
        await found.read()
    api.denied = set()
    assert len((await found.read()).workloads) == 2


async def test_objects_of_another_deployment_are_left_alone(api):
    api.add(APPS, "statefulsets", stateful_set("a", "decode", **{"dynaplan.io/namespace": "one"}))
    api.add(APPS, "statefulsets", stateful_set("b", "decode", **{"dynaplan.io/namespace": "two"}))
    assert [each.name for each in (await workloads(api, "two").read()).workloads] == ["b"]


async def test_a_role_is_had_by_one_object_and_decode_by_one_at_least(api, cluster):
    with pytest.raises(SubComponentNotFoundError, match=r"dynaplan\.io/role: decode"):
        await workloads(api).read()
    cluster.add_deployment("decode", 1)
    api.add(APPS, "statefulsets", stateful_set("other", "decode"))
    with pytest.raises(DuplicateSubComponentError, match="deployments/decode, statefulsets/other"):
        await workloads(api).read()


async def test_kinds_that_may_not_be_read_are_left_out_while_decode_is_found(api, cluster, caplog):
    cluster.add_deployment("decode", 1)
    api.denied = {("list", "statefulsets"), ("list", "leaderworkersets")}
    found = workloads(api)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert [each.name for each in (await found.read()).workloads] == ["decode"]
    told = [line.split()[0] for line in caplog.messages if "not looked at" in line]
    assert told == ["statefulsets", "leaderworkersets"]
    api.remove(APPS, "deployments", "decode")
    with pytest.raises(ClusterForbidden, match="statefulsets"):
        await found.read()
    api.denied = set()
    with pytest.raises(SubComponentNotFoundError):
        await found.read()


async def test_a_missing_right_is_told_and_not_taken_for_an_empty_cluster(api, cluster):
    cluster.add_deployment("decode", 1)
    for denied in ("deployments", "pods"):
        api.denied = {("list", denied)}
        with pytest.raises(ClusterForbidden):
            await workloads(api).read()


async def test_the_number_is_set_by_the_scale_subresource_over_the_version_that_was_read(api, cluster):
    cluster.add_deployment("decode", 1)
    found = workloads(api)
    (decode,) = (await found.read()).workloads
    await found.scale(decode, 0)
    assert api.objects[APPS, "deployments", "decode"]["spec"]["replicas"] == 0
    ((method, path, body),) = api.writes()
    assert (method, path) == ("PATCH", f"{APPS}/namespaces/default/deployments/decode/scale")
    assert body["spec"] == {"replicas": 0}

    def meddle(method: str, path: str) -> None:
        if method == "PATCH":
            api.change(APPS, "deployments", "decode", status={"replicas": 7})

    api.before = meddle
    with pytest.raises(ClusterConflict):
        await found.scale(decode, 3)


PATH = re.compile(
    r"/apis?/(?:(?P<group>[^/]+)/)?v\w+/namespaces/[^/]+/(?P<kind>[^/?]+)"
    r"(?:/(?P<name>[^/?]+))?(?:/(?P<sub>\w+))?"
)
VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}

EXPORTED = deployment(
    services=tuple(replace(each, arguments=(*each.arguments, "--model=tiny")) for each in (DECODE, PREFILL))
)


def is_allowed(rules: list[Mapping[str, Any]], method: str, path: str) -> bool:
    """Tell whether a Role allows a request, as Kubernetes' authorizer does."""
    asked = PATH.match(path)
    assert asked, path
    name, verb = asked["name"] or "", VERBS.get(method) or ("get" if asked["name"] else "list")
    resource = f"{asked['kind']}/{asked['sub']}" if asked["sub"] else asked["kind"]
    return any(
        (asked["group"] or "") in each["apiGroups"]
        and resource in each["resources"]
        and verb in each["verbs"]
        and name in each.get("resourceNames", [name])
        for each in rules
    )


async def test_the_planner_scales_the_exported_deployments_with_the_exported_rights() -> None:
    api = KubeApi()
    planned = manifests(replace(EXPORTED, services=(*EXPORTED.services, *deployment().services[-1:])), NONE)
    for each in of_kind(planned, "Deployment"):
        api.add("/apis/apps/v1", "deployments", each)
    client = api.client()
    connector = KubernetesConnector(
        LabelledWorkloads(client, "box"),
        IntentMap(client, "box"),
        Budget(8, {Role.DECODE: 1, Role.PREFILL: 1}),
        client=client,
    )
    try:
        components = (await connector.components()).components
        assert [(each.role, each.name, each.models) for each in components] == [
            (Role.PREFILL, "box-prefill", ("tiny",)),
            (Role.DECODE, "box-decode", ("tiny",)),
        ]
        asked = await connector.desired()
        assert (asked.num_prefill_workers, asked.num_decode_workers) == (1, 2)
        await connector.apply(Decision(PoolSizes(1, 2), PoolSizes(2, 3)))

        def replicas(name: str) -> int:
            return int(api.objects["/apis/apps/v1", "deployments", name]["spec"]["replicas"])

        await eventually(lambda: (replicas("box-prefill"), replicas("box-decode")) == (2, 3))
    finally:
        await connector.close()
    rules = found(planned, "Role", "box-planner")["rules"]
    refused = {
        (method, path)
        for method, path, *_ in api.requests
        if "leaderworkerset" not in path and not is_allowed(rules, method, path)
    }
    assert refused == set()
    assert not is_allowed(rules, "GET", "/api/v1/namespaces/default/secrets/box-secret")
    assert not is_allowed(rules, "PATCH", "/apis/apps/v1/namespaces/default/deployments/other/scale")
