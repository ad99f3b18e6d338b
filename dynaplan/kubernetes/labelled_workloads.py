"""Workloads of any cluster: Deployments, StatefulSets and LeaderWorkerSets found by their label.

``dynaplan.io/role: prefill`` or ``decode`` says what an object's pods are; ``dynaplan.io/namespace``, where
it is there, of which deployment. Each is scaled by its ``scale`` subresource, as ``kubectl scale`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import PODS, KubernetesClient, Object, Resource
from dynaplan.kubernetes.names import NAMESPACE_LABEL, ROLE_LABEL
from dynaplan.kubernetes.workloads import (
    Workload,
    WorkloadView,
    gpus_of_pod,
    has_ended,
    integer_at,
    model_of_pod,
    value_at,
)
from dynaplan.planner.deployment import DuplicateSubComponentError, SubComponentNotFoundError
from dynaplan.util.errors import ClusterForbidden, ClusterNotFound

log = logging.getLogger(__name__)

DEPLOYMENTS = Resource("apps", "v1", "deployments")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets")
LEADER_WORKER_SETS = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets")
KINDS = (DEPLOYMENTS, STATEFUL_SETS, LEADER_WORKER_SETS)
LEADER_WORKER_SET_LABEL = "leaderworkerset.sigs.k8s.io/name"
"""The label of the pods of a LeaderWorkerSet; its value is the object's name."""


class LabelledWorkloads:
    """The labelled objects of one Kubernetes namespace; see ``workloads.Workloads``."""

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._read: set[Resource] = set()
        self._logged: set[Resource] = set()

    async def read(self) -> WorkloadView:
        """Return the workloads; raises a ComponentError when decode has none, or a role has several."""
        found: dict[Role, list[tuple[Resource, Object]]] = {role: [] for role in SCALED_ROLES}
        refused: list[ClusterForbidden] = []
        for kind in KINDS:
            for document in await self._of_kind(kind, refused):
                labels = value_at(document, "metadata", "labels")
                if labels.get(NAMESPACE_LABEL, self._namespace) == self._namespace:
                    found[Role(labels[ROLE_LABEL])].append((kind, document))
        for role, objects in found.items():
            if len(objects) > 1:
                names = [f"{kind.plural}/{each['metadata']['name']}" for kind, each in objects]
                raise DuplicateSubComponentError(role.value, names)
        if not found[Role.DECODE]:
            hint = f"Label a Deployment, StatefulSet or LeaderWorkerSet {ROLE_LABEL}: decode"
            raise refused[0] if refused else SubComponentNotFoundError("decode", hint=hint)
        present = [(role, *objects[0]) for role, objects in found.items() if objects]
        return WorkloadView(tuple([await self._workload(*each) for each in present]))

    async def scale(self, workload: Workload, replicas: int) -> None:
        """Set the number in the ``scale`` subresource; ClusterConflict when the object has changed."""
        await set_scale(self._client, workload.resource, workload.target, replicas)

    async def _of_kind(self, kind: Resource, refused: list[ClusterForbidden]) -> list[Object]:
        """Return the objects of a kind; none where the kind is unknown to the cluster, or forbidden.

        A forbidden kind's error is appended to ``refused``. The error of a kind that could be read before is
        raised: its objects still exist.
        """
        try:
            objects, _ = await self._client.list(kind, f"{ROLE_LABEL} in (prefill,decode)")
        except (ClusterNotFound, ClusterForbidden) as error:
            if kind in self._read:
                raise
            if isinstance(error, ClusterForbidden):
                refused.append(error)
                if kind not in self._logged:
                    log.info("%s are not looked at: %s", kind.plural, error.args[0])
                    self._logged.add(kind)
            return []
        self._read.add(kind)
        return objects

    async def _workload(self, role: Role, kind: Resource, document: Object) -> Workload:
        name = document["metadata"]["name"]
        template, size, gpus = _templates(kind, document)
        pods, _ = await self._client.list(PODS, _selector(kind, document))
        return Workload(
            role=role,
            name=name,
            resource=kind,
            target=name,
            replicas=integer_at(document, "spec", "replicas", otherwise=1),
            ready=integer_at(document, "status", "readyReplicas"),
            gpus=gpus,
            model=model_of_pod(template),
            pods=tuple(pod for pod in pods if not has_ended(pod)),
            pods_of_one=size,
            has_costs=kind is DEPLOYMENTS,
        )


async def set_scale(client: KubernetesClient, resource: Resource, name: str, replicas: int) -> None:
    """Set the replicas in an object's ``scale`` subresource; ClusterConflict when it changes meanwhile."""
    found = await client.get(resource, name, "scale")
    changes = {
        "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
        "spec": {"replicas": replicas},
    }
    await client.patch(resource, name, changes, "scale")


def _templates(kind: Resource, document: Object) -> tuple[Mapping[str, Any], int, float]:
    """Return the pod template that names the model, and the pods and GPUs of one worker."""
    if kind is not LEADER_WORKER_SETS:
        template = value_at(document, "spec", "template") or {}
        return template, 1, gpus_of_pod(template)
    group = value_at(document, "spec", "leaderWorkerTemplate") or {}
    others = group.get("workerTemplate") or {}
    leader = group.get("leaderTemplate") or others
    size = integer_at(group, "size", otherwise=1)
    return leader, size, gpus_of_pod(leader) + (size - 1) * gpus_of_pod(others)


def _selector(kind: Resource, document: Object) -> str:
    if kind is LEADER_WORKER_SETS:
        return f"{LEADER_WORKER_SET_LABEL}={document['metadata']['name']}"
    terms = [
        f"{key}={value}"
        for key, value in (value_at(document, "spec", "selector", "matchLabels") or {}).items()
    ]
    for each in value_at(document, "spec", "selector", "matchExpressions") or ():
        key, values = each["key"], f"({','.join(each.get('values') or ())})"
        operators = {"In": f"{key} in {values}", "NotIn": f"{key} notin {values}", "Exists": key}
        terms.append(operators.get(each["operator"], f"!{key}"))
    return ",".join(terms)
