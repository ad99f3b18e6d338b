"""All manifests of a deployment, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynaplan.core.manifests.exported import Document, ExportedDeployment, ExportedService
from dynaplan.core.manifests.nats_server import nats_documents
from dynaplan.core.manifests.objects import (
    DISCOVERY,
    PLANNER,
    SCALED,
    config_map,
    metadata,
    secret,
    service,
    workload,
)
from dynaplan.core.manifests.permissions import (
    NVIDIA,
    account_with_rights,
    discovery_rules,
    inside_only,
    operator_rules,
    scaling_rules,
)
from dynaplan.core.manifests.pods import CONFIG_FILE, PORTS, file_key, pod_template
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.settings.servers import KUBERNETES

NONE, DYNAMO = "none", "dynamo"
OPERATORS = (NONE, DYNAMO)
"""Makers of the pods: Kubernetes' own controllers, or Dynamo's operator of a DynamoGraphDeployment."""

LARGEST_CONFIG_MAP_BYTES = 1 << 20
"""The most that a ConfigMap may hold, all keys and values together; the API server refuses more."""


def manifests(deployment: ExportedDeployment, operator: str = NONE) -> list[Document]:
    """Return the manifests of a deployment for that operator."""
    by_dynamo = operator == DYNAMO
    return [
        *_accounts(deployment, operator_rules(deployment) if by_dynamo else scaling_rules(deployment)),
        secret(deployment),
        config_map(deployment, "graph", {CONFIG_FILE: deployment.config}),
        *_planner_files(deployment),
        *(nats_documents(deployment) if deployment.servers.is_own_nats else ()),
        inside_only(deployment),
        *_services_of_workers(deployment),
        *([_graph_deployment(deployment)] if by_dynamo else _workloads(deployment)),
    ]


def _accounts(deployment: ExportedDeployment, planning: Sequence[Document]) -> list[Document]:
    """Return the accounts and their rights: ``planning`` are those to scale."""
    finding = discovery_rules() if deployment.servers.store == KUBERNETES else []
    has_planner = deployment.of_role(Role.PLANNER) is not None
    return [
        *(account_with_rights(deployment, PLANNER, [*planning, *finding]) if has_planner else ()),
        *(account_with_rights(deployment, DISCOVERY, finding) if finding else ()),
    ]


def _services_of_workers(deployment: ExportedDeployment) -> list[Document]:
    """Return a Service of each role of workers, where its EndpointSlices say which pods get requests."""
    if deployment.servers.store != KUBERNETES:
        return []
    roles = [role for role in SCALED if deployment.of_role(role)]
    return [service(deployment, role.value, "http", PORTS[role], has_address=False) for role in roles]


def _planner_files(deployment: ExportedDeployment) -> list[Document]:
    if not deployment.planner_files:
        return []
    files = {file_key(path): content for path, content in deployment.planner_files.items()}
    return [config_map(deployment, "planner", {}, files)]


def _workloads(deployment: ExportedDeployment) -> list[Document]:
    frontend = Role.FRONTEND.value
    return [
        service(deployment, frontend, "http", PORTS[Role.FRONTEND]),
        *(
            workload(
                deployment,
                each.role.value,
                each.replicas,
                pod_template(deployment, each),
                _strategy(each.role),
            )
            for each in deployment.services
        ),
    ]


def _strategy(role: Role) -> Document:
    """Return how pods are replaced: workers never need a GPU more, and there are never two planners."""
    if role is Role.PLANNER:
        return {"type": "Recreate"}
    surge = (0, 1) if role in SCALED else (1, 0)
    return {
        "type": "RollingUpdate",
        "rollingUpdate": dict(zip(("maxSurge", "maxUnavailable"), surge, strict=True)),
    }


def _graph_deployment(deployment: ExportedDeployment) -> Document:
    """Return the DynamoGraphDeployment: each service is one of its components, named by its role."""
    spec: dict[str, Any] = {"components": [_component(deployment, each) for each in deployment.services]}
    if deployment.framework:
        spec["backendFramework"] = deployment.framework
    return {
        "apiVersion": f"{NVIDIA}/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": metadata(deployment, deployment.name),
        "spec": spec,
    }


def _component(deployment: ExportedDeployment, each: ExportedService) -> Document:
    if each.role is Role.PLANNER:
        each = replace(each, variables={**each.variables, "DYN_PARENT_DGD_K8S_NAME": deployment.name})
    return {
        "name": each.role.value,
        "type": each.role.value,
        "replicas": each.replicas,
        **({"scalingAdapter": {}} if each.role in SCALED else {}),
        "podTemplate": pod_template(deployment, each, has_shared_memory=True),
    }


def too_large(documents: Sequence[Document]) -> list[str]:
    """Return the names of the ConfigMaps that no API server takes."""
    sizes = {
        each["metadata"]["name"]: sum(
            len(key) + len(value.encode())
            for key, value in {**each.get("data", {}), **each.get("binaryData", {})}.items()
        )
        for each in documents
        if each["kind"] == "ConfigMap"
    }
    return [name for name, size in sizes.items() if size > LARGEST_CONFIG_MAP_BYTES]
