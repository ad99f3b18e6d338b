"""The connector against a real API server: decisions become pods, whatever comes between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.connector import KubernetesConnector
from dynaplan.kubernetes.executor import Budget, DeletionCosts
from dynaplan.kubernetes.graph_deployment import GraphDeployment
from dynaplan.kubernetes.intent import IntentMap
from dynaplan.kubernetes.labelled_workloads import DEPLOYMENTS, LabelledWorkloads
from dynaplan.planner.deployment import DynamoGraphDeploymentNotFoundError, SubComponentNotFoundError
from dynaplan.planner.model import Decision
from dynaplan.util.errors import ClusterConflict, ClusterForbidden, ClusterUnavailable, TemporaryError
from tests.fakes.polling import eventually
from tests.k8s.conftest import BINDINGS, Cluster
from tests.k8s.controllers import ADAPTERS, GRAPHS

GPUS = {Role.PREFILL: 1.0, Role.DECODE: 1.0}


class Planners:
    """Connectors with the planner's rights; all are closed at the end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.made: list[KubernetesConnector] = []
        self.loads: dict[str, WorkerLoad] = {}

    def of_deployments(self, budget: float = 8) -> KubernetesConnector:
        return self._of(lambda client: LabelledWorkloads(client, "llm"), budget)

    def of_graph(self, name: str = "my-dgd") -> KubernetesConnector:
        return self._of(lambda client: GraphDeployment(client, name, {}), 8)

    def _of(self, workloads: Any, budget: float) -> KubernetesConnector:
        client = self._cluster.client("planner")
        marks = DeletionCosts(client, lambda: self.loads)
        self.made.append(
            KubernetesConnector(
                workloads(client),
                IntentMap(client, "llm"),
                Budget(budget, GPUS),
                before_removal=marks.mark,
                client=client,
            )
        )
        return self.made[-1]


@pytest.fixture
async def planners(cluster: Cluster) -> AsyncIterator[Planners]:
    made = Planners(cluster)
    yield made
    for each in made.made:
        await each.close()


@pytest.fixture
async def deployments(cluster: Cluster, planners: Planners) -> KubernetesConnector:
    for role in ("prefill", "decode"):
        await cluster.add_deployment(role, 1)
    planner = planners.of_deployments()
    await ready(planner, 1, 1)
    return planner


def to(prefill: int, decode: int, before: tuple[int, int] = (1, 1)) -> Decision:
    return Decision(PoolSizes(*before), PoolSizes(prefill, decode))


async def ready(planner: KubernetesConnector, prefill: int, decode: int) -> None:
    async def is_so() -> bool:
        try:
            fleet, desired = await planner.fleet(), await planner.desired()
        except TemporaryError:
            return False
        return (fleet.prefill.ready, fleet.decode.ready) == (prefill, decode) and not desired.is_pending

    await eventually(is_so, 60)


async def test_deployments_go_up_and_down_and_decisions_are_acknowledged(deployments):
    number = await deployments.apply(to(2, 3))
    assert (await deployments.desired()).is_pending
    await ready(deployments, 2, 3)
    assert await deployments.apply(to(1, 1, (2, 3))) == number + 1
    await ready(deployments, 1, 1)


async def test_the_pod_with_most_requests_stays(cluster, planners, deployments):
    await deployments.apply(to(1, 3))
    await ready(deployments, 1, 3)
    addresses = [pod["status"]["podIP"] for pod in await cluster.controllers.pods("decode")]
    planners.loads = {each: WorkerLoad(running_requests=5 * (each == addresses[2]) + 1) for each in addresses}
    await deployments.apply(to(1, 1, (1, 3)))
    await ready(deployments, 1, 1)

    async def left() -> list[str]:
        return [pod["status"]["podIP"] for pod in await cluster.controllers.pods("decode")]

    await eventually(lambda: _is(left, [addresses[2]]))


async def test_a_stateful_set_loses_its_highest_numbers(cluster, planners):
    await cluster.add_stateful_set("decode", 1)
    planner = planners.of_deployments()
    await ready(planner, 0, 1)
    await planner.apply(to(0, 3, (0, 1)))
    await ready(planner, 0, 3)
    await planner.apply(to(0, 2, (0, 3)))
    await ready(planner, 0, 2)

    async def left() -> list[str]:
        return [pod["metadata"]["name"] for pod in await cluster.controllers.pods("decode")]

    await eventually(lambda: _is(left, ["decode-0", "decode-1"]))


async def _is(read: Any, expected: Any) -> bool:
    return bool(await read() == expected)


async def test_what_is_added_waits_for_pods_that_drain(cluster, planners, deployments):
    await deployments.apply(to(3, 1))
    await ready(deployments, 3, 1)
    cluster.controllers.is_draining = True
    planner = planners.of_deployments(budget=4)
    await planner.apply(to(1, 3, (3, 1)))

    async def is_draining() -> bool:
        return (await planner.fleet()).prefill.draining == 2

    await eventually(is_draining)
    assert await cluster.replicas("decode") == 1
    cluster.controllers.is_draining = False
    await ready(planner, 1, 3)


