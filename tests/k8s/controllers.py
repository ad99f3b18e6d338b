"""The parts of a cluster that no API server plays: controllers, a kubelet, Dynamo's operator.

Copies: a Deployment's controller makes missing pods and deletes those that are too many (lower
``pod-deletion-cost`` first, then the newest), and writes the status; the scheduler names a node, so that
a deleted pod stays with its ``deletionTimestamp`` until the kubelet reports its end; the kubelet makes pods
ready, and ends a pod that is told to (``is_draining`` holds that back). Dynamo's operator takes the numbers
of the scaling adapters over into the DynamoGraphDeployment, and has the condition Ready follow.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from dynaplan.adapters.kubernetes.client import PODS, KubernetesClient, Object, Resource
from dynaplan.adapters.kubernetes.labelled import DEPLOYMENTS
from dynaplan.domain.errors import DynaplanError

COST = "controller.kubernetes.io/pod-deletion-cost"
GRAPHS = Resource("nvidia.com", "v1beta1", "dynamographdeployments")
ADAPTERS = Resource("nvidia.com", "v1beta1", "dynamographdeploymentscalingadapters")
PASS_S = 0.25


class Controllers:
    """Acts on one namespace, four times a second, as an administrator."""

    def __init__(self, client: KubernetesClient) -> None:
        self.client = client
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
        """Return the pods of a Deployment."""
        return (await self.client.list(PODS, f"app={app}"))[0]

    async def _one_pass(self) -> None:
        for found in (await self.client.list(DEPLOYMENTS))[0]:
            await self._deployment(found)
        try:
            graphs = (await self.client.list(GRAPHS))[0]
        except DynaplanError:
            return
        for found in graphs:
            await self._graph(found)

    async def _deployment(self, found: Object) -> None:
        name, replicas = found["metadata"]["name"], found["spec"]["replicas"]
        pods = await self.pods(name)
        staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        for _ in range(replicas - len(staying)):
            await self._make(name, found["spec"]["template"])
        staying.sort(key=lambda pod: (_cost(pod), -_number(pod)))
        for pod in staying[: max(0, len(staying) - replicas)]:
            await self.client.delete(PODS, pod["metadata"]["name"])
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"] and not self.is_draining:
                await self._end(pod["metadata"]["name"])
        pods = await self.pods(name)
        ready = sum("deletionTimestamp" not in pod["metadata"] for pod in pods)
        status = {"replicas": ready, "readyReplicas": ready, "updatedReplicas": ready}
        status["observedGeneration"] = found["metadata"]["generation"]
        if any(found.get("status", {}).get(key, 0) != value for key, value in status.items()):
            await self.client.patch(DEPLOYMENTS, name, {"status": status}, "status")

    async def _make(self, app: str, template: Object) -> None:
        self._made += 1
        name = f"{app}-{self._made}"
        spec = {**template["spec"], "nodeName": "node"}
        metadata = {"name": name, "labels": template["metadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        await self.client.create(PODS, pod)
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        status = {"phase": "Running", "podIP": f"10.1.0.{self._made}", "conditions": [ready]}
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


def _cost(pod: Object) -> int:
    return int(pod["metadata"].get("annotations", {}).get(COST, "0"))


def _number(pod: Object) -> int:
    return int(pod["metadata"]["name"].rsplit("-", 1)[1])
