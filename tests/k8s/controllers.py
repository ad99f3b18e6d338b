"""The parts of a cluster that no API server plays: controllers, a kubelet, Dynamo's operator.

Copies: a Deployment's controller makes missing pods and deletes those that are too many (lower
``pod-deletion-cost`` first, then the newest), and writes the status; that of a StatefulSet does the same by
numbers, from 0 on, and deletes from the top; the scheduler names a node, so that a deleted pod stays with its
``deletionTimestamp`` until the kubelet reports its end; the kubelet makes pods ready, and ends a pod that is
told to (``is_draining`` holds that back; ``kubelets.ProcessKubelet`` runs them). Dynamo's operator takes the
numbers of the scaling adapters over into the DynamoGraphDeployment, and has the condition Ready follow.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from dynaplan.kubernetes.client import PODS, KubernetesClient, Object, Resource
from dynaplan.kubernetes.labelled_workloads import DEPLOYMENTS, STATEFUL_SETS
from dynaplan.kubernetes.names import ROLE_LABEL
from dynaplan.util.errors import DynaplanError
from tests.k8s.kubelets import Kubelet, PaperKubelet

COST = "controller.kubernetes.io/pod-deletion-cost"
GRAPHS = Resource("nvidia.com", "v1beta1", "dynamographdeployments")
ADAPTERS = Resource("nvidia.com", "v1beta1", "dynamographdeploymentscalingadapters")
PASS_S = 0.25


class Controllers:
    """Acts on the workers of one namespace, four times a second, as an administrator."""

    def __init__(self, client: KubernetesClient) -> None:
        self.client = client
        self.kubelet: Kubelet = PaperKubelet()
        self.is_draining = False
        self._made = 0

    async def run(self) -> None:
        """Act until cancelled; an API server that is away, or a conflict, is tried again."""
        while True:
            try:
                await self._one_pass()
            except DynaplanError:
                pass
            await asyncio.sleep(PASS_S)

    async def pods(self, app: str) -> list[Object]:
        """Return the pods of a Deployment that ``Cluster.add_deployment`` has made."""
        return (await self.client.list(PODS, f"app={app}"))[0]

    async def _one_pass(self) -> None:
        for kind in (DEPLOYMENTS, STATEFUL_SETS):
            for found in (await self.client.list(kind, ROLE_LABEL))[0]:
                await self._workload(kind, found)
        try:
            graphs = (await self.client.list(GRAPHS))[0]
        except DynaplanError:
            return
        for found in graphs:
            await self._graph(found)

    async def _workload(self, kind: Resource, found: Object) -> None:
        name, replicas = found["metadata"]["name"], found["spec"]["replicas"]
        selector = ",".join(
            f"{key}={value}" for key, value in found["spec"]["selector"]["matchLabels"].items()
        )
        pods = (await self.client.list(PODS, selector))[0]
        staying = [pod for pod in pods if not _is_leaving(pod)]
        for _ in range(replicas - len(staying)):
            self._made += 1
            taken = {pod["metadata"]["name"] for pod in pods}
            free = (f"{name}-{number}" for number in range(replicas) if f"{name}-{number}" not in taken)
            made = next(free, "") if kind is STATEFUL_SETS else f"{name}-{self._made}"
            if made:
                pods.append(await self._make(made, found["spec"]["template"]))
        staying.sort(key=lambda pod: (_cost(pod) if kind is DEPLOYMENTS else 0, -_number(pod)))
        for pod in staying[: max(0, len(staying) - replicas)]:
            await self.client.delete(PODS, pod["metadata"]["name"])
        for pod in pods:
            await self._live(pod)
        pods = (await self.client.list(PODS, selector))[0]
        there = [pod for pod in pods if not _is_leaving(pod)]
        ready = sum(map(_is_ready, there))
        status = {"replicas": len(there), "readyReplicas": ready, "updatedReplicas": len(there)}
        status["observedGeneration"] = found["metadata"]["generation"]
        if any(found.get("status", {}).get(key, 0) != value for key, value in status.items()):
            await self.client.patch(kind, name, {"status": status}, "status")

    async def _make(self, name: str, template: Object) -> Object:
        spec = {**template["spec"], "nodeName": "node"}
        metadata = {"name": name, "labels": template["metadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        made = await self.client.create(PODS, pod)
        await asyncio.to_thread(self.kubelet.start, name, template)
        return made

    async def _live(self, pod: Object) -> None:
        """Report that a pod is ready, or has ended."""
        name = pod["metadata"]["name"]
        if _is_leaving(pod):
            if not self.is_draining and await asyncio.to_thread(self.kubelet.has_ended, name):
                await self._end(name)
        elif not _is_ready(pod) and await asyncio.to_thread(self.kubelet.is_ready, name):
            now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
            address = self.kubelet.address or f"10.1.0.{_number(pod)}"
            status = {"phase": "Running", "podIP": address, "conditions": [ready]}
            await self.client.patch(PODS, name, {"status": status}, "status")

    async def _end(self, name: str) -> None:
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        await self.client._object("DELETE", PODS.path(self.client.namespace, name), options)

    async def _graph(self, found: Object) -> None:
        name = found["metadata"]["name"]
        components = found["spec"]["components"]
        wanted = [dict(each) for each in components]
        for adapter in (await self.client.list(ADAPTERS))[0]:
            for each in wanted:
                if adapter["spec"]["dgdRef"] == {"name": name, "serviceName": each["name"]}:
                    each["replicas"] = adapter["spec"]["replicas"]
        if wanted != components:
            found = await self.client.patch(GRAPHS, name, {"spec": {"components": wanted}})
        status = {
            each["name"]: {
                "componentKind": "Deployment",
                **dict.fromkeys(
                    ("replicas", "readyReplicas", "updatedReplicas", "availableReplicas"), each["replicas"]
                ),
                **({"servedModelName": "tiny", "gpusPerReplica": 1} if each["type"] != "frontend" else {}),
            }
            for each in wanted
        }
        ready = {"type": "Ready", "status": "True", "reason": "ok", "message": "ok"}
        new = {
            "conditions": [{**ready, "lastTransitionTime": "2026-01-01T00:00:00Z"}],
            "components": status,
            "observedGeneration": found["metadata"]["generation"],
        }
        if found.get("status") != new:
            await self.client.patch(GRAPHS, name, {"status": new}, "status")


def _is_leaving(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


def _cost(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(COST, "0"))


def _number(pod: Object) -> int:
    return int(pod["metadata"]["name"].rsplit("-", 1)[1])
