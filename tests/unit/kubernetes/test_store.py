"""The store in a cluster's API, beyond what every store promises: pods, restarts, rights, what it leaves.

Watches of a cluster: pods that come and go, versions that were forgotten, API servers that are away.

The own leases: one that is not renewed in time is ended, whenever the store answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from dynaplan.kubernetes import store as module
from dynaplan.kubernetes.store import ClusterStore, LeaseExpiry
from dynaplan.store.model import Transaction
from dynaplan.util.errors import (
    ClusterForbidden,
    ClusterNotFound,
    ConfigError,
    DynaplanError,
    StoreUnavailable,
)
from tests.contract.stores import Watched
from tests.fakes.kube_api import KubeApi
from tests.fakes.polling import eventually
from tests.unit.kubernetes.simulated_cluster import RECORDS, cluster, delete_pod, set_ready, store_of

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

Open = Callable[[str], ClusterStore]


@pytest.fixture
def api() -> KubeApi:
    return cluster()


@pytest_asyncio.fixture
async def of_pod(api: KubeApi) -> AsyncIterator[Open]:
    """The store of a pod's process; "" is a process outside."""
    made: list[ClusterStore] = []

    def opened(pod: str) -> ClusterStore:
        made.append(store_of(api, pod))
        return made[-1]

    yield opened
    for each in made:
        await each.close()


async def keys_of(store: ClusterStore) -> list[str]:
    return [item.key for item in await store.list("")]


async def test_others_see_a_registration_while_its_pod_is_ready(api: KubeApi, of_pod: Open) -> None:
    worker, frontend = of_pod("worker"), of_pod("frontend")
    await worker.put("k", "v", await worker.grant(10))
    assert await keys_of(worker) == ["k"]
    assert await keys_of(frontend) == []
    set_ready(api, worker=True)
    assert await keys_of(frontend) == ["k"]
    set_ready(api, worker=False)
    assert await frontend.get("k") is None


async def test_a_process_reads_what_it_has_just_written_though_its_watch_has_not_seen_it(
    of_pod: Open,
) -> None:
    store = of_pod("worker")
    lease = await store.grant(10)
    await store.put("k", "first", lease)
    watched = await Watched(store, "").started()
    await watched.reaches({"k": "first"})
    await store.put("k", "second", lease)
    item = await store.get("k")
    assert item and item.value == "second"
    await store.delete("k")
    assert await store.get("k") is None


async def test_a_lease_ends_with_its_pod(api: KubeApi, of_pod: Open) -> None:
    worker, frontend = of_pod("worker"), of_pod("frontend")
    lease = await worker.grant(10)
    await worker.put("k", "v", lease)
    assert await worker.commit(Transaction({"lock": 0}, {"lock": "mine"}, lease=lease))
    set_ready(api, worker=True)
    assert await keys_of(frontend) == ["k", "lock"]
    delete_pod(api, "worker")
    assert await keys_of(frontend) == []
    assert await frontend.keep_alive(lease) == 0.0
    assert await frontend.commit(Transaction({"lock": 0}, {"lock": "yours"}))


