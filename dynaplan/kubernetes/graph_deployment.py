"""Workloads of Dynamo's operator: the components of one DynamoGraphDeployment.

Source: the connector of Dynamo's planner, 0.9.1 (``v1alpha1``) and 1.6.1 (``v1beta1``), whose requests are
recorded in tests/fixtures/kubernetes. Numbers are set in the ``scale`` subresource of the component's scaling
adapter, ``{deployment}-{component in lower case}``, or else in the DynamoGraphDeployment itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import PODS, KubernetesClient, Object, Resource
from dynaplan.kubernetes.workloads import (
    Workload,
    WorkloadView,
    gpus_of_pod,
    has_ended,
    integer_at,
    model_of_command,
    model_of_pod,
    value_at,
)
from dynaplan.planner.deployment import (
    DuplicateSubComponentError,
    DynamoGraphDeploymentNotFoundError,
    SubComponentNotFoundError,
)
from dynaplan.util.errors import ClusterConflict, ClusterNotFound, ClusterRefused

GROUP = "nvidia.com"
V1BETA1, V1ALPHA1 = "v1beta1", "v1alpha1"

LEGACY_NAMES: Mapping[Role, tuple[str, ...]] = {
    Role.PREFILL: ("VllmPrefillWorker", "TRTLLMPrefillWorker", "prefill"),
    Role.DECODE: ("VllmDecodeWorker", "TRTLLMDecodeWorker", "decode", "VllmWorker", "TRTLLMWorker"),
}
"""Names that stand for a role where no component says its own. Source: Dynamo 0.7 to 0.9,
``planner.defaults``."""

FAILED_TEST = "the server rejected our request"
"""The answer of kube-apiserver 1.20.2, with status 422, to a JSON patch whose ``test`` fails."""

POD_LABEL = "nvidia.com/dynamo-graph-deployment-name"
"""The label of all pods of a DynamoGraphDeployment; its value is the object's name."""

COMPONENT_LABEL = "nvidia.com/dynamo-component"
TYPE_LABELS = ("nvidia.com/dynamo-sub-component-type", "nvidia.com/dynamo-component-type")


@dataclass(frozen=True)
class _Component:
    """One component, whatever the version of the object: ``index`` is its place in ``v1beta1``'s list."""

    name: str
    kind: str
    replicas: int
    spec: Mapping[str, Any]
    status: Mapping[str, Any]
    index: int


class GraphDeployment:
    """The DynamoGraphDeployment of that name; see ``workloads.Workloads``.

    ``legacy``: the names by which a role's component is found when no component states that role.
    """

    def __init__(self, client: KubernetesClient, name: str, legacy: Mapping[Role, Sequence[str]]) -> None:
        self._client = client
        self._name = name
        self._legacy = legacy
        self._versions = [V1BETA1, V1ALPHA1]

    async def read(self) -> WorkloadView:
        """Return the workloads; raises DynamoGraphDeploymentNotFoundError or a ComponentError."""
        version, document = await self._document()
        components = _components(document)
        selected, _ = await self._client.list(PODS, f"{POD_LABEL}={self._name}")
        pods = [pod for pod in selected if not has_ended(pod)]
        found = []
        for role in SCALED_ROLES:
            component = self._component_of(role, components)
            if component:
                found.append(await self._workload(role, component, version, pods))
        return WorkloadView(tuple(found), _why_not_ready(document))

    async def scale(self, workload: Workload, replicas: int) -> None:
        """Set the number by the scaling adapter, else by the object; ClusterConflict when it has changed."""
        try:
            await self._client.patch(
                workload.resource, workload.target, {"spec": {"replicas": replicas}}, "scale"
            )
        except ClusterNotFound:
            await self._scale_object(workload.name, replicas)

    async def _scale_object(self, name: str, replicas: int) -> None:
        version, document = await self._document()
        changes: Object | list[Object] = {"spec": {"services": {name: {"replicas": replicas}}}}
        if value_at(document, "spec", "components") is not None:
            index = next((each.index for each in _components(document) if each.name == name), None)
            if index is None:
                raise ClusterNotFound(
                    f"the DynamoGraphDeployment {self._name} has no component {name} any more"
                )
            place = f"/spec/components/{index}"
            changes = [
                {"op": "test", "path": f"{place}/name", "value": name},
                {"op": "add", "path": f"{place}/replicas", "value": replicas},
            ]
        try:
            await self._client.patch(_graph_deployments(version), self._name, changes)
        except ClusterRefused as error:
            if FAILED_TEST in str(error):
                raise ClusterConflict(f"the components of {self._name} were changed meanwhile") from error
            raise

    async def _document(self) -> tuple[str, Object]:
        """Return the object in the newest version that is served, and that version."""
        for version in tuple(self._versions):
            try:
                document = await self._client.get(_graph_deployments(version), self._name)
            except ClusterNotFound:
                continue
            self._versions = [version, *(each for each in self._versions if each != version)]
            return version, document
        raise DynamoGraphDeploymentNotFoundError(self._name, self._client.namespace)

    def _component_of(self, role: Role, components: Sequence[_Component]) -> _Component | None:
        """Return the role's component by its type, else by its name; None when prefill has none.

        Raises DuplicateSubComponentError for several, SubComponentNotFoundError when decode has none.
        """
        found = [each for each in components if each.kind == role.value]
        if not found and role is Role.DECODE:
            found = [each for each in components if each.kind == "worker"]
        if not found:
            by_name = {each.name: each for each in components}
            names = (*self._legacy.get(role, ()), *LEGACY_NAMES[role])
            found = [by_name[name] for name in names if name in by_name and not by_name[name].kind][:1]
        if len(found) > 1:
            raise DuplicateSubComponentError(role.value, [each.name for each in found])
        if not found and role is Role.DECODE:
            hint = f"Give a component of {self._name} the type (subComponentType in v1alpha1) decode."
            raise SubComponentNotFoundError(role.value, hint=hint)
        return found[0] if found else None

    async def _workload(
        self, role: Role, component: _Component, version: str, pods: Sequence[Object]
    ) -> Workload:
        adapters = Resource(GROUP, version, "dynamographdeploymentscalingadapters")
        target = f"{self._name}-{component.name.lower()}"
        try:
            scale = await self._client.get(adapters, target, "scale")
            replicas = integer_at(scale, "spec", "replicas")
        except ClusterNotFound:
            replicas = component.replicas
        nodes = integer_at(component.spec, "multinode", "nodeCount", otherwise=1)
        return Workload(
            role=role,
            name=component.name,
            resource=adapters,
            target=target,
            replicas=replicas,
            ready=integer_at(component.status, "readyReplicas"),
            gpus=_gpus(component, nodes),
            model=_model(component),
            pods=tuple(pod for pod in pods if _is_of(pod, role, component.name)),
            pods_of_one=max(1, nodes),
            has_costs=component.status.get("componentKind") == "Deployment",
        )