async def test_a_server_that_goes_and_comes_back_has_the_decision_finished(cluster, planners, deployments):
    cluster.controllers.is_draining = True
    await deployments.apply(to(1, 2))
    cluster.server.stop()
    with pytest.raises(ClusterUnavailable):
        await deployments.fleet()
    with pytest.raises(ClusterUnavailable):
        await deployments.apply(to(1, 3, (1, 2)))
    await asyncio.to_thread(cluster.server.start)
    await ready(deployments, 1, 2)


async def test_objects_that_others_change_all_the_time_are_scaled_nevertheless(cluster, deployments):
    async def meddle() -> None:
        for number in range(10_000):
            annotations = {"metadata": {"annotations": {"n": str(number)}}}
            await cluster.admin.patch(DEPLOYMENTS, "decode", annotations)

    meddling = asyncio.create_task(meddle())
    await deployments.apply(to(1, 4))
    await ready(deployments, 1, 4)
    meddling.cancel()
    await asyncio.gather(meddling, return_exceptions=True)


async def test_without_rights_nothing_changes_and_with_them_it_goes_on(cluster, deployments):
    await cluster.admin.delete(BINDINGS, "dynaplan-planner")

    async def is_forbidden() -> bool:
        try:
            await deployments.desired()
        except ClusterForbidden as error:
            return "Role" in str(error)
        return False

    await eventually(is_forbidden)
    with pytest.raises(ClusterForbidden):
        await deployments.apply(to(1, 2))
    await cluster.allow()

    async def is_allowed() -> bool:
        try:
            return bool(await deployments.desired())
        except ClusterForbidden:
            return False

    await eventually(is_allowed)
    assert await cluster.replicas("decode") == 1
    await deployments.apply(to(1, 2))
    await ready(deployments, 1, 2)


async def test_a_deleted_deployment_is_named(cluster, deployments):
    await cluster.admin.delete(DEPLOYMENTS, "decode")
    with pytest.raises(SubComponentNotFoundError, match="decode"):
        await deployments.desired()


async def add_graph(cluster: Cluster, *, adapters: bool) -> None:
    parts = (("Frontend", "frontend"), ("prefill", "prefill"), ("decode", "decode"))
    components = [{"name": name, "type": kind, "replicas": 1} for name, kind in parts]
    kind = {"apiVersion": "nvidia.com/v1beta1", "kind": "DynamoGraphDeployment"}
    spec = {"backendFramework": "vllm", "components": components}
    await cluster.admin.create(GRAPHS, {**kind, "metadata": {"name": "my-dgd"}, "spec": spec})
    for name in ("prefill", "decode") if adapters else ():
        await cluster.admin.create(
            ADAPTERS,
            {
                "apiVersion": "nvidia.com/v1beta1",
                "kind": "DynamoGraphDeploymentScalingAdapter",
                "metadata": {"name": f"my-dgd-{name}"},
                "spec": {"replicas": 1, "dgdRef": {"name": "my-dgd", "serviceName": name}},
            },
        )


@pytest.mark.parametrize("adapters", [True, False])
async def test_a_graph_deployment_goes_up_and_down_with_adapters_and_without(cluster, planners, adapters):
    await add_graph(cluster, adapters=adapters)
    planner = planners.of_graph()
    await ready(planner, 1, 1)
    await planner.apply(to(2, 3))
    await ready(planner, 2, 3)
    graph = await cluster.admin.get(GRAPHS, "my-dgd")
    assert [each["replicas"] for each in graph["spec"]["components"]] == [1, 2, 3]
    await planner.apply(to(0, 1, (2, 3)))
    await ready(planner, 0, 1)
    assert (await planner.components()).components[0].models == ("tiny",)


async def test_a_missing_graph_deployment_is_named(planners):
    with pytest.raises(DynamoGraphDeploymentNotFoundError):
        await planners.of_graph("other").desired()


async def test_components_that_move_before_they_are_patched_are_a_conflict(cluster, planners, monkeypatch):
    await add_graph(cluster, adapters=False)
    planner = planners.of_graph()
    await ready(planner, 1, 1)
    client = cluster.client("planner")
    found = GraphDeployment(client, "my-dgd", {})
    decode = (await found.read()).of(Role.DECODE)
    assert decode
    patch = client.patch

    async def moved(resource: Any, name: str, changes: Any, subresource: str = "") -> Any:
        if isinstance(changes, list):
            graph = await cluster.admin.get(GRAPHS, "my-dgd")
            reversed_components = graph["spec"]["components"][::-1]
            await cluster.admin.patch(GRAPHS, "my-dgd", {"spec": {"components": reversed_components}})
        return await patch(resource, name, changes, subresource)

    monkeypatch.setattr(client, "patch", moved)
    with pytest.raises(ClusterConflict):
        await found.scale(decode, 3)
    monkeypatch.undo()
    await found.scale(decode, 3)
    await ready(planner, 1, 3)
    await client.close()
