"""A real API server takes all that `dynaplan export kubernetes` writes, and the rights in it are enough."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import KubernetesClient, Object, Resource
from dynaplan.kubernetes.connector import KubernetesConnector
from dynaplan.kubernetes.executor import Budget
from dynaplan.kubernetes.graph_deployment import GraphDeployment
from dynaplan.kubernetes.intent import IntentMap
from dynaplan.kubernetes.labelled_workloads import DEPLOYMENTS, LabelledWorkloads
from dynaplan.kubernetes.manifests import DYNAMO, NONE, OPERATORS, manifests
from dynaplan.kubernetes.workloads import Workloads
from dynaplan.planner.model import Decision
from dynaplan.util.errors import ClusterForbidden, ClusterNotFound
from tests.fakes.pods import running
from tests.fakes.polling import eventually
from tests.k8s.conftest import BINDINGS, ROLES, Cluster
from tests.unit.kubernetes.deployments import disagg, exported

NAME = "dynaplan"
"""The planner's account is that of the test's token then: ``dynaplan-planner``."""

PLURALS = {"NetworkPolicy": "networkpolicies"}
SECRETS = Resource("", "v1", "secrets")


def documents(operator: str, *overrides: str) -> list[Object]:
    """The manifests of a shipped graph with a profile and a history, as the command makes them."""
    overrides = overrides or ("--Planner.policy=load",)
    source = disagg(*overrides, "--VllmWorker.ServiceArgs.resources.memory=64Gi")
    return manifests(exported(source, name=NAME, volume_claims=("models:/models",)), operator)


def resource_of(document: Object) -> Resource:
    group, _, version = document["apiVersion"].rpartition("/")
    kind = document["kind"]
    return Resource(group, version, PLURALS.get(kind, f"{kind.lower()}s"))


async def create(client: KubernetesClient, document: Object, **parameters: str) -> Object:
    path = resource_of(document).path(client.namespace)
    return await client._object("POST", path, document, parameters=parameters)


def lost(given: Any, stored: Any, place: str = "") -> list[str]:
    """The fields that the server has dropped or changed; a Secret's text is stored as data."""
    if isinstance(given, Mapping):
        return [
            each
            for key, value in given.items()
            if key != "stringData"
            for each in (lost(value, stored[key], f"{place}.{key}") if key in stored else [f"{place}.{key}"])
        ]
    if isinstance(given, list):
        pairs = zip(given, stored, strict=True)
        return [each for one, other in pairs for each in lost(one, other, f"{place}[]")]
    return [] if given == stored else [f"{place}: {given} is {stored}"]


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_LOCAL_STATE_DIR", str(tmp_path))


async def cleared(cluster: Cluster) -> None:
    """Delete what an earlier test has applied, and the rights that the guide gives; no controller acts."""
    await cluster.rest()
    for document in [*documents(NONE), *documents(DYNAMO)]:
        with suppress(ClusterNotFound):
            await cluster.admin.delete(resource_of(document), document["metadata"]["name"])
    for resource in (ROLES, BINDINGS):
        for each in (await cluster.admin.list(resource))[0]:
            await cluster.admin.delete(resource, each["metadata"]["name"])


@pytest.mark.parametrize("operator", OPERATORS)
async def test_the_server_takes_every_object_whole_and_makes_none_in_a_dry_run(
    cluster: Cluster, operator: str
) -> None:
    await cleared(cluster)
    for document in documents(operator):
        stored = await create(cluster.admin, document, dryRun="All")
        assert lost(document, stored) == []
        with pytest.raises(ClusterNotFound):
            await cluster.admin.get(resource_of(document), document["metadata"]["name"])


@pytest.mark.parametrize("operator", OPERATORS)
async def test_the_planner_scales_what_was_applied_with_its_rights_and_may_do_no_more(
    cluster: Cluster, operator: str
) -> None:
    await cleared(cluster)
    for document in documents(operator):
        await create(cluster.admin, document)
    client = cluster.client("planner")
    place: Workloads = LabelledWorkloads(client, "box")
    if operator == DYNAMO:
        place = GraphDeployment(client, NAME, {})
    budget = Budget(8, {Role.DECODE: 1, Role.PREFILL: 1})
    connector = KubernetesConnector(place, IntentMap(client, "box"), budget, client=client)
    try:
        found = (await connector.components()).components
        assert [each.models for each in found] == [("meta-llama/Llama-3.1-8B-Instruct",)] * 2
        await connector.apply(Decision(PoolSizes(1, 1), PoolSizes(2, 3)))

        async def asked() -> tuple[int, int]:
            view = await place.read()
            return tuple(each.replicas for each in view.workloads)  # type: ignore[return-value]

        async def is_scaled() -> bool:
            return await asked() == (2, 3)

        await eventually(is_scaled)
        for refused in (
            client.get(SECRETS, f"{NAME}-secret"),
            client.list(SECRETS),
            client.delete(DEPLOYMENTS, f"{NAME}-decode"),
            client.patch(DEPLOYMENTS, f"{NAME}-frontend", {"spec": {"replicas": 9}}, "scale"),
            client.patch(DEPLOYMENTS, f"{NAME}-decode", {"spec": {"replicas": 9}}),
        ):
            with pytest.raises(ClusterForbidden):
                await refused
    finally:
        await connector.close()
        await cleared(cluster)


async def test_the_planner_that_was_exported_plans_for_what_was_applied(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cleared(cluster)
    applied = documents(NONE)
    for document in applied:
        await create(cluster.admin, document)
    account = {"KUBECONFIG": str(cluster.server.kubeconfig("planner"))}
    with running(applied, tmp_path / "pods", "127.0.0.1", account) as pods:
        await asyncio.to_thread(pods.pod(f"{NAME}-nats").ready)
        planner = pods.pod(f"{NAME}-planner")
        await asyncio.to_thread(planner.ready)
        await eventually(lambda: "1 starting" in planner.log.read_text())
        status = {"status": {"replicas": 1, "readyReplicas": 1}}
        await cluster.admin.patch(DEPLOYMENTS, f"{NAME}-decode", status, "status")
        await eventually(lambda: "planning for namespace box" in planner.log.read_text())
        assert await asyncio.to_thread(planner.delete) == 0
    await cleared(cluster)