async def test_what_an_ended_container_left_is_cleared_away_by_the_next_one(
    api: KubeApi, of_pod: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = of_pod("worker")
    await before.put("k", "v", await before.grant(10))
    monkeypatch.setattr(module, "PROCESS_ID", "another process")
    after = of_pod("worker")
    await after.put("new", "v", await after.grant(10))
    assert await keys_of(after) == ["new"]


async def test_two_pods_may_write_a_key_under_their_leases_and_one_remains_when_the_other_goes(
    api: KubeApi, of_pod: Open
) -> None:
    first, second = of_pod("first"), of_pod("second")
    set_ready(api, first=True, second=True)
    await first.put("k", "1", await first.grant(10))
    lease = await second.grant(10)
    await second.put("k", "2", lease)
    item = await first.get("k")
    assert item is not None
    assert item.value == "2"
    await second.revoke(lease)
    item = await first.get("k")
    assert item is not None
    assert item.value == "1"
    await second.delete("k")
    assert await first.get("k") is None


async def test_a_process_outside_reads_and_writes_and_may_end_a_lease_but_gets_none(
    api: KubeApi, of_pod: Open
) -> None:
    worker, person = of_pod("worker"), of_pod("")
    lease = await worker.grant(10)
    set_ready(api, worker=True)
    await person.put("wish", "", lease)
    await person.put("setting", "1")
    assert await keys_of(worker) == ["setting", "wish"]
    await person.revoke(lease)
    assert await worker.keep_alive(lease) == 0.0
    with pytest.raises(ConfigError, match=r"(?s)no pod.*POD_NAME"):
        await person.grant(10)


async def test_a_worker_needs_no_right_to_change_the_shared_map(api: KubeApi, of_pod: Open) -> None:
    api.denied = {(verb, "configmaps") for verb in ("create", "update", "patch", "delete")}
    worker = of_pod("worker")
    lease = await worker.grant(10)
    await worker.commit(Transaction(puts={"k": "v"}, lease=lease))
    await worker.revoke(lease)
    assert [method for method, path, _ in api.writes() if "configmaps" in path] == []
    with pytest.raises(ClusterForbidden, match="configmaps"):
        await worker.put("free", "v")


async def test_a_renewal_writes_nothing(api: KubeApi, of_pod: Open) -> None:
    worker = of_pod("worker")
    lease = await worker.grant(10)
    written = len(api.writes())
    assert await worker.keep_alive(lease) == 10.0
    assert len(api.writes()) == written


async def test_where_the_kind_is_not_served_the_way_to_get_it_is_said(api: KubeApi, of_pod: Open) -> None:
    api.served = {"/api/v1"}
    with pytest.raises(ClusterNotFound, match=r"(?s)does not serve dynamoworkermetadatas.*export crd"):
        await of_pod("worker").list("")


async def test_an_api_server_that_is_away_is_a_store_that_does_not_answer(api: KubeApi, of_pod: Open) -> None:
    worker = of_pod("worker")
    lease = await worker.grant(10)
    api.go_away()
    for call in (worker.list(""), worker.keep_alive(lease), worker.grant(10), worker.put("k", "v")):
        with pytest.raises(StoreUnavailable):
            await call


async def test_a_server_that_has_just_started_and_refuses_what_it_allowed_is_one_that_is_away(
    api: KubeApi, of_pod: Open
) -> None:
    """As kube-apiserver 1.20.2 does until it has read the Roles (tests/k8s/test_discovery.py)."""
    worker = of_pod("worker")
    lease = await worker.grant(10)
    await worker.list("")
    api.denied = {(verb, "dynamoworkermetadatas") for verb in ("get", "list", "update")}
    for call in (worker.list(""), worker.put("k", "v", lease), worker.revoke(lease)):
        with pytest.raises(StoreUnavailable, match="forbidden"):
            await call
    api.denied = set()
    await worker.put("k", "v", lease)
    assert await keys_of(worker) == ["k"]


async def test_what_is_registered_in_dynamos_layout_is_in_its_form(api: KubeApi, of_pod: Open) -> None:
    worker = of_pod("worker")
    value = {"type": "Endpoint", "instance_id": 42}
    await worker.put("v1/instances/llm/backend/generate/2a", json.dumps(value), await worker.grant(10))
    found = api.objects[RECORDS, "dynamoworkermetadatas", "worker"]
    assert found["spec"]["data"]["endpoints"] == {"llm/backend/generate/2a": value}
    assert found["apiVersion"] == "nvidia.com/v1alpha1"


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
    """What the frontend is parsed."""
    watched = await Watched(frontend, "").started()
    yield watched


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
    parsed = len(watch.events)
    api.go_away()
    delete_pod(api, "worker")
    assert watch.state == {"k": "v", "shared": "1"}
    api.is_available = True
    await watch.reaches({"shared": "1"})
    assert len(watch.events) == parsed + 1


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


pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Ends:
    """What was ended and when; ``error`` is raised in the place of an end."""

    def __init__(self) -> None:
        self.leases = LeaseExpiry(self.end)
        self.at_s: list[float] = []
        self.tries = 0
        self.error: DynaplanError | None = None

    async def end(self, lease: int) -> None:
        self.tries += 1
        if self.error:
            raise self.error
        self.leases.cancel(lease)
        self.at_s.append(asyncio.get_running_loop().time())


@pytest_asyncio.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    await made.leases.close()


async def test_a_lease_that_is_renewed_lives_on_until_it_is_dropped(ends: Ends) -> None:
    ends.leases.start(1, 10)
    for _ in range(5):
        await asyncio.sleep(9)
        ends.leases.renew(1)
    ends.leases.cancel(1)
    ends.leases.cancel(1)
    ends.leases.renew(1)
    await asyncio.sleep(99)
    assert ends.at_s == []


async def test_an_end_is_tried_until_the_store_answers(ends: Ends) -> None:
    ends.error = StoreUnavailable("away")
    ends.leases.start(1, 10)
    await asyncio.sleep(60)
    assert ends.tries > 10
    ends.error = None
    await asyncio.sleep(3)
    assert len(ends.at_s) == 1


async def test_a_lease_that_is_wanted_again_before_it_could_be_ended_is_left_alone(ends: Ends) -> None:
    ends.error = StoreUnavailable("away")
    ends.leases.start(1, 10)
    await asyncio.sleep(15)
    ends.leases.renew(1)
    ends.error = None
    await asyncio.sleep(9)
    assert 1 in ends.leases
    assert ends.at_s == []


async def test_a_right_that_is_missing_ends_the_tries(ends: Ends) -> None:
    ends.error = ClusterForbidden("no right")
    ends.leases.start(1, 10)
    await asyncio.sleep(99)
    assert ends.tries == 1


async def test_closed_it_ends_nothing(ends: Ends) -> None:
    ends.leases.start(1, 10)
    await ends.leases.close()
    await asyncio.sleep(99)
    assert ends.tries == 0
