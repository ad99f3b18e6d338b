"""The workloads that an export writes are the ones that the planner finds, scales and has the rights to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dynaplan.cluster.manifests import NONE, manifests
from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.kubernetes.connector import KubernetesConnector
from dynaplan.planner.kubernetes.executor import Budget
from dynaplan.planner.kubernetes.intent import IntentMap
from dynaplan.planner.kubernetes.labelled_workloads import LabelledWorkloads
from dynaplan.planner.model import Decision
from tests.fakes.kube_api import KubeApi
from tests.fakes.polling import eventually
from tests.unit.cluster.deployments import DECODE, PREFILL, deployment, found, of_kind

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
        end=client.close,
    )
    try:
        components = (await connector.components()).components
        assert [(each.role, each.name, each.models) for each in components] == [
            (Role.PREFILL, "box-prefill", ("tiny",)),
            (Role.DECODE, "box-decode", ("tiny",)),
        ]
        asked = await connector.desired()
        assert (asked.num_prefill_workers, asked.num_decode_workers) == (1, 2)
        await connector.apply(Decision(Targets(1, 2), Targets(2, 3)))

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