def _graph_deployments(version: str) -> Resource:
    return Resource(GROUP, version, "dynamographdeployments")


def _components(document: Object) -> list[_Component]:
    listed = value_at(document, "spec", "components")
    if listed is None:
        services = (value_at(document, "spec", "services") or {}).items()
        listed = [{**spec, "name": name, "type": _type(spec)} for name, spec in services]
    status = value_at(document, "status", "components") or value_at(document, "status", "services") or {}
    return [
        _Component(
            each["name"],
            each.get("type", ""),
            integer_at(each, "replicas", otherwise=1),
            each,
            status.get(each["name"]) or {},
            index,
        )
        for index, each in enumerate(listed)
    ]


def _type(spec: Mapping[str, Any]) -> str:
    """Return the type of a component of ``v1alpha1``; "" for a worker that says no part of its own."""
    kind = spec.get("subComponentType") or spec.get("componentType") or ""
    return "" if kind == "worker" else str(kind)


def _why_not_ready(document: Object) -> str:
    conditions = value_at(document, "status", "conditions") or ()
    ready: Mapping[str, Any] = next((each for each in conditions if each.get("type") == "Ready"), {})
    phase = value_at(document, "status", "rollingUpdate", "phase")
    if phase not in (None, "", "Completed"):
        return f"a rolling update is {phase}"
    if ready.get("status") == "True":
        return ""
    said = ready.get("message") or ready.get("reason") or "its status has no such condition"
    return f"its condition Ready is {ready.get('status', 'not there')}: {said}"


def _gpus(component: _Component, nodes: int) -> float:
    if known := integer_at(component.status, "gpusPerReplica"):
        return known
    if limit := value_at(component.spec, "resources", "limits", "gpu"):
        return float(limit) * nodes
    template = component.spec.get("podTemplate") or {"spec": component.spec.get("extraPodSpec") or {}}
    main = value_at(template, "spec", "mainContainer")
    return (gpus_of_pod(template) + (gpus_of_pod({"spec": {"containers": [main]}}) if main else 0)) * nodes


def _model(component: _Component) -> str:
    if named := component.status.get("servedModelName"):
        return str(named)
    main = value_at(component.spec, "extraPodSpec", "mainContainer") or {}
    words = (*(main.get("command") or ()), *(main.get("args") or ()))
    return model_of_command(words) or model_of_pod(component.spec.get("podTemplate") or {})


def _is_of(pod: Object, role: Role, name: str) -> bool:
    labels = value_at(pod, "metadata", "labels") or {}
    if COMPONENT_LABEL in labels:
        return bool(labels[COMPONENT_LABEL].lower() == name.lower())
    return any(labels.get(label) == role.value for label in TYPE_LABELS)
