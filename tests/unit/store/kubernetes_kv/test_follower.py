"""Watches of a cluster: pods that come and go, versions that were forgotten, API servers that are away."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from dynaplan.store.kubernetes_kv.store import ClusterStore
from tests.contract.stores import Watched
from tests.fakes.kube_api import KubeApi
from tests.fakes.polling import eventually
from tests.unit.store.kubernetes_kv.cluster import cluster, delete_pod, set_ready, store_of


@pytest.fixture
def api() -> KubeApi:
    return cluster()


@pytest_asyncio.fixture
async def worker(api: KubeApi) -> AsyncIterator[ClusterStore]:
    """A worker that has registered, and is not ready yet."""
    made = store_of(api, "worker")
    await made.put("k", "v", await made.grant(30))
    yield made
    await made.close()


@pytest_asyncio.fixture
async def frontend(api: KubeApi) -> AsyncIterator[ClusterStore]:
    made = store_of(api, "frontend")
    yield made
    await made.close()


@pytest_asyncio.fixture
async def watch(worker: ClusterStore, frontend: ClusterStore) -> AsyncIterator[Watched]:
    """What the frontend is told."""
    watched = await Watched(frontend, "").started()
    yield watched
    await watched.stop()


async def test_a_registration_comes_and_goes_with_its_pods_readiness(
    api: KubeApi, watch: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    assert watch.state == {}
    set_ready(api, worker=True)
    await watch.reaches({"k": "v"})
    set_ready(api, worker=False)
    await watch.reaches({})
    set_ready(api, worker=True)
    await watch.reaches({"k": "v"})
    delete_pod(api, "worker")
    await watch.reaches({})
    assert watch.snapshots == 1


async def test_the_pods_that_are_waited_for_are_named_once(
    worker: ClusterStore, frontend: ClusterStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    watched = await Watched(frontend, "").started()
    await frontend.put("other", "")
    await watched.reaches({"other": ""})
    await watched.stop()
    said = [each.message for each in caplog.records if "not ready in any EndpointSlice" in each.message]
    assert len(said) == 1
    assert said[0].startswith("pod worker ")


async def test_while_the_api_server_is_away_what_is_known_stays_and_then_the_differences_are_told(
    api: KubeApi, watch: Watched, frontend: ClusterStore
) -> None:
    set_ready(api, worker=True)
    await frontend.put("shared", "1")
    await watch.reaches({"k": "v", "shared": "1"})
    told = len(watch.events)
    api.go_away()
    delete_pod(api, "worker")
    assert watch.state == {"k": "v", "shared": "1"}
    api.is_available = True
    await watch.reaches({"shared": "1"})
    assert len(watch.events) == told + 1


async def test_a_forgotten_version_is_listed_again(api: KubeApi, watch: Watched) -> None:
    set_ready(api, worker=True)
    await watch.reaches({"k": "v"})
    api.break_watches()
    delete_pod(api, "worker")
    api.forget()
    await watch.reaches({})
    assert watch.snapshots == 1


async def test_a_watch_that_breaks_goes_on_without_a_gap(api: KubeApi, watch: Watched) -> None:
    api.break_watches()
    set_ready(api, worker=True)
    await watch.reaches({"k": "v"})
    assert watch.puts == ["v"]


async def test_endpoint_slices_of_an_older_cluster_do_as_well(api: KubeApi) -> None:
    old = "/apis/discovery.k8s.io/v1beta1"
    api.served = {"/api/v1", "/apis/nvidia.com/v1alpha1", old}
    worker, frontend = store_of(api, "worker"), store_of(api, "frontend")
    await worker.put("k", "v", await worker.grant(30))
    watched = await Watched(frontend, "").started()
    ready = {"conditions": {"ready": True}, "targetRef": {"kind": "Pod", "name": "worker"}}
    api.add(old, "endpointslices", {"metadata": {"name": "workers"}, "endpoints": [ready]})
    await watched.reaches({"k": "v"})
    assert [item.key for item in await frontend.list("")] == ["k"]
    await watched.stop()
    await worker.close()
    await frontend.close()


async def test_a_right_that_is_missing_is_said_and_tried_again(
    api: KubeApi, worker: ClusterStore, frontend: ClusterStore, caplog: pytest.LogCaptureFixture
) -> None:
    api.denied = {("list", "endpointslices")}
    set_ready(api, worker=True)
    watched = Watched(frontend, "")
    await eventually(lambda: "endpointslices is forbidden" in caplog.text)
    api.denied = set()
    await watched.reaches({"k": "v"})
    await watched.stop()
