"""Frontend and workers find each other by a real API server, without etcd and NATS of their own.

The manifests are those of `dynaplan export kubernetes --store kubernetes`; their pods run as processes, with
the rights of their account. What no API server does is played here, as ``ClusterParts`` says.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest

from dynaplan.kubernetes.client import KubernetesClient, Object, Resource
from dynaplan.kubernetes.manifests import manifests
from dynaplan.kubernetes.sources import graph_source
from dynaplan.kubernetes.store import ClusterStore
from dynaplan.kubernetes.store_documents import SLICES, WORKER_METADATA
from dynaplan.kubernetes.templates import documents as filled
from dynaplan.store.instances import SERVICES_PREFIX
from dynaplan.util.errors import ClusterForbidden, ClusterNotFound, DynaplanError, StoreUnavailable
from tests.e2e.test_exported import address_of_this_machine
from tests.fakes.pods import Cluster as Pods
from tests.fakes.pods import Pod, running
from tests.fakes.polling import eventually
from tests.k8s.conftest import CRDS, Cluster
from tests.k8s.test_export import cleared, create, resource_of
from tests.unit.kubernetes.deployments import exported

NAME = "dynaplan"
"""The account of frontends and workers is that of the test's token then: ``dynaplan-discovery``."""

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
SLICE = SLICES[1]
PASS_S = 0.2


def documents() -> list[Object]:
    source = graph_source("graphs.agg:Frontend", "agg.yaml", "box", ["--Common.speedup-ratio=0"])
    return manifests(exported(source, name=NAME, store="kubernetes"))


class ClusterParts:
    """The parts of a cluster that no API server plays, for pods that are processes.

    Copies: the kubelet asks the readiness probes, and starts a container that has ended again
    unless its pod was deleted; the EndpointSlice controller writes each pod of a component's Service as ready
    or not, and the deletion of a pod takes it out; the garbage collector deletes what a deleted pod owned.
    """

    def __init__(self, client: KubernetesClient, pods: Pods) -> None:
        self.client = client
        self.pods = pods
        self.deleted: set[str] = set()

    async def run(self) -> None:
        """Act until cancelled; an API server that is away is tried again."""
        while True:
            with suppress(DynaplanError):
                await self._one_pass()
            await asyncio.sleep(PASS_S)

    async def _one_pass(self) -> None:
        there = {name: pod for name, pod in self.pods.pods.items() if name not in self.deleted}
        for pod in there.values():
            if pod.process and pod.process.poll() is not None:
                pod.start()
        endpoints = [await self._endpoint(pod) for pod in there.values()]
        document: Object = {
            "apiVersion": SLICE.api_version,
            "kind": "EndpointSlice",
            "metadata": {"name": f"{NAME}-x7k2p"},
            "addressType": "IPv4",
            "endpoints": endpoints,
        }
        try:
            found = await self.client.get(SLICE, f"{NAME}-x7k2p")
        except ClusterNotFound:
            await self.client.create(SLICE, document)
        else:
            if found.get("endpoints") != endpoints:
                await self.client.replace(SLICE, f"{NAME}-x7k2p", document)
        for found in (await self.client.list(WORKER_METADATA))[0]:
            (owner,) = found["metadata"]["ownerReferences"]
            if owner["name"] in self.deleted:
                await self.client.delete(WORKER_METADATA, found["metadata"]["name"])

    async def _endpoint(self, pod: Pod) -> Object:
        runs = pod.process is not None and pod.process.poll() is None
        is_ready = runs and await asyncio.to_thread(pod.is_well, "readinessProbe")
        target = {"kind": "Pod", "name": pod.name, "namespace": "default"}
        return {"addresses": ["10.1.0.1"], "conditions": {"ready": is_ready}, "targetRef": target}


