"""Pods are marked by what their workers hold, just before some of them are removed."""

from __future__ import annotations

import logging

import pytest

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.executor import DELETION_COST_ANNOTATION, DeletionCosts, deletion_cost
from dynaplan.kubernetes.labelled_workloads import LabelledWorkloads
from tests.fakes.kube_api import KubeApi
from tests.fakes.pod_controller import CORE, PodController


@pytest.fixture
def api():
    return KubeApi()


@pytest.fixture
async def decode(api):
    cluster = PodController(api)
    cluster.add_deployment("decode", 3)
    api.change(CORE, "pods", "decode-3", metadata={"deletionTimestamp": "2026-11-22T12:00:00Z"})
    return (await LabelledWorkloads(api.client(), "ns").read()).of(Role.DECODE)


LOADS = {
    "10.0.0.1": WorkerLoad(running_requests=2, waiting_requests=1, kv_usage=0.5),
    "10.0.0.3": WorkerLoad(running_requests=9),
}


def costs(api: KubeApi) -> dict[str, str]:
    pods = {name: each for (_, plural, name), each in api.objects.items() if plural == "pods"}
    return {
        name: each["metadata"]["annotations"][DELETION_COST_ANNOTATION]
        for name, each in pods.items()
        if "annotations" in each["metadata"]
    }


@pytest.mark.parametrize(
    ("load", "cost"),
    [
        (WorkerLoad(), 0),
        (WorkerLoad(kv_usage=1.7), 999),
        (WorkerLoad(running_requests=1), 1000),
        (WorkerLoad(running_requests=1, waiting_requests=2, kv_usage=0.1), 3100),
    ],
)
def test_requests_count_first_and_then_kv_entries(load, cost):
    assert deletion_cost(load) == cost


async def test_pods_whose_load_is_known_and_that_stay_are_marked(api, decode):
    await DeletionCosts(api.client(), lambda: LOADS).mark(decode)
    assert costs(api) == {"decode-1": "3500"}


async def test_a_cost_that_is_there_already_is_not_written_again(api, decode):
    marks = DeletionCosts(api.client(), lambda: LOADS)
    await marks.mark(decode)
    written = len(api.writes())
    await marks.mark((await LabelledWorkloads(api.client(), "ns").read()).of(Role.DECODE))
    assert len(api.writes()) == written


async def test_without_the_right_any_pod_may_go_and_the_log_says_so(api, decode, caplog):
    api.denied = {("patch", "pods")}
    with caplog.at_level(logging.WARNING):
        await DeletionCosts(api.client(), lambda: LOADS).mark(decode)
    assert "any pod of decode may be removed" in caplog.text
