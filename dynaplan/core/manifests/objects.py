"""The objects around the pods: what each is called, its labels, and the plain kinds."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

from dynaplan.core.manifests.exported import Document, ExportedDeployment
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.settings.servers import KUBERNETES

ROLE_LABEL = "dynaplan.io/role"
"""The label by which the planner finds what it scales: ``prefill`` or ``decode``."""

NAMESPACE_LABEL = "dynaplan.io/namespace"
"""The label that says of which deployment an object is, where a Kubernetes namespace has several."""

LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
"""The form of a label's value (Kubernetes, "Labels and Selectors")."""

INSTANCE_LABEL, COMPONENT_LABEL = "app.kubernetes.io/instance", "app.kubernetes.io/component"

SCALED = (Role.PREFILL, Role.DECODE)
"""The roles that the planner scales."""


def labels(deployment: ExportedDeployment, component: str = "") -> dict[str, str]:
    """Return the labels of an object; with a component those of its pods, too."""
    found = {
        "app.kubernetes.io/name": "dynaplan",
        INSTANCE_LABEL: deployment.name,
        "app.kubernetes.io/managed-by": "dynaplan",
    }
    if component:
        found[COMPONENT_LABEL] = component
    if component in [role.value for role in SCALED]:
        found[ROLE_LABEL] = component
        if LABEL_VALUE.fullmatch(deployment.graph_namespace):
            found[NAMESPACE_LABEL] = deployment.graph_namespace
    return found


def intent_map_name(graph_namespace: str) -> str:
    """Return the name of the ConfigMap in which a planner writes its newest decision down."""
    name = re.sub(r"[^a-z0-9.-]+", "-", graph_namespace.lower()).strip("-.")
    return f"dynaplan-{name or 'planner'}"


STORE_MAP = "dynaplan-store"
"""The name of the ConfigMap with the shared keys of the key-value store ``kubernetes``."""

DISCOVERY_LABELS = {
    "nvidia.com/dynamo-discovery-backend": "kubernetes",
    "nvidia.com/dynamo-discovery-enabled": "true",
}
"""The labels of Services, copied to their EndpointSlices, by which Dynamo finds the pods that are ready."""


PLANNER, DISCOVERY = "planner", "discovery"
"""Accounts: the planner's, and that of frontends and workers which find each other by the cluster's API."""


def account_of(deployment: ExportedDeployment, role: Role) -> str:
    """Return which account the pods of a role have; empty for none."""
    if role is Role.PLANNER:
        return PLANNER
    return DISCOVERY if deployment.servers.store == KUBERNETES else ""


def selector(deployment: ExportedDeployment, component: str) -> dict[str, str]:
    """Return the labels that select a component's pods: they must never change."""
    return {INSTANCE_LABEL: deployment.name, COMPONENT_LABEL: component}


def metadata(deployment: ExportedDeployment, name: str, component: str = "") -> Document:
    """Return the metadata of an object of that name."""
    place = {"namespace": deployment.namespace} if deployment.namespace else {}
    return {"name": name, **place, "labels": labels(deployment, component)}


def config_map(
    deployment: ExportedDeployment,
    part: str,
    texts: Mapping[str, str],
    files: Mapping[str, bytes] | None = None,
) -> Document:
    """Return a ConfigMap with these texts, and files that need not be text."""
    binary = {key: base64.b64encode(content).decode() for key, content in (files or {}).items()}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(deployment, deployment.object_name(part)),
        **({"data": dict(texts)} if texts else {}),
        **({"binaryData": binary} if binary else {}),
    }


def secret(deployment: ExportedDeployment) -> Document:
    """Return the Secret with everything that nobody else may read."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(deployment, deployment.object_name("secret")),
        "type": "Opaque",
        "stringData": dict(deployment.secrets),
    }


def service(
    deployment: ExportedDeployment, component: str, port_name: str, port: int, *, has_address: bool = True
) -> Document:
    """Return the Service by which a component is found inside the cluster.

    One without an address is there for its EndpointSlices, which say which pods are ready.
    """
    described = metadata(deployment, deployment.object_name(component), component)
    if deployment.servers.store == KUBERNETES:
        described["labels"] |= DISCOVERY_LABELS
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": described,
        "spec": {
            **({} if has_address else {"clusterIP": "None"}),
            "selector": selector(deployment, component),
            "ports": [{"name": port_name, "port": port, "targetPort": port_name, "protocol": "TCP"}],
        },
    }


def workload(
    deployment: ExportedDeployment, component: str, replicas: int, template: Document, strategy: Document
) -> Document:
    """Return the Deployment (Kubernetes' kind) of a component's pods."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(deployment, deployment.object_name(component), component),
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": selector(deployment, component)},
            "strategy": strategy,
            "template": template,
        },
    }
