"""An exported deployment serves and scales itself: real API server, real Prometheus, real workers.

The controllers and the kubelet are the test's: pods are processes of this machine.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.test_exported import MODEL, address_of_this_machine
from tests.fakes.load import Load
from tests.fakes.pods import Cluster as Pods
from tests.fakes.pods import Manifest, Pod, running
from tests.fakes.polling import eventually
from tests.fakes.prometheus_server import find_prometheus, real_prometheus
from tests.k8s.conftest import Cluster
from tests.k8s.kubelets import ProcessKubelet
from tests.k8s.test_export import NAME, cleared, create, documents

ENDPOINT = "http://prometheus.test:9090"
"""In the manifests; its place is taken by the address at which Prometheus listens."""

SETTINGS = (
    *("--Planner.policy=sla", f"--Planner.prometheus-endpoint={ENDPOINT}", "--Planner.itl=4.6"),
    "--Planner.profile-results-dir=h200_sxm-Llama-3.1-8B-Instruct-FP8",
    *("--Planner.adjustment-interval=5", "--Planner.load-predictor=constant", "--Planner.startup-time=5"),
    "--Planner.slo-window=30",  # what a backtest looks back on, before which nothing is removed
    "--Planner.max-gpu-budget=4",
)
WITHIN_S = 180.0


@pytest.fixture
def prometheus() -> str:
    found = find_prometheus()
    if not found:
        pytest.skip("there is no prometheus (Debian's package prometheus; tox -e k8s fetches it)")
    return found


def planning_by(applied: list[Manifest], endpoint: str) -> None:
    """Have the planner's pod ask that Prometheus."""
    (planner,) = (
        each for each in applied if each["metadata"]["name"] == f"{NAME}-planner" and "spec" in each
    )
    container = planner["spec"]["template"]["spec"]["containers"][0]
    container["args"] = [each.replace(ENDPOINT, endpoint) for each in container["args"]]


async def started(pods: Pods, name: str) -> Pod:
    """The pod of a Deployment that the planner does not scale, ready or at least alive."""
    return await asyncio.to_thread(pods.pod, f"{NAME}-{name}")


@pytest.mark.timeout(900)
async def test_the_planner_follows_what_prometheus_scrapes_up_and_down_and_no_request_is_lost(
    cluster: Cluster, prometheus: str, tmp_path: Path
) -> None:
    await cleared(cluster)
    applied = documents("none", *SETTINGS)
    account = {"KUBECONFIG": str(cluster.server.kubeconfig("planner"))}
    with running(applied, tmp_path / "pods", address_of_this_machine(), account) as pods:
        nats = await started(pods, "nats")
        await asyncio.to_thread(nats.ready)
        frontend = await started(pods, "frontend")
        kubelet = cluster.controllers.kubelet = ProcessKubelet(pods)
        for document in applied:
            await create(cluster.admin, document)
        cluster.act()
        target = f"{pods.address}:{frontend.ports[8000]}"
        async with real_prometheus(prometheus, tmp_path, [target]) as endpoint:
            planning_by(applied, endpoint)
            await asyncio.to_thread(frontend.ready)
            planner = await started(pods, "planner")
            await asyncio.to_thread(planner.ready)
            try:
                await _follows(cluster, f"http://{target}")
            except BaseException as error:
                raise AssertionError(f"{error}\n{planner.log.read_text()[-4000:]}") from error
            # A pod counts as ready no more when it is told to go; it drains, and then its process ends.
            await eventually(lambda: kubelet.exit_codes, WITHIN_S)
            assert await asyncio.to_thread(planner.delete) == 0
        assert set(kubelet.exit_codes.values()) == {0}
        await cleared(cluster)


async def _follows(cluster: Cluster, url: str) -> None:
    async def has_grown() -> bool:
        return await cluster.ready(f"{NAME}-decode") >= 2

    async def has_shrunk() -> bool:
        return await cluster.ready(f"{NAME}-decode") == 1 == await cluster.replicas(f"{NAME}-decode")

    async with Load(url, MODEL, clients=12, tokens=100) as load:
        await eventually(has_grown, WITHIN_S)
        assert await cluster.replicas(f"{NAME}-decode") <= 3
    await eventually(has_shrunk, WITHIN_S)
    assert load.outcomes
    assert load.incomplete == []
