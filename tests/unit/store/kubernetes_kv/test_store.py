"""The store in a cluster's API, beyond what every store promises: pods, restarts, rights, what it leaves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from dynaplan.store.kubernetes_kv import store as module
from dynaplan.store.kubernetes_kv.store import ClusterStore
from dynaplan.store.model import Transaction
from dynaplan.util.errors import ClusterForbidden, ClusterNotFound, ConfigError, StoreUnavailable
from tests.fakes.kube_api import KubeApi
from tests.unit.store.kubernetes_kv.cluster import RECORDS, cluster, delete_pod, set_ready, store_of

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
    monkeypatch.setattr(module, "PROCESS", "another process")
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


async def test_a_key_that_moves_under_a_lease_leaves_nothing_behind(api: KubeApi, of_pod: Open) -> None:
    worker = of_pod("worker")
    await worker.put("k", "free")
    lease = await worker.grant(10)
    await worker.put("k", "leased", lease)
    await worker.revoke(lease)
    assert await worker.get("k") is None


async def test_a_key_that_moves_out_of_a_lease_outlives_it(of_pod: Open) -> None:
    worker = of_pod("worker")
    lease = await worker.grant(10)
    await worker.put("k", "leased", lease)
    await worker.put("k", "free")
    await worker.revoke(lease)
    item = await worker.get("k")
    assert item is not None
    assert (item.value, item.lease) == ("free", 0)


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
