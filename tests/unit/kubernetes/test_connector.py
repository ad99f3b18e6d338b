"""Decisions on a cluster: written down whole, carried out within the budget, finished by any planner."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.connector import KubernetesConnector
from dynaplan.kubernetes.executor import Budget, DeletionCosts
from dynaplan.kubernetes.graph_deployment import GraphDeployment
from dynaplan.kubernetes.intent import IntentMap
from dynaplan.kubernetes.labelled_workloads import LabelledWorkloads
from dynaplan.planner.deployment import SubComponentNotFoundError
from dynaplan.planner.model import Decision
from dynaplan.util.errors import CapacityError, ClusterForbidden, ClusterUnavailable, TemporaryError
from tests.fakes.kube_api import KubeApi, httpx2
from tests.fakes.pod_controller import APPS, PodController

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

CORE = "/api/v1"
LATER_S = 5.0
"""In the time of the event loop: a pass of what carries decisions out, and one more."""


class Cluster:
    """One prefill and one decode worker with a GPU each, as Deployments; planners that come and go."""

    def __init__(self) -> None:
        self.api = KubeApi()
        self.pods = PodController(self.api)
        self.pods.add_deployment("prefill", 1)
        self.pods.add_deployment("decode", 1)
        self.planners: list[KubernetesConnector] = []
        self.loads: dict[str, WorkerLoad] = {}

    def planner(self, budget: float = 8, *, acts: bool = True) -> KubernetesConnector:
        client = self.api.client()
        self.planners.append(
            KubernetesConnector(
                LabelledWorkloads(client, "ns"),
                IntentMap(client, "ns"),
                Budget(budget, {Role.PREFILL: 1, Role.DECODE: 1}),
                before_removal=DeletionCosts(client, lambda: self.loads).mark,
                client=client,
                unix_time_s=lambda: 1000.0,
                acts=acts,
            )
        )
        return self.planners[-1]

    def asked(self) -> tuple[int, int]:
        found = (self.api.objects[APPS, "deployments", name] for name in ("prefill", "decode"))
        prefill, decode = (each["spec"]["replicas"] for each in found)
        return prefill, decode

    def note(self, **data: str) -> None:
        self.api.change(CORE, "configmaps", "dynaplan-ns", data=data)

    async def settle(self) -> None:
        await asyncio.sleep(LATER_S)
        self.pods.act()
        await asyncio.sleep(LATER_S)


@pytest.fixture
async def cluster():
    made = Cluster()
    yield made
    for planner in made.planners:
        await planner.close()


def to(prefill: int, decode: int, before: tuple[int, int] = (1, 1)) -> Decision:
    return Decision(PoolSizes(*before), PoolSizes(prefill, decode))


async def test_a_decision_is_carried_out_and_acknowledged_when_the_pods_are_ready(cluster):
    planner = cluster.planner()
    assert await planner.desired() == DesiredCounts(1, 1, -1, -1)
    number = await planner.apply(to(2, 3))
    await asyncio.sleep(LATER_S)
    assert cluster.asked() == (2, 3)
    assert await planner.desired() == DesiredCounts(2, 3, number, -1)
    assert ((await planner.fleet()).decode.ready, (await planner.fleet()).decode.starting) == (1, 2)
    await cluster.settle()
    assert await planner.desired() == DesiredCounts(2, 3, number, number)
    assert (await planner.fleet()).decode.ready == 3


async def test_ids_go_on_after_a_restart_of_the_planner(cluster):
    first = await cluster.planner().apply(to(1, 2))
    await cluster.settle()
    assert await cluster.planner().apply(to(1, 3, (1, 2))) == first + 1


async def test_what_one_planner_began_the_next_one_finishes(cluster):
    """The planner dies between the two requests of one decision."""
    planner = cluster.planner()

    def away_after_the_first(method: str, path: str) -> None:
        if path.endswith("prefill/scale") and method == "PATCH":
            cluster.api.before = gone

    def gone(method: str, path: str) -> None:
        raise httpx2.ConnectError("gone")

    cluster.api.before = away_after_the_first
    await planner.apply(to(2, 3))
    await asyncio.sleep(LATER_S)
    await planner.close()
    assert cluster.asked() == (2, 1)
    cluster.api.before = lambda method, path: None
    successor = cluster.planner()
    desired = await successor.desired()
    assert (desired.num_prefill_workers, desired.num_decode_workers, desired.is_pending) == (2, 3, True)
    await cluster.settle()
    assert cluster.asked() == (2, 3)
    assert not (await successor.desired()).is_pending


async def test_an_observer_that_does_not_act_finishes_nothing(cluster):
    planner = cluster.planner()
    cluster.api.denied = {("patch", "deployments")}
    await planner.apply(to(1, 2))
    await planner.close()
    cluster.api.denied = set()
    assert (await cluster.planner(acts=False).desired()).is_pending
    await asyncio.sleep(LATER_S)
    assert cluster.asked() == (1, 1)


async def test_removals_come_first_and_what_is_added_waits_for_the_gpus_of_pods_that_leave(cluster):
    cluster.api.change(APPS, "deployments", "prefill", spec={"replicas": 3})
    cluster.pods.act()
    cluster.pods.is_draining = True
    planner = cluster.planner(budget=4)
    await planner.apply(to(1, 3, (3, 1)))
    await asyncio.sleep(LATER_S)
    assert cluster.asked() == (1, 1)
    cluster.pods.act()
    await asyncio.sleep(LATER_S)
    assert cluster.asked() == (1, 1), "two pods still drain, on two GPUs of four"
    assert (await planner.fleet()).prefill.draining == 2
    assert (await planner.desired()).num_decode_workers == 3
    cluster.pods.drained("prefill")
    await cluster.settle()
    assert cluster.asked() == (1, 3)
    assert not (await planner.desired()).is_pending


async def test_as_many_are_added_as_the_gpus_that_are_free_allow(cluster):
    cluster.api.change(APPS, "deployments", "prefill", spec={"replicas": 2})
    cluster.pods.act()
    cluster.pods.is_draining = True
    planner = cluster.planner(budget=4)
    await planner.apply(to(1, 3, (2, 1)))
    await cluster.settle()
    assert cluster.asked() == (1, 2)
    cluster.pods.drained("prefill")
    await cluster.settle()
    assert cluster.asked() == (1, 3)


async def test_more_gpus_than_the_budget_are_refused_unless_more_are_asked_for_now(cluster):
    with pytest.raises(CapacityError, match=r"(?s)5 GPUs.*allows 4"):
        await cluster.planner(budget=4).apply(to(2, 3))
    cluster.api.change(APPS, "deployments", "decode", spec={"replicas": 6})
    assert await cluster.planner(budget=4).apply(to(1, 4, (1, 6))) >= 0


async def test_a_conflict_is_tried_again(cluster):
    planner, meddled = cluster.planner(), []

    def meddle(method: str, path: str) -> None:
        if method == "PATCH" and "decode/scale" in path and not meddled:
            meddled.append(path)
            cluster.api.change(APPS, "deployments", "decode", metadata={"annotations": {"x": "y"}})

    cluster.api.before = meddle
    await planner.apply(to(1, 2))
    await cluster.settle()
    assert (cluster.asked(), len(meddled)) == ((1, 2), 1)


async def test_of_two_planners_at_once_one_is_told_to_look_again(cluster):
    first, second = cluster.planner(), cluster.planner()
    await first.apply(to(1, 2))
    with pytest.raises(TemporaryError, match="somebody else"):
        await second.apply(to(1, 3))
    await cluster.settle()
    assert cluster.asked() == (1, 2)


async def test_a_decision_written_between_reading_and_writing_makes_apply_fail_whole(cluster):
    planner = cluster.planner()
    await planner.apply(to(1, 2))
    await cluster.settle()

    def overtake(method: str, path: str) -> None:
        if method == "PATCH" and path.endswith("dynaplan-ns"):
            cluster.api.before = lambda method, path: None
            cluster.note(decision_id="9", scaled_decision_id="9")

    cluster.api.before = overtake
    with pytest.raises(TemporaryError, match="somebody else"):
        await planner.apply(to(1, 3, (1, 2)))
    await cluster.settle()
    assert cluster.asked() == (1, 2)


async def test_kubectl_scale_is_the_last_writer_and_is_right(cluster, caplog):
    planner = cluster.planner(budget=3)
    cluster.pods.is_draining = True
    cluster.api.change(APPS, "deployments", "prefill", spec={"replicas": 2})
    cluster.pods.act()
    await planner.apply(to(1, 2, (2, 1)))
    await asyncio.sleep(LATER_S)
    cluster.pods.act()
    cluster.api.change(APPS, "deployments", "decode", spec={"replicas": 0})
    desired = await planner.desired()
    assert desired.num_decode_workers == 0
    with caplog.at_level(logging.WARNING):
        await cluster.settle()
    assert cluster.asked() == (1, 0)
    assert "by somebody else" in caplog.text


async def test_an_api_server_that_is_away_is_a_temporary_error_and_the_rest_is_done_when_it_is_back(cluster):
    planner = cluster.planner()
    await planner.desired()
    cluster.api.is_available = False
    for call in (
        planner.fleet(),
        planner.desired(),
        planner.holds(),
        planner.components(),
        planner.apply(to(1, 2)),
    ):
        with pytest.raises(ClusterUnavailable):
            await call
    cluster.api.is_available = True
    await planner.apply(to(1, 2))
    cluster.api.is_available = False
    await asyncio.sleep(60)
    assert cluster.asked() == (1, 1)
    cluster.api.is_available = True
    await cluster.settle()
    assert cluster.asked() == (1, 2)


async def test_an_error_that_nobody_expected_is_logged_and_the_decision_is_carried_out_later(cluster, caplog):
    planner = cluster.planner()

    def fail(method: str, path: str) -> None:
        if path.endswith("decode/scale"):
            raise KeyError("token")

    cluster.api.before = fail
    await planner.apply(to(1, 2))
    await asyncio.sleep(LATER_S)
    assert "KeyError: 'token'" in caplog.text
    cluster.api.before = lambda method, path: None
    await cluster.settle()
    assert cluster.asked() == (1, 2)


async def test_a_missing_right_to_scale_leaves_the_decision_unfinished_and_is_said_once(cluster, caplog):
    planner = cluster.planner()
    cluster.api.denied = {("patch", "deployments")}
    with caplog.at_level(logging.INFO):
        await planner.apply(to(1, 2))
        await asyncio.sleep(60)
    assert sum("cannot patch" in line for line in caplog.messages) == 1
    assert (await planner.desired()).is_pending
    cluster.api.denied = set()
    await cluster.settle()
    assert cluster.asked() == (1, 2)


async def test_a_missing_right_to_write_the_decision_down_scales_nothing(cluster):
    cluster.api.denied = {("create", "configmaps")}
    with pytest.raises(ClusterForbidden):
        await cluster.planner().apply(to(1, 2))
    await asyncio.sleep(LATER_S)
    assert cluster.asked() == (1, 1)


async def test_a_role_that_was_deleted_is_left_as_it_is_and_cannot_be_asked_for(cluster):
    planner = cluster.planner()
    cluster.api.denied = {("patch", "deployments")}
    await planner.apply(to(2, 2))
    cluster.api.remove(APPS, "deployments", "prefill")
    cluster.api.denied = set()
    await cluster.settle()
    assert cluster.api.objects[APPS, "deployments", "decode"]["spec"]["replicas"] == 2
    desired = await planner.desired()
    assert (desired.num_prefill_workers, desired.is_pending) == (-1, False)
    with pytest.raises(SubComponentNotFoundError):
        await planner.apply(to(1, 2, (0, 2)))


async def test_the_pod_that_holds_most_stays(cluster):
    planner = cluster.planner()
    await planner.apply(to(1, 3))
    await cluster.settle()
    addresses = [pod["status"]["podIP"] for pod in cluster.pods.pods("decode")]
    requests = dict(zip(addresses, (2, 0, 9), strict=True))
    cluster.loads = {host: WorkerLoad(running_requests=number) for host, number in requests.items()}
    await planner.apply(to(1, 1, (1, 3)))
    await cluster.settle()
    (left,) = cluster.pods.pods("decode")
    assert requests[left["status"]["podIP"]] == 9


async def test_holds_are_read_from_the_config_map(cluster, caplog):
    planner = cluster.planner()
    await planner.apply(to(1, 2))
    await cluster.settle()
    assert await planner.holds() == RoleHolds()
    holds = RoleHolds(Hold(2, until_s=999.0), Hold(2, 2, by="alice"))
    cluster.note(holds=holds.to_text())
    assert await planner.holds() == RoleHolds(decode=holds.decode)
    with pytest.raises(TemporaryError, match="hold"):
        await planner.apply(to(1, 3, (1, 2)))
    cluster.note(holds='{"decode": 7}')
    for _ in range(2):
        assert await planner.holds() == RoleHolds()
    assert sum("ignoring the holds" in line for line in caplog.messages) == 1


async def test_a_graph_deployment_that_is_not_ready_is_left_alone_but_for_a_decision_of_our_own(cluster):
    beta = "/apis/nvidia.com/v1beta1"
    ready: dict[str, Any] = {"type": "Ready", "status": "True"}
    component = {"name": "decode", "type": "decode", "replicas": 1}
    document = {
        "metadata": {"name": "dgd"},
        "spec": {"components": [component]},
        "status": {"conditions": [ready], "components": {"decode": {"readyReplicas": 1}}},
    }
    cluster.api.add(beta, "dynamographdeployments", document)
    client = cluster.api.client()
    planner = KubernetesConnector(
        GraphDeployment(client, "dgd", {}), IntentMap(client, "dgd"), Budget(8, {Role.DECODE: 1})
    )
    cluster.planners.append(planner)
    assert (await planner.fleet()).decode.ready == 1

    def condition(status: str) -> None:
        changed = {"conditions": [{**ready, "status": status, "message": "a pod is pending"}]}
        cluster.api.change(beta, "dynamographdeployments", "dgd", status=changed)

    condition("False")
    with pytest.raises(TemporaryError, match="not ready: its condition Ready is False: a pod is pending"):
        await planner.fleet()
    assert (await planner.components()).missing
    condition("True")
    await planner.apply(to(0, 2, (0, 1)))
    condition("False")
    await asyncio.sleep(LATER_S)
    assert (await planner.fleet()).decode.starting == 1