class Deployment:
    """A frontend and workers in a cluster, and a client of each."""

    def __init__(self, cluster: Cluster, pods: Pods, parts: ClusterParts) -> None:
        self.cluster, self.pods, self.parts = cluster, pods, parts
        self.frontend = pods.pod(f"{NAME}-frontend")
        self.store = ClusterStore(cluster.client("administrator"), None)

    def worker(self) -> Pod:
        return self.pods.pod(f"{NAME}-decode")

    async def routable(self) -> int:
        """The number of workers that frontends may use; -1 while the API server does not answer."""
        try:
            return len(await self.store.list(f"{SERVICES_PREFIX}box/VllmWorker/generate/"))
        except StoreUnavailable:
            return -1

    async def answer(self, session: aiohttp.ClientSession) -> str:
        """Ask for a completion; return the text of the answer."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        url = f"http://{self.pods.address}:{self.frontend.ports[8000]}/v1/chat/completions"
        async with session.post(url, json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            return str(json.loads(text)["choices"][0]["message"]["content"])


@pytest.fixture
async def applied(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Deployment]:
    """The manifests, applied, with a frontend and two workers that are starting."""
    await cleared(cluster)
    with suppress(DynaplanError):
        await cluster.admin._object("POST", CRDS, filled("crd.yaml", {})[0])
    wanted = documents()
    await eventually(lambda: served(cluster.admin, WORKER_METADATA))
    for document in wanted:
        with suppress(ClusterNotFound):
            await cluster.admin.delete(resource_of(document), document["metadata"]["name"])
        await create(cluster.admin, document)
    account = {"KUBECONFIG": str(cluster.server.kubeconfig("discovery"))}
    with running(wanted, tmp_path / "pods", address_of_this_machine(), account) as pods:
        parts = ClusterParts(cluster.client("administrator"), pods)
        made = Deployment(cluster, pods, parts)
        acting = asyncio.create_task(parts.run())
        yield made
        acting.cancel()
        await asyncio.gather(acting, return_exceptions=True)
        await made.store.close()
        await parts.client.close()
    for resource in (WORKER_METADATA, SLICE):
        for found in (await cluster.admin.list(resource))[0]:
            await cluster.admin.delete(resource, found["metadata"]["name"])
    for document in wanted:
        with suppress(ClusterNotFound):
            await cluster.admin.delete(resource_of(document), document["metadata"]["name"])


async def served(client: KubernetesClient, resource: Resource) -> bool:
    try:
        await client.list(resource)
    except ClusterNotFound:
        return False
    return True


@pytest.mark.timeout(400)
async def test_they_answer_lose_a_worker_and_go_on_while_the_api_server_is_away(
    applied: Deployment,
) -> None:
    workers = [applied.worker(), applied.worker()]

    async def are_two_routable() -> bool:
        return await applied.routable() == 2

    async def is_one_routable() -> bool:
        return await applied.routable() == 1

    await eventually(are_two_routable, 90)
    await eventually(lambda: asyncio.to_thread(applied.frontend.is_well, "readinessProbe"))
    records = {
        found["metadata"]["name"]: found for found in (await applied.parts.client.list(WORKER_METADATA))[0]
    }
    assert records.keys() >= {worker.name for worker in workers}
    data = records[workers[0].name]["spec"]["data"]
    assert {name.rsplit("/", 1)[0] for name in data["endpoints"]} >= {"box/backend/generate"}
    async with aiohttp.ClientSession() as session:
        for _ in range(4):
            assert await applied.answer(session)
        stopped, killed = (worker.process for worker in reversed(workers))
        assert stopped
        assert killed
        stopped.send_signal(signal.SIGSTOP)  # registered, and not ready any more
        await eventually(is_one_routable)

        async def is_answered() -> bool:
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    return bool(await applied.answer(session))
            return False

        await eventually(is_answered)  # the frontend hears of it as soon as this test does, not sooner
        for _ in range(2):
            assert await applied.answer(session)
        stopped.send_signal(signal.SIGCONT)
        await eventually(are_two_routable)
        applied.parts.deleted.add(workers[0].name)
        killed.kill()
        await eventually(is_one_routable)
        for _ in range(4):
            assert await applied.answer(session)
        await asyncio.to_thread(applied.cluster.server.stop)
        for _ in range(4):
            assert await applied.answer(session)
        await asyncio.to_thread(applied.cluster.server.start)
        third = applied.worker()
        await eventually(are_two_routable, 90)
        assert workers[0].name not in {
            found["metadata"]["name"] for found in (await applied.parts.client.list(WORKER_METADATA))[0]
        }
        applied.parts.deleted.add(third.name)
        assert await asyncio.to_thread(third.delete) == 0
        await eventually(is_one_routable)
        assert await applied.answer(session)


async def test_the_account_of_frontends_and_workers_may_do_no_more(applied: Deployment) -> None:
    client = applied.cluster.client("discovery")
    store = ClusterStore(client, None)
    try:
        await store.list("")
        with pytest.raises(ClusterForbidden):
            await store.put("free", "v")
        for resource in (Resource("", "v1", "secrets"), Resource("", "v1", "configmaps")):
            with pytest.raises(ClusterForbidden):
                await client.list(resource)
        with pytest.raises(ClusterForbidden):
            await client.delete(WORKER_METADATA, "worker")
    finally:
        await store.close()
